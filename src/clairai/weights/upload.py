"""Takes a safetensors file in pieces, as a network brings it; gives a full buffer of a plan.

The plan says beforehand which tensors come, in which order and how many bytes: what is otherwise
is refused at the first byte that is, and nothing is kept but the buffer itself.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Final

import msgspec

from clairai.errors import WeightsError
from clairai.weights.host_buffers import HostBuffer
from clairai.weights.manifest import CPU, Manifest, PlannedTensor
from clairai.weights.socket_client import BufferClient
from clairai.wire.weights_messages import BufferOffer

MAX_UPLOAD_HEADER_BYTES: Final = 32 << 20  # as a manifest
_LENGTH: Final = struct.Struct("<Q")
_METADATA: Final = "__metadata__"


class HeaderEntry(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A tensor in the head of a safetensors file."""

    dtype: str
    shape: tuple[int, ...]
    data_offsets: tuple[int, int]


_HEADER_DECODER: Final = msgspec.json.Decoder(dict[str, msgspec.Raw])
_ENTRY_DECODER: Final = msgspec.json.Decoder(HeaderEntry)


def header_entries(tensors: Sequence[PlannedTensor]) -> dict[str, HeaderEntry]:
    """One after the other, in the order of the plan, as safetensors wants them."""
    found: dict[str, HeaderEntry] = {}
    end = 0
    for tensor in tensors:
        begin, end = end, end + tensor.nbytes
        found[tensor.name] = HeaderEntry(tensor.dtype, tensor.shape, (begin, end))
    return found


def safetensors_header(tensors: Sequence[PlannedTensor]) -> bytes:
    """All of a safetensors file that comes before the numbers."""
    raw = msgspec.json.encode(header_entries(tensors))
    raw += b" " * (-len(raw) % _LENGTH.size)
    return _LENGTH.pack(len(raw)) + raw


class SafetensorsUpload:
    """Feed it the file; `finish` gives the buffer, sealed."""

    def __init__(self, index: int, tensors: Sequence[PlannedTensor], nbytes: int) -> None:
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
        if nbytes > MAX_UPLOAD_HEADER_BYTES:
            raise WeightsError(
                f"{self._what} has a head of {nbytes} bytes, may have {MAX_UPLOAD_HEADER_BYTES}; "
                "send less at once"
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
            named = _HEADER_DECODER.decode(raw)
            named.pop(_METADATA, None)
            found = {name: _ENTRY_DECODER.decode(entry) for name, entry in named.items()}
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
            raise WeightsError(
                f"{self._what} is no safetensors: {str(error)[:200]}; use the Sender"
            ) from None
        if found != header_entries(self._tensors):
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

    def _room(self, tensor: PlannedTensor) -> memoryview:
        assert self._view is not None
        return self._view[tensor.offset : tensor.offset + tensor.nbytes]

    def _release(self) -> None:
        """Nobody may hold the pages when they are sealed."""
        self._room_left.release()
        if self._view is not None:
            self._view.release()
            self._view = None


# MERGED
# Takes a plan that came over HTTP and its buffers; gives them to the engine's socket, as a
# sender.
#
# For a trainer that cannot reach that socket: on another machine, or another user. It runs beside
# the
# engine, in the API server's process; the worker checks what it brings as it checks everybody's.


class UploadRelay:
    """One hand-over at a time; its calls wait, so they belong on a thread."""

    def __init__(self) -> None:
        self._plan: Manifest | None = None
        self._folder: Path | None = None
        self._port: BufferClient | None = None

    @property
    def transfer(self) -> str | None:
        """Which hand-over is expected, or on its way."""
        return None if self._plan is None else self._plan.transfer

    def expect(self, plan: Manifest, folder: Path) -> None:
        """The engine has taken this plan; `folder` is where its socket is."""
        self._plan, self._folder = plan, folder

    def spool(self, transfer: str, index: int) -> SafetensorsUpload:
        """Room for a buffer of the plan; WeightsError for any other."""
        plan = self._plan
        if plan is None or plan.transfer != transfer:
            raise WeightsError(
                f"transfer {transfer} is not planned here, or was used or given up; "
                f"POST /v1/weights/plan first, to the same process of the server"
            )
        if plan.device != CPU:
            raise WeightsError("its buffers lie on a GPU; plan them in host memory to upload them")
        if index >= len(plan.buffers):
            raise WeightsError(f"buffer {index} came, the plan has {len(plan.buffers)}")
        tensors = [tensor for tensor in plan.tensors if tensor.buffer == index]
        return SafetensorsUpload(index, tensors, plan.buffers[index])

    def deliver(self, index: int, spool: SafetensorsUpload) -> None:
        """Hand a full buffer over; returns once the engine has read it."""
        assert self._plan is not None
        assert self._folder is not None
        if self._port is None:
            self._port = BufferClient(self._folder, self._plan.epoch)
        buffer = spool.finish()
        offer = BufferOffer(self._plan.transfer, index, buffer.nbytes, "host")
        self._port.offer(offer, buffer.fds)

    def forget(self) -> None:
        """Give the hand-over up, or end it: the engine lets go of what it still has of it."""
        port, self._port, self._plan = self._port, None, None
        if port is not None:
            port.close()
