"""Splits the bytes of a server-sent event stream into frames, and makes frames."""

from __future__ import annotations

import re
from typing import Final

_END: Final = re.compile(rb"\r\n\r\n|\n\n|\r\r")
_END_BYTES: Final = 3
DONE: Final = b"[DONE]"


class FrameTooLong(Exception):
    """A frame is longer than the limit."""


class FrameSplitter:
    """Splits after each empty line, and keeps at most `limit` bytes of an unfinished frame."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._rest = b""

    def feed(self, raw: bytes) -> list[bytes]:
        """The frames that are complete now, each with its empty line."""
        if raw.find(b"\n\n") + 2 == len(raw) > 1 and not self._rest and b"\r" not in raw:
            return [raw]  # one frame, as vLLM sends each token
        whole = self._rest + raw if self._rest else raw
        # Bytes searched before hold no end of a frame, except one that was cut in two.
        looked = max(0, len(self._rest) - _END_BYTES)
        frames, begin = [], 0
        for end in _END.finditer(whole, looked):
            frames.append(whole[begin : end.end()])
            begin = end.end()
        self._rest = whole[begin:]
        if len(self._rest) > self._limit:
            raise FrameTooLong(len(self._rest))
        return frames

    @property
    def rest(self) -> bytes:
        """The unfinished frame."""
        return self._rest


def frame_data(frame: bytes) -> bytes | None:
    """The data of a frame; None for a comment. An OpenAI stream has one line of data a frame."""
    if frame.startswith(b"data: "):  # as vLLM writes it
        body = frame[6:].rstrip(b"\r\n")
        if b"\n" not in body and b"\r" not in body:
            return body
    lines = [line for line in frame.splitlines() if line.startswith(b"data:")]
    parts = [line.removeprefix(b"data:").removeprefix(b" ") for line in lines]
    return b"\n".join(parts) if parts else None


def data_frame(data: bytes) -> bytes:
    """A frame without a name."""
    return b"data: " + data + b"\n\n"


def named_frame(name: str, number: int, data: bytes) -> bytes:
    """A frame of a named run."""
    return b"id: %d\nevent: %s\ndata: %s\n\n" % (number, name.encode(), data)


PING: Final = b": ping\n\n"
