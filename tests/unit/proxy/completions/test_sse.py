"""Frames of an event stream, however its bytes are cut."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from clairai.proxy.completions.sse import FrameSplitter, FrameTooLong, frame_data


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
