"""A token's frame that is spliced as bytes is the one that decoding and encoding would give."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from clairai.match.choice_scores import MediaSpan
from clairai.proxy.completions.chunk import TokenFrame
from clairai.proxy.completions.completion_request import ClairaiOptions
from clairai.proxy.completions.merger import Merger
from clairai.proxy.completions.request_scores import (
    RequestScores,
    RowBatch,
    ScoreBudget,
    ScoreSlice,
)
from clairai.proxy.completions.stream_writers import (
    OpenAIStreamWriter,
    QuietStreamWriter,
    encode_scores,
)
from clairai.proxy.completions.token_text import TokenTexts
from clairai.proxy.schema import ProbeScores
from clairai.wire import ring_messages
from tests.http.fake import BANK, TOKEN_BYTES, score
from tests.http.vllm_wire import chat_chunk, frame, role_chunk, text_chunk, usage_chunk

PROMPT = [1, 2, 3]


class DecodingWriter(OpenAIStreamWriter):
    """The same writer, for which no frame is ordinary."""

    def write_token(self, frame: bytes) -> None:
        del frame


class DecodingQuietWriter(QuietStreamWriter):
    def write_token(self, frame: bytes) -> None:
        del frame


DECODING = {OpenAIStreamWriter: DecodingWriter, QuietStreamWriter: DecodingQuietWriter}


def written(
    kind: type[OpenAIStreamWriter],
    frames: Iterable[bytes],
    *,
    keeps_token_ids: bool,
    scored: bool = True,
    options: ClairaiOptions | None = None,
) -> list[bytes]:
    """What the client gets of these frames; the row of each token is there before its frame."""
    options = ClairaiOptions() if options is None else options
    budget = ScoreBudget(100_000)
    scores = RequestScores(
        7, options, max_scores=100_000, budget=budget, is_attached=lambda: scored
    )
    writer = kind(scores, keeps_token_ids=keeps_token_ids, texts=TokenTexts(TOKEN_BYTES))
    merger = Merger(scores, writer, max_wait_s=1.0, clock=lambda: 0.0)
    for choice, position in [(c, p) for c in range(3) for p in range(40)] if scored else ():
        row: list[Any] = [score(5, position)]
        scores.add_rows(
            RowBatch(7, choice, BANK, [position], [5], [ring_messages.DECODE], [1], row)
        )
    return [item for one in frames for item in merger.add_frame(one)]


def chat(*tokens: dict[str, Any]) -> list[bytes]:
    first = [role_chunk(choice, PROMPT if choice == 0 else None) for choice in range(2)]
    return [*map(frame, [*first, *tokens]), b"data: [DONE]\n\n"]


def said(text: str, ids: list[int] | None = None, choice: int = 0, **more: Any) -> dict[str, Any]:
    return chat_chunk(choice, [5] if ids is None else ids, {"content": text}, **more)


LOGPROBS = {"content": [{"token": "a", "logprob": -0.5, "bytes": [97], "top_logprobs": []}]}
TOOL = {"tool_calls": [{"index": 0, "function": {"arguments": '{"a'}}]}
ORDINARY = {
    "one token": chat(said("a"), said(" b"), said("c")),
    "several tokens in a chunk": chat(said("a", [5, 5]), said("b", [5, 5, 5]), said("c")),
    "several choices": chat(said("a"), said("b", choice=1), said("c"), said("d", choice=1)),
    "text beyond ASCII": chat(said("ü"), said("🙂"), said("\u2028"), said("한")),
    "text with escapes": chat(said('"'), said("\\"), said("\n\t\r\b\f"), said('\\"}],{')),
    "text that looks like fields": chat(said('","token_ids":[9]}]}'), said("data: {}\n\n")),
    "reasoning": chat(
        chat_chunk(0, [5], {"reasoning": "hm"}), chat_chunk(0, [5], {"reasoning_content": "so"})
    ),
    "no text": chat(said(""), said("")),
    "a completion": [
        frame(text_chunk(0, [5], "a", prompt_ids=PROMPT)),
        *(frame(text_chunk(0, [5], text)) for text in ("b", "c\n", "é")),
    ],
}
UNUSUAL = {
    "nothing but ids": chat(chat_chunk(0, [5], {}), said("a")),
    "no ids": chat(chat_chunk(0, None, {"content": "a"})),
    "an empty list of ids": chat(said("a", [])),
    "log probabilities": chat(said("a", logprobs=LOGPROBS), said("b", logprobs=LOGPROBS)),
    "a call of a tool": chat(chat_chunk(0, [5], TOOL), chat_chunk(0, [5], TOOL)),
    "two fields in a delta": chat(chat_chunk(0, [5], {"content": "a", "reasoning": "b"})),
    "an end": chat(said("a", finish="length"), said("b", choice=1, finish="stop", stop_reason="x")),
    "escapes that a decoder has to judge": chat(said("\x07"), said("\x1f")),
    "usage in each chunk": chat({**said("a"), "usage": {"completion_tokens": 1}}),
    "an echo": chat({**said("a"), "clairai": {"weights": 3}}),
    "usage alone": [*chat(said("a"))[:-1], frame(usage_chunk(3, 1, is_chat=True))],
    "two choices in a chunk": chat({**said("a"), "choices": [*said("a")["choices"]] * 2}),
    "no prompt yet": [frame(said("a")), frame(said("b"))],
}


@pytest.mark.parametrize("keeps_token_ids", [False, True])
@pytest.mark.parametrize("scored", [False, True])
@pytest.mark.parametrize("kind", DECODING)
@pytest.mark.parametrize("name", [*ORDINARY, *UNUSUAL])
def test_spliced_and_decoded_frames_are_equal(
    name: str, kind: type[OpenAIStreamWriter], scored: bool, keeps_token_ids: bool
) -> None:
    frames = (ORDINARY | UNUSUAL)[name]
    options = {"scored": scored, "keeps_token_ids": keeps_token_ids}
    spliced = written(kind, frames, **options)  # type: ignore[arg-type]
    assert spliced == written(DECODING[kind], frames, **options)  # type: ignore[arg-type]


@pytest.mark.parametrize("name", ORDINARY)
def test_an_ordinary_frame_is_spliced_and_carries_the_scores_of_earlier_tokens(name: str) -> None:
    frames = [one for one in ORDINARY[name] if b'"role"' not in one and b"[DONE]" not in one]
    ordinary = [one for one in frames if b'"prompt_token_ids":[' not in one]
    assert [one for one in ordinary if TokenFrame.match(one) is None] == []
    if name != "no text":
        assert b'"probe_scores"' in b"".join(
            written(OpenAIStreamWriter, ORDINARY[name], keeps_token_ids=False)
        )


@pytest.mark.parametrize("name", [name for name in UNUSUAL if name != "no prompt yet"])
def test_an_unusual_frame_is_decoded(name: str) -> None:
    plain = frame(said("a"))
    odd = [one for one in UNUSUAL[name] if one != plain and b'"role"' not in one]
    assert odd
    assert [one for one in odd if TokenFrame.match(one) is not None] == []


PLAIN = frame(said("a"))


@pytest.mark.parametrize(
    "broken",
    [
        PLAIN[:-1],
        PLAIN + b"\n",
        PLAIN.replace(b'"a"', b'"a\x01"'),
        PLAIN.replace(b'"a"', b'"\\x"'),
        PLAIN.replace(b'"a"', b'"\\ud800"'),
        PLAIN.replace(b'"a"', b'"\xff"'),
        PLAIN.replace(b"[5]", b"[05]"),
        PLAIN.replace(b"[5]", b"[-5]"),
        PLAIN.replace(b"[5]", b"[5,]"),
        PLAIN.replace(b'"index":0', b'"index":00'),
        PLAIN.replace(b'"object"', b'"choices":[],"object"'),
        PLAIN.replace(b'"model":"toy"', b'"model":{}'),
        PLAIN.replace(b"data: ", b"data:"),
        PLAIN.replace(b"\n\n", b"\r\n\r\n"),
    ],
)
def test_what_a_decoder_would_read_otherwise_is_left_to_it(broken: bytes) -> None:
    assert TokenFrame.match(PLAIN) is not None
    assert TokenFrame.match(broken) is None


@given(
    st.lists(
        st.tuples(
            st.text(max_size=12), st.lists(st.just(5), min_size=1, max_size=3), st.integers(0, 2)
        ),
        max_size=8,
    ),
    st.booleans(),
)
@settings(max_examples=200, deadline=None, derandomize=True)
def test_any_text_is_spliced_as_it_is_decoded(
    tokens: list[tuple[str, list[int], int]], keeps_token_ids: bool
) -> None:
    made = [said(text, ids, choice) for text, ids, choice in tokens if text.isprintable()]
    frames = chat(*made)
    spliced = written(OpenAIStreamWriter, frames, keeps_token_ids=keeps_token_ids)
    assert spliced == written(DecodingWriter, frames, keeps_token_ids=keeps_token_ids)


def test_the_scores_of_a_prompt_go_with_the_first_token_after_them() -> None:
    """So until they are written no frame of that request is spliced."""
    options = ClairaiOptions(prompt_scores=True)
    scores = RequestScores(
        7, options, max_scores=100, budget=ScoreBudget(100), is_attached=lambda: True
    )
    writer = OpenAIStreamWriter(scores, keeps_token_ids=False, texts=TokenTexts(TOKEN_BYTES))
    merger = Merger(scores, writer, max_wait_s=1.0, clock=lambda: 0.0)
    first, _, early, late, _ = chat(said("a"), said("b"))
    assert b'"prompt_scores"' not in b"".join([*merger.add_frame(first), *merger.add_frame(early)])
    rows: list[Any] = [score(token, at) for at, token in enumerate(PROMPT)]
    phases = [ring_messages.PREFILL] * len(PROMPT)
    positions, spans = list(range(len(PROMPT))), [1] * len(PROMPT)
    media = [0, ring_messages.IMAGE, *[0] * len(PROMPT)][: len(PROMPT)]
    scores.add_rows(RowBatch(7, 0, BANK, positions, PROMPT, phases, spans, rows, media))
    written = b"".join(merger.add_frame(late))
    assert b'"prompt_scores"' in written
    assert b'"media":[{"kind":"image","start":1,"span":1}]' in written
    assert scores.is_streaming


def test_a_slice_that_is_split_keeps_the_media_of_each_part() -> None:
    image = ring_messages.IMAGE
    spans = (MediaSpan(image, 1, 4), MediaSpan(ring_messages.AUDIO, 7, 1))
    whole = ScoreSlice(("a",), 0, [[0.0]] * 8, (), (), spans)
    parts = [part.fields().get("media") for part in whole.split(3)]
    assert parts == [
        [{"kind": "image", "start": 1, "span": 2}],
        [{"kind": "image", "start": 3, "span": 2}],
        [{"kind": "audio", "start": 7, "span": 1}],
    ]
    assert "media" not in whole.split(1)[0].fields()


@pytest.mark.parametrize("weights", [(), (3,), (3, 4)])
@pytest.mark.parametrize("lost", [(), (1,)])
def test_scores_that_are_written_out_are_those_of_the_schema(
    weights: tuple[int, ...], lost: tuple[int, ...]
) -> None:
    rows: list[list[float | None]] = [[0.25, 1e-7, None], [-1.0, 3.0, 0.1]]
    made = ScoreSlice(("a", 'b"', "ü"), 17, rows, lost, weights)
    assert encode_scores(made) == msgspec.json.encode(ProbeScores(**made.fields()))


def test_who_waits_for_the_last_rows_hurries_the_feed() -> None:
    hurried: list[str] = []
    scores = RequestScores(
        7,
        ClairaiOptions(),
        max_scores=100,
        budget=ScoreBudget(100),
        is_attached=lambda: True,
        hurry=lambda: hurried.append("now"),
    )
    writer = OpenAIStreamWriter(scores, keeps_token_ids=False, texts=None)
    merger = Merger(scores, writer, max_wait_s=1.0, clock=lambda: 0.0)
    for one in chat(said("a"), said("b"))[:-1]:
        merger.add_frame(one)
    assert hurried == []
    assert merger.add_frame(frame(said("c", finish="stop"))) == []
    assert hurried == ["now"]
