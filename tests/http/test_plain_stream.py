"""OpenAI's stream through the proxy: every token scored once, in order, and nothing else new."""

from __future__ import annotations

import json
import socket
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest

from tests.http import vllm_wire
from tests.http.answers import CHAT, TEXT, asking, chunks, collect_scores, expected, without_ours
from tests.http.fake import PROMPT, Exchange, answering
from tests.http.world import World, world

HELLO = [72, 101, 108, 108, 111]
BYE = [66, 121, 101]


def ask(w: World, path: str = CHAT, **body: Any) -> bytes:
    with w.client() as client:
        answer = client.post(path, json={**asking(), **body})
    assert answer.status_code == 200, answer.text
    return answer.content


@pytest.mark.parametrize("path", [CHAT, TEXT])
@pytest.mark.parametrize("at_once", [1, 2, 5])
def test_every_token_of_every_choice_is_scored_once(w: World, path: str, at_once: int) -> None:
    w.upstream.script = answering(HELLO, BYE, [33], at_once=at_once)
    found = collect_scores(chunks(ask(w, path, n=3)))
    for choice, ids in enumerate((HELLO, BYE, [33])):
        assert found[choice].scores == expected(ids)
        assert found[choice].lost == 0
        assert found[choice].text == bytes(ids).decode()
        assert found[choice].finish_reason == "length"


@pytest.mark.parametrize("path", [CHAT, TEXT])
@pytest.mark.parametrize("has_ring", [True, False])
def test_apart_from_our_field_the_bytes_are_upstreams(
    tmp_path: Path, path: str, has_ring: bool
) -> None:
    body = {"messages": [], "prompt": "Hi", "stream": True}
    body["stream_options"] = {"include_usage": True}
    with world(tmp_path, script=answering(HELLO), has_ring=has_ring) as w:
        with w.direct() as direct:
            plain = direct.post(path, json=body).content
        scored = ask(w, path, **body)
    assert without_ours(scored) == plain
    assert scored != plain
    assert collect_scores(chunks(scored))[0].lost == (0 if has_ring else 4)


@pytest.mark.parametrize("has_ring", [True, False])
def test_of_several_choices_each_keeps_its_own_order(tmp_path: Path, has_ring: bool) -> None:
    """The last chunk of one may come after chunks of others: it may wait, and they may not."""
    body = {"messages": [], "stream": True, "n": 2}
    with world(tmp_path, script=answering(HELLO, BYE), has_ring=has_ring) as w:
        with w.direct() as direct:
            plain = direct.post(CHAT, json=body).content.split(b"\n\n")
        scored = without_ours(ask(w, CHAT, **body)).split(b"\n\n")
    assert has_ring or scored == plain
    assert scored[-2:] == plain[-2:]
    for index in (b'"index":0', b'"index":1'):
        own = [[frame for frame in frames if index in frame] for frames in (plain, scored)]
        assert own[0] == own[1]
    assert len(scored) == len(plain)


def test_without_a_ring_scores_are_reported_as_lost(tmp_path: Path) -> None:
    with world(tmp_path, script=answering(HELLO), has_ring=False) as w:
        (one,) = collect_scores(chunks(ask(w, clairai={"probes": ["token"]}))).values()
    assert one.scores == [{"token": None}] * 5
    assert one.lost == 4  # the last token never had one


@pytest.mark.parametrize("path", [CHAT, TEXT])
def test_an_answer_that_is_not_streamed_carries_the_same(w: World, path: str) -> None:
    w.upstream.script = answering(HELLO, BYE)
    with w.client() as client:
        body = {**asking(prompt_scores=True), "stream": False, "n": 2}
        scored = client.post(path, json=body)
    with w.direct() as direct:
        plain = direct.post(path, json={**body, "clairai": None})
    found = collect_scores([scored.json()])
    assert [found[0].scores, found[1].scores] == [expected(HELLO), expected(BYE)]
    assert found[0].prompt is not None
    assert found[1].prompt is None
    assert without_ours(b"data: " + scored.content) == b"data: " + plain.content


@pytest.mark.parametrize("path", [CHAT, TEXT])
def test_prompt_scores_come_once_with_the_prompts_tokens(w: World, path: str) -> None:
    w.upstream.script = answering(HELLO, BYE)
    got = chunks(ask(w, path, clairai={"prompt_scores": True}, n=2))
    wanted = w.upstream.last.body["vllm_xargs"]["clairai"]
    carried = [choice for c in got for choice in c["choices"] if "prompt_scores" in choice]
    assert [choice["index"] for choice in carried] == [0]
    assert carried[0]["prompt_scores"] == {
        "names": ["token", "position"],
        "start": 0,
        "token_ids": PROMPT,
        "tokens": ["<|im_start|>", "H", "i", "<|im_end|>"],
        "scores": [[256.0, 0.0], [72.0, 1.0], [105.0, 2.0], [257.0, 3.0]],
    }
    assert '"prompt_scores":true' in wanted


def test_token_ids_that_the_client_asked_for_stay(w: World) -> None:
    w.upstream.script = answering(HELLO)
    got = chunks(ask(w, return_token_ids=True))
    assert got[0]["prompt_token_ids"] == PROMPT
    assert [choice["token_ids"] for c in got[1:] for choice in c["choices"]] == [[i] for i in HELLO]


def test_chunks_that_only_token_ids_made_are_not_passed_on(w: World) -> None:
    async def script(exchange: Exchange) -> None:
        await exchange.begin()
        exchange.rows(4, [72, 101])
        if exchange.shows_ids:  # a parser that has nothing to say yet
            await exchange.say(vllm_wire.chat_chunk(0, [72], {}))
        await exchange.tokens([101])
        await exchange.tokens([108], finish="stop")
        await exchange.end()

    w.upstream.script = script
    with w.direct() as direct:
        plain = direct.post(CHAT, json={"messages": [], "stream": True}).content
    scored = ask(w)
    assert without_ours(scored) == plain
    assert collect_scores(chunks(scored))[0].scores == expected([72, 101, 108])


@pytest.mark.parametrize(
    "number", ["-1e-05", "-0.0", "1E400", "0.1234567890123456789", "123456789012345678901234567890"]
)
def test_numbers_and_spaces_of_upstream_keep_their_bytes(w: World, number: str) -> None:
    async def script(exchange: Exchange) -> None:
        await exchange.begin()
        chunk = vllm_wire.dumps(exchange.chunk([72], finish="stop")).decode()
        odd = f'{{"content": [{{"logprob" :{number}, "token":"\\u0048"}}]}}'
        made = chunk.replace('"logprobs":null', f'"logprobs":{odd}')
        await exchange.send(f"data: {made}\n\n".encode())
        await exchange.end()

    w.upstream.script = script
    with w.direct() as direct:
        plain = direct.post(CHAT, json={"messages": [], "stream": True}).content
    assert without_ours(ask(w)) == plain
    assert number.encode() in plain


def raw_answer(w: World, version: str, *more: str) -> tuple[bytes, bytes]:
    """The head and the body of a scored stream, as they are on the wire until it is closed."""
    body = json.dumps(asking()).encode()
    head = [f"POST {CHAT} HTTP/{version}", "Host: localhost", "Content-Type: application/json"]
    head += [f"Content-Length: {len(body)}", "Connection: close", *more, "", ""]
    address = urlsplit(w.url)
    with socket.create_connection((address.hostname or "", address.port or 0)) as sock:
        sock.sendall("\r\n".join(head).encode() + body)
        raw = b"".join(iter(lambda: sock.recv(65536), b""))
    begin, _, rest = raw.partition(b"\r\n\r\n")
    return begin.lower(), rest


def test_parts_are_framed_as_chunks_for_a_client_that_knows_them(w: World) -> None:
    w.upstream.script = answering(HELLO)
    head, rest = raw_answer(w, "1.1")
    assert b"transfer-encoding: chunked" in head
    parts = []
    while (size := int(rest.split(b"\r\n", 1)[0], 16)) > 0:
        _, _, rest = rest.partition(b"\r\n")
        parts.append(rest[:size])
        assert rest[size : size + 2] == b"\r\n"
        rest = rest[size + 2 :]
    assert rest == b"0\r\n\r\n"
    assert collect_scores(chunks(b"".join(parts)))[0].scores == expected(HELLO)


def test_a_client_of_http_1_0_gets_no_chunks(w: World) -> None:
    w.upstream.script = answering(HELLO)
    head, rest = raw_answer(w, "1.0")
    assert b"transfer-encoding" not in head
    assert rest.startswith(b"data: ")
    assert collect_scores(chunks(rest))[0].scores == expected(HELLO)
