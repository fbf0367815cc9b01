"""What the engine's server answers: event streams, chunks, token texts, tokenized chats."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Coroutine
from contextlib import asynccontextmanager
from http import HTTPStatus
from types import SimpleNamespace
from typing import Any, cast

import msgspec

from clairai.errors import RequestError
from clairai.fields.positions import MessagePosition
from clairai.proxy.completions.chunk import edit_chunk, read_chunk, read_echo
from clairai.proxy.completions.sse import FrameSplitter, FrameTooLong, data_frame, frame_data
from clairai.proxy.completions.token_text import TokenBytes, TokenTextDecoder, TokenTexts
from clairai.proxy.engine_facts import BankChanges, EngineFacts
from clairai.proxy.responses import HttpRefusal
from clairai.proxy.upstream import UpstreamGone
from clairai.server.chat_positions import resolve_messages, tokenize_through
from tests.fuzz.spans import JSON_VALUES, json_spans
from tests.fuzz.target import Target

FRAME_LIMIT = 512
MALFORMED = (msgspec.MsgspecError, UnicodeDecodeError)


def targets() -> list[Target]:
    shared: dict[str, Any] = {"find_spans": json_spans, "values": JSON_VALUES}
    chunks = [json.dumps(chunk).encode() for chunk in _chunks()]
    stream = b"".join(map(data_frame, chunks)) + b": ping\n\ndata: [DONE]\r\n\r\n"
    return [
        Target("event_stream", parse_stream, [stream, stream[:300]], (FrameTooLong,), share=0.5),
        Target("chunk", parse_chunk, chunks, (), share=4.0, **shared),
        Target("token_texts", parse_texts, _tables(), MALFORMED, share=2.0, **shared),
        Target("upstream_facts", read_facts, _facts(), (HttpRefusal, UpstreamGone), **shared),
        Target("tokenized_chat", parse_chat, _answers(), (RequestError,), share=1.0, **shared),
    ]


def _chunks() -> list[dict[str, Any]]:
    delta = {"role": "assistant", "content": "hé"}
    choice = {"index": 0, "delta": delta, "finish_reason": None, "token_ids": [5, 6]}
    echo = {"steering": [{"vector": "v"}], "stop": [], "capture": {"id": "0"}, "weights": 3}
    usage = {"prompt_tokens": 3, "completion_tokens": 2}
    head = {"id": "c", "model": "m", "object": "chat.completion.chunk"}
    return [
        head | {"choices": [choice], "prompt_token_ids": [1, 2], "clairai": echo},
        head | {"choices": [choice | {"index": 1, "stop_reason": 2, "logprobs": {"content": []}}]},
        head | {"choices": [], "usage": usage},
        {"choices": [{"index": 0, "text": "a", "token_ids": [5], "prompt_token_ids": [1]}]},
        {"error": {"message": "x", "code": 400}},
    ]


def _tables() -> list[bytes]:
    texts = [b"a", "é".encode()[:1], "é".encode()[1:], b"<s>", "日本".encode(), b"\xff", b""]
    return [msgspec.json.encode(TokenBytes(texts)), msgspec.json.encode(TokenBytes([]))]


def _facts() -> list[bytes]:
    """The white space in front says which question it answers."""
    return [
        b' {"data": [{"name": "p"}], "version": 1}',
        b'\n{"data": [{"id": "m", "object": "model"}]}',
        b'\t{"tokens": ["YQ==", ""]}',
    ]


def _answers() -> list[bytes]:
    tokens = {"count": 4, "max_model_len": 9, "tokens": [1, 2, 3, 4]}
    refusal = {"error": {"message": "no"}}
    return [json.dumps(one).encode() + b" " for one in (tokens, tokens, refusal)]


def parse_stream(data: bytes) -> None:
    """However the bytes arrive, the frames are the same, and hold all of the bytes."""
    whole = FrameSplitter(FRAME_LIMIT)
    frames = whole.feed(data)
    assert b"".join(frames) + whole.rest == data
    step = 32 + (data[0] if data else 0) % 61
    pieces = FrameSplitter(FRAME_LIMIT)
    cut = [f for at in range(0, len(data), step) for f in pieces.feed(data[at : at + step])]
    assert b"".join(cut) + pieces.rest == data
    assert cut == frames
    for frame in frames:
        found = frame_data(frame)
        assert found is None or len(found) <= len(frame)


def parse_chunk(data: bytes) -> None:
    """Fields that are not ours keep their values; a chunk that was read can be written."""
    chunk = read_chunk(data_frame(data), data)
    if chunk is None:
        return
    view = chunk.view
    texts = [choice.new_text() for choice in view.choices]
    assert all(isinstance(text, str) for text in texts)
    assert view.prompt is None or isinstance(view.prompt, list)
    if view.echo is not None:
        assert read_echo(view.echo).is_bound in (True, False)
    added = {choice.index: {"probe_scores": [1.0]} for choice in view.choices}
    for keeps_token_ids in (True, False):
        edited = edit_chunk(chunk, added, keeps_token_ids=keeps_token_ids)
        if edited is None:
            continue
        again = read_chunk(b"", edited)
        assert again is not None
        assert [choice.new_text() for choice in again.view.choices] == texts
        assert (again.view.id, again.view.model) == (view.id, view.model)


def parse_texts(data: bytes) -> None:
    """The texts of tokens, joined, are the text of their bytes."""
    table = msgspec.json.decode(data, type=TokenBytes).tokens
    texts = TokenTexts(table)
    token_ids = [*range(len(table)), -1, len(table), *range(len(table))[::-1]]
    raw = b"".join(map(texts.token_bytes, token_ids))
    assert "".join(texts.decode(token_ids)) == raw.decode(errors="replace")
    decoder = TokenTextDecoder(texts)
    grown = [text for one in token_ids[:-1] for text in decoder.decode([one])]
    grown += decoder.decode(token_ids[-1:], is_end=True)
    assert grown == texts.decode(token_ids)


class OneAnswer:
    """An upstream that answers every question with these bytes."""

    num_outages = 0

    def __init__(self, data: bytes) -> None:
        self._data = data

    @asynccontextmanager
    async def ask(self, _method: str, _path: str) -> AsyncIterator[SimpleNamespace]:
        yield SimpleNamespace(status=HTTPStatus.OK)

    async def read_body(self, _response: object) -> bytes:
        return self._data


def read_facts(data: bytes) -> None:
    """Whatever upstream answers, the proxy reads it or says that it is something else."""
    feed = SimpleNamespace(bank=None, epochs=(1,))
    facts = EngineFacts(cast(Any, OneAnswer(data)), cast(Any, feed), BankChanges())
    if data.startswith(b" "):
        run_now(facts.check_probes(("p",)))
    elif data.startswith(b"\n"):
        run_now(facts.model())
    else:
        run_now(facts.token_texts())


def parse_chat(data: bytes) -> None:
    """Whatever vLLM's tokenizer route answers, a message has a span or the request is refused."""
    status = 200 if len(data) % 4 else 400

    async def app(_scope: Any, receive: Any, send: Any) -> None:
        await receive()
        await send({"type": "http.response.start", "status": status, "headers": []})
        await send({"type": "http.response.body", "body": data})

    tokenize = tokenize_through(app, {"type": "http", "headers": []})
    fields = {"messages": msgspec.Raw(b"[1,2,3]")}
    (span,) = run_now(resolve_messages((MessagePosition(0),), fields, tokenize))
    assert span.first >= 0


def run_now(work: Coroutine[Any, Any, Any]) -> Any:
    """The result of a coroutine that waits for nothing."""
    try:
        work.send(None)
    except StopIteration as done:
        return done.value
    raise AssertionError("it waits")
