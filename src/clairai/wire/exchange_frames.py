"""The frames of requests and responses that share one connection.

A proxy sends requests over it and an API server answers them, any number at once; each request and
its response are one exchange, with a number that the proxy chooses. A frame is a header and its
content: of REQUEST and HEAD a message, of BODY bytes of the response.
"""

from __future__ import annotations

import struct
from typing import Final, NamedTuple

import msgspec

VERSION: Final = 1
SOCKET_KIND: Final = "requests"
# The folder in which API servers listen for such connections; unset: they do not.
FOLDER_VARIABLE: Final = "CLAIRAI_REQUEST_SOCKETS"
MAX_CONTENT_BYTES: Final = 1 << 20  # of one frame; a longer body takes several
# From the API server, when it has accepted the connection.
HELLO: Final = 0
# From the proxy: a request; its client has gone; its client reads too slowly, and reads again.
REQUEST: Final = 1
CANCEL: Final = 2
PAUSE: Final = 3
RESUME: Final = 4
# From the API server: the head of a response, bytes of its body, its end, an end too early.
HEAD: Final = 5
BODY: Final = 6
END: Final = 7
BROKEN: Final = 8
_HEADER: Final = struct.Struct("<IIB")  # bytes of the content, exchange, kind


class FrameError(ValueError):
    """Bytes that are no frame: the other side speaks another protocol."""


class Hello(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """The content of HELLO."""

    version: int = VERSION


class Request(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """The content of REQUEST; `target` is a path and a query, as in HTTP."""

    method: str
    target: str
    headers: tuple[tuple[str, str], ...]
    body: bytes


class ResponseHead(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """The content of HEAD."""

    status: int
    headers: tuple[tuple[bytes, bytes], ...]


class Frame(NamedTuple):
    exchange: int
    kind: int
    content: bytes


def make_frame(exchange: int, kind: int, content: bytes = b"") -> bytes:
    return _HEADER.pack(len(content), exchange, kind) + content


class FrameReader:
    """Cuts the bytes of a connection into frames."""

    def __init__(self) -> None:
        self._rest = b""

    def read(self, data: bytes) -> list[Frame]:
        """The frames that are whole now; FrameError if one is longer than any may be."""
        raw = self._rest + data if self._rest else data
        frames, at, end = [], 0, len(raw)
        while end - at >= _HEADER.size:
            length, exchange, kind = _HEADER.unpack_from(raw, at)
            if length > MAX_CONTENT_BYTES:
                raise FrameError(f"a frame of {length} bytes, may have {MAX_CONTENT_BYTES}")
            begin = at + _HEADER.size
            if end - begin < length:
                break
            at = begin + length
            frames.append(Frame(exchange, kind, raw[begin:at]))
        self._rest = raw[at:]
        return frames
