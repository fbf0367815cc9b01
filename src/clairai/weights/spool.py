"""Takes a safetensors file in pieces, as a network brings it; gives a full buffer of a plan.

The plan says beforehand which tensors come, in which order and how many bytes: what is otherwise
is refused at the first byte that is, and nothing is kept but the buffer itself.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Sequence
from typing import Final

import msgspec

from clairai.errors import WeightsError
from clairai.weights.buffers import HostBuffer
from clairai.weights.manifest import Tensor

MAX_HEAD_BYTES: Final = 32 << 20  # as a manifest
_LENGTH: Final = struct.Struct("<Q")
_METADATA: Final = "__metadata__"


class Entry(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A tensor in the head of a safetensors file."""

    dtype: str
    shape: tuple[int, ...]
    data_offsets: tuple[int, int]


_HEAD: Final = msgspec.json.Decoder(dict[str, msgspec.Raw])
_ENTRY: Final = msgspec.json.Decoder(Entry)


def entries(tensors: Sequence[Tensor]) -> dict[str, Entry]:
    """One after the other, in the order of the plan, as safetensors wants them."""
    found: dict[str, Entry] = {}
    end = 0
    for tensor in tensors:
        begin, end = end, end + tensor.nbytes
        found[tensor.name] = Entry(tensor.dtype, tensor.shape, (begin, end))
    return found


def head(tensors: Sequence[Tensor]) -> bytes:
    """All of a safetensors file that comes before the numbers."""
    raw = msgspec.json.encode(entries(tensors))
    raw += b" " * (-len(raw) % _LENGTH.size)
    return _LENGTH.pack(len(raw)) + raw


class Spool:
    """Feed it the file; `finish` gives the buffer, sealed."""

    def __init__(self, index: int, tensors: Sequence[Tensor], nbytes: int) -> None:
        self._what = f"the file of buffer {index}"
        self._tensors = tuple(tensors)
        self.nbytes = nbytes
        self._buffer = HostBuffer(nbytes)
        self._view: memoryview | None = self._buffer.view
        self._head = bytearray()
        self._is_in_head = True
        self._rooms: Iterator[memoryview] = (self._room(tensor) for tensor in self._tensors)
        self._room_left = memoryview(b"")

    def feed(self, piece: bytes) -> None:
        rest = memoryview(piece)
        if self._is_in_head:
            rest = self._take_head(rest)
        while rest:
            self._next_room()
            count = min(len(rest), len(self._room_left))
            self._room_left[:count] = rest[:count]
            self._room_left, rest = self._room_left[count:], rest[count:]

    def finish(self) -> HostBuffer:
        """The buffer, which is the caller's now; WeightsError if bytes are missing."""
        missing = len(self._room_left) + sum(map(len, self._rooms))
        if self._is_in_head or missing:
            raise WeightsError(f"{self._what} ends {missing} bytes of numbers early; send it again")
        self._release()
        self._buffer.seal()
        return self._buffer

    def close(self) -> None:
        """Let go of what has come; also after finish, when the buffer has been handed on."""
        self._release()
        self._buffer.close()

    def _take_head(self, piece: memoryview) -> memoryview:
        """What comes after the head; nothing while it is not whole."""
        self._head += piece
        if len(self._head) < _LENGTH.size:
            return memoryview(b"")
        (nbytes,) = _LENGTH.unpack_from(self._head)
        if nbytes > MAX_HEAD_BYTES:
            raise WeightsError(
                f"{self._what} has a head of {nbytes} bytes, may have {MAX_HEAD_BYTES}; send less "
                f"at once"
            )
        end = _LENGTH.size + nbytes
        if len(self._head) < end:
            return memoryview(b"")
        self._check(bytes(self._head[_LENGTH.size : end]))
        rest = bytes(self._head[end:])
        self._head.clear()
        self._is_in_head = False
        return memoryview(rest)

    def _check(self, raw: bytes) -> None:
        try:
            named = _HEAD.decode(raw)
            named.pop(_METADATA, None)
            found = {name: _ENTRY.decode(entry) for name, entry in named.items()}
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
            raise WeightsError(
                f"{self._what} is no safetensors: {str(error)[:200]}; use the Sender"
            ) from None
        if found != entries(self._tensors):
            raise WeightsError(
                f"{self._what} does not hold the plan's tensors, one after the other in its order; "
                f"use the Sender"
            )

    def _next_room(self) -> None:
        while not self._room_left:
            room = next(self._rooms, None)
            if room is None:
                raise WeightsError(f"{self._what} goes on after its last tensor; send it again")
            self._room_left = room

    def _room(self, tensor: Tensor) -> memoryview:
        assert self._view is not None
        return self._view[tensor.offset : tensor.offset + tensor.nbytes]

    def _release(self) -> None:
        """Nobody may hold the pages when they are sealed."""
        self._room_left.release()
        if self._view is not None:
            self._view.release()
            self._view = None
