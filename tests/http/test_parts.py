"""Small parts of the proxy on their own: frames, numbers, texts, summaries, settings."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from clairai.errors import ConfigError
from clairai.match.choice_scores import ScoreColumns, ScoreRow
from clairai.proxy.completions.request_scores import ScoreSummary
from clairai.proxy.completions.sse import FrameSplitter, FrameTooLong, frame_data
from clairai.proxy.completions.token_text import TokenTextDecoder, TokenTexts
from clairai.proxy.handlers import load_examples
from clairai.proxy.proxy_settings import ProxySettings
from clairai.proxy.ring_feed import to_json_numbers
from clairai.proxy.upstream import request_headers, response_headers


@given(st.lists(st.sampled_from([b"data: x\n\n", b": c\r\n\r\n", b"a\r\r", b"e: 1\ndata: 2\n\n"])))
@settings(max_examples=60, deadline=None, derandomize=True)
def test_frames_are_whole_however_the_bytes_are_cut(frames: list[bytes]) -> None:
    raw = b"".join(frames) + b"rest"
    for size in (1, 3, len(raw)):
        splitter = FrameSplitter(100)
        found = [f for at in range(0, len(raw), size) for f in splitter.feed(raw[at : at + size])]
        assert b"".join(found) + splitter.rest == raw
        assert all(frame.endswith((b"\n\n", b"\r\r", b"\r\n\r\n")) for frame in found)
    assert len(found) == len(frames)


def test_a_frame_without_an_end_is_an_error() -> None:
    splitter = FrameSplitter(10)
    with pytest.raises(FrameTooLong):
        splitter.feed(b"x" * 11)


@pytest.mark.parametrize(
    ("frame", "data"),
    [
        (b"data: {}\n\n", b"{}"),
        (b"data:{}\r\n\r\n", b"{}"),
        (b"data: a\ndata: b\n\n", b"a\nb"),
        (b"id: 1\ndata: x\n\n", b"x"),
        (b": ping\n\n", None),
        (b"event: x\n\n", None),
    ],
)
def test_the_data_of_a_frame_is_found(frame: bytes, data: bytes | None) -> None:
    assert frame_data(frame) == data


@given(hnp.arrays(np.float32, (3, 4), elements=st.floats(width=32)))
@settings(max_examples=300, deadline=None, derandomize=True)
def test_a_score_that_is_read_back_is_the_same_float32(scores_RP: np.ndarray) -> None:
    made = json.loads(json.dumps(to_json_numbers(scores_RP), allow_nan=False))
    for row, wanted in zip(made, scores_RP, strict=True):
        for value, score in zip(row, wanted, strict=True):
            if np.isfinite(score):
                assert np.float32(value) == score
            else:
                assert value is None


def test_a_score_is_written_in_few_digits() -> None:
    text = json.dumps(to_json_numbers(np.array([[0.1, -12.3456789, 1e-7]], np.float32)))
    assert text == "[[0.100000001, -12.3456793, 1.00000001e-07]]"


def test_texts_complete_a_character_at_its_last_token() -> None:
    texts = TokenTexts([b"<s>", b"\xf0\x9f", b"\x99\x82", b"a", b"\xc3"])
    pieces = TokenTextDecoder(texts)
    assert pieces.decode([0, 1]) == ["<s>", ""]
    assert pieces.decode([2, 3]) == ["🙂", "a"]
    assert pieces.decode([4, 3, 4], is_end=True) == ["", "\ufffda", "\ufffd"]
    assert texts.decode([3, 99]) == ["a", "<99>"]
    assert TokenTextDecoder(texts).decode([], is_end=True) == []


def test_sums_leave_out_what_has_no_score() -> None:
    summary = ScoreSummary()
    row = ScoreRow(1, ScoreColumns(("a", "b"), (2.0, None)), [1.0, None])
    summary.add(0, [row, None, row._replace(values=[3.0, -1.0])])
    a, b, c = summary.results(("a", "b", "c"))
    assert (summary.count, summary.lost) == (2, 1)
    assert (a.mean, a.max, a.argmax, a.above) == (2.0, 3.0, 2, 1)
    assert (b.mean, b.max, b.argmax, b.above) == (-1.0, -1.0, 2, None)
    assert (c.mean, c.max, c.argmax, c.above) == (None, None, None, None)


@pytest.mark.parametrize("upstream", ["", "127.0.0.1:8000", "ftp://x", "http://", "file:///etc"])
def test_an_upstream_that_is_no_address_is_refused(upstream: str) -> None:
    with pytest.raises(ConfigError, match="upstream"):
        ProxySettings(upstream)


@pytest.mark.parametrize("origin", ["*", "null", "localhost:5173", "http://a/b", "http://"])
def test_an_origin_that_is_none_is_refused(origin: str) -> None:
    with pytest.raises(ConfigError, match="origin"):
        ProxySettings("http://127.0.0.1:1", allowed_origins=(origin,))


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "192.168.1.2", "gpu.lan", ""])  # noqa: S104
def test_a_host_that_others_can_reach_needs_a_key(host: str) -> None:
    with pytest.raises(ConfigError, match="API key"):
        ProxySettings("http://127.0.0.1:1", host=host)
    assert ProxySettings("http://127.0.0.1:1", host=host, api_key="k")


def test_an_empty_key_is_no_key() -> None:
    with pytest.raises(ConfigError, match="empty"):
        ProxySettings("http://127.0.0.1:1", api_key="")


def test_headers_between_two_hops_stay_there() -> None:
    given = [("Connection", "close, X-Hop"), ("X-Hop", "1"), ("X-Kept", "1"), ("Cookie", "c")]
    given += [("Host", "h"), ("Sec-Fetch-Site", "x"), ("Authorization", "k"), ("TE", "trailers")]
    assert request_headers(given, has_own_key=True, is_edited=False) == [("X-Kept", "1")]
    assert ("Authorization", "k") in request_headers(given, has_own_key=False, is_edited=False)
    answered = {"Server": "v", "Access-Control-Allow-Origin": "*", "X-Kept": "1", "Set-Cookie": "c"}
    assert response_headers(answered) == [("X-Kept", "1")]


def test_examples_come_from_a_file_that_is_checked(tmp_path: Path) -> None:
    path = tmp_path / "examples.json"
    example = {"title": "t", "probe": None, "messages": [{"role": "user", "content": "Hi"}]}
    path.write_text(json.dumps({"data": [example]}))
    assert json.loads(load_examples(path)) == {"data": [example]}
    assert json.loads(load_examples(None)) == {"data": []}
    for bad in ("[]", "{", '{"data": [{"title": 1}]}', '{"data": [], "more": 1}'):
        path.write_text(bad)
        with pytest.raises(ConfigError, match="examples"):
            load_examples(path)
