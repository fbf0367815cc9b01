"""Takes messages; gives frames for a stream socket (length u32, msgpack), and messages back."""

from __future__ import annotations

import struct
from typing import Final

import msgspec

from clairai.errors import HandshakeError
from clairai.wire import MAX_MESSAGE_BYTES, Message

MAX_REQUEST_BYTES: Final = 4096  # all that a reader may say at once
RECEIVE_BYTES: Final = 1 << 16
_LENGTH: Final = struct.Struct("<I")
_DECODER: Final[msgspec.msgpack.Decoder[Message]] = msgspec.msgpack.Decoder(Message)


def encode_frame(message: msgspec.Struct) -> bytes:
    """One frame; HandshakeError if the message is longer than a peer would take."""
    body = msgspec.msgpack.encode(message)
    if len(body) > MAX_MESSAGE_BYTES:
        raise HandshakeError(
            f"message has {len(body)} bytes, may have {MAX_MESSAGE_BYTES}; load fewer probes"
        )
    return _LENGTH.pack(len(body)) + body


class Inbox:
    """Received bytes that are not a whole message yet."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._raw = bytearray()

    def feed(self, raw: bytes) -> None:
        """Add what a socket gave."""
        self._raw += raw

    def take(self) -> Message | None:
        """The next whole message, if it is there; HandshakeError if it is not one of ours."""
        if len(self._raw) < _LENGTH.size:
            return None
        (nbytes,) = _LENGTH.unpack_from(self._raw)
        if nbytes > self._limit:
            raise HandshakeError(f"peer sends {nbytes} bytes, may send {self._limit}; not ours")
        end = _LENGTH.size + nbytes
        if len(self._raw) < end:
            return None
        body = bytes(self._raw[_LENGTH.size : end])
        del self._raw[:end]
        return _decode(body)


def _decode(body: bytes) -> Message:
    try:
        return _DECODER.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise HandshakeError(f"peer sent no message of ours ({error}); update one end") from error
