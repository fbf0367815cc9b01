"""Weights that come over HTTP: one safetensors file for each buffer of a plan.

Runs in: the API server, for trainers that cannot reach the engine's socket. It passes full buffers
on through that socket, and the worker checks them like any sender's.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Final

import msgspec

from clairai.errors import WeightsError, printable
from clairai.weights.host_buffers import HostBuffer
from clairai.weights.manifest import CPU, Manifest, PlannedTensor, changes_model
from clairai.weights.socket_client import RankClients, connect_ranks
from clairai.wire.weights_messages import BufferOffer, WeightsRank

MAX_UPLOAD_HEADER_BYTES: Final = 32 << 20  # as a manifest
_LENGTH: Final = struct.Struct("<Q")
_METADATA: Final = "__metadata__"


class _HeaderEntry(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A tensor in the header of a safetensors file."""

    dtype: str
    shape: tuple[int, ...]
    data_offsets: tuple[int, int]


_HEADER_DECODER: Final = msgspec.json.Decoder(dict[str, msgspec.Raw])
_ENTRY_DECODER: Final = msgspec.json.Decoder(_HeaderEntry)


def _header_entries(tensors: Sequence[PlannedTensor]) -> dict[str, _HeaderEntry]:
    """The header of a file that holds these tensors in this order, without gaps."""
    found: dict[str, _HeaderEntry] = {}
    end = 0
    for tensor in tensors:
        begin, end = end, end + tensor.nbytes
        found[tensor.name] = _HeaderEntry(tensor.dtype, tensor.shape, (begin, end))
    return found


def safetensors_header(tensors: Sequence[PlannedTensor]) -> bytes:
    """Encode everything in a safetensors file that comes before the numbers."""
    raw = msgspec.json.encode(_header_entries(tensors))
    raw += b" " * (-len(raw) % _LENGTH.size)
    return _LENGTH.pack(len(raw)) + raw


class SafetensorsUpload:
    """Receives a file in pieces into a buffer of the plan.

    The plan says which tensors come, in which order: the first byte that differs is refused, and
    nothing is kept but the buffer.
    """

    def __init__(self, index: int, tensors: Sequence[PlannedTensor], nbytes: int) -> None:
        self._what = f"the file of buffer {index}"
        self._tensors = tuple(tensors)
        self.nbytes = nbytes
        self._buffer = HostBuffer(nbytes)
        self._view: memoryview | None = self._buffer.view
        self._header = bytearray()
        self._is_in_header = True
        self._places: Iterator[memoryview] = (self._view_of(tensor) for tensor in self._tensors)
        self._place = memoryview(b"")

    def feed(self, piece: bytes) -> None:
        rest = memoryview(piece)
        if self._is_in_header:
            rest = self._take_header(rest)
        while rest:
            self._next_place()
            count = min(len(rest), len(self._place))
            self._place[:count] = rest[:count]
            self._place, rest = self._place[count:], rest[count:]

    def finish(self) -> HostBuffer:
        """Seal the buffer and return it; WeightsError if bytes are missing."""
        missing = len(self._place) + sum(map(len, self._places))
        if self._is_in_header or missing:
            raise WeightsError(f"{self._what} ends {missing} bytes of numbers early; send it again")
        self._release()
        self._buffer.seal()
        return self._buffer

    def close(self) -> None:
        """Free the buffer, also after `finish`."""
        self._release()
        self._buffer.close()

    def _take_header(self, piece: memoryview) -> memoryview:
        """Collect the header; return the bytes that follow it, or none."""
        self._header += piece
        if len(self._header) < _LENGTH.size:
            return memoryview(b"")
        (nbytes,) = _LENGTH.unpack_from(self._header)
        if nbytes > MAX_UPLOAD_HEADER_BYTES:
            raise WeightsError(
                f"{self._what} has a header of {nbytes} bytes, may have {MAX_UPLOAD_HEADER_BYTES}; "
                "send less at once"
            )
        end = _LENGTH.size + nbytes
        if len(self._header) < end:
            return memoryview(b"")
        self._check(bytes(self._header[_LENGTH.size : end]))
        rest = bytes(self._header[end:])
        self._header.clear()
        self._is_in_header = False
        return memoryview(rest)

    def _check(self, raw: bytes) -> None:
        try:
            named = _HEADER_DECODER.decode(raw)
            named.pop(_METADATA, None)
            found = {name: _ENTRY_DECODER.decode(entry) for name, entry in named.items()}
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
            raise WeightsError(
                f"{self._what} is no safetensors: {printable(error)}; use the Sender"
            ) from None
        if found != _header_entries(self._tensors):
            raise WeightsError(
                f"{self._what} does not hold the plan's tensors, one after the other in its order; "
                f"use the Sender"
            )

    def _next_place(self) -> None:
        while not self._place:
            place = next(self._places, None)
            if place is None:
                raise WeightsError(f"{self._what} goes on after its last tensor; send it again")
            self._place = place

    def _view_of(self, tensor: PlannedTensor) -> memoryview:
        assert self._view is not None
        return self._view[tensor.offset : tensor.offset + tensor.nbytes]

    def _release(self) -> None:
        """Drop all views: no view may be held when the memory is sealed."""
        self._place.release()
        if self._view is not None:
            self._view.release()
            self._view = None


class UploadRelay:
    """Passes one transfer at a time to the engine; its calls block."""

    def __init__(self) -> None:
        self._plan: Manifest | None = None
        self._folder: Path | None = None
        self._ranks: tuple[WeightsRank, ...] = ()
        self._client: RankClients | None = None

    @property
    def transfer(self) -> str | None:
        """The transfer that is expected, or on its way."""
        return None if self._plan is None else self._plan.transfer

    def expect(self, plan: Manifest, folder: Path, ranks: Sequence[WeightsRank]) -> None:
        """Expect the buffers of a plan that the engine accepted; `folder` has its sockets.

        Probes and vectors alone go to the ranks that have them.
        """
        self._plan, self._folder = plan, folder
        is_model = changes_model(plan)
        self._ranks = tuple(rank for rank in ranks if is_model or rank.has_bank)

    def begin_upload(self, transfer: str, index: int) -> SafetensorsUpload:
        """Begin the upload of a buffer of the plan; WeightsError for any other."""
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

    def deliver(self, index: int, upload: SafetensorsUpload) -> None:
        """Pass a full buffer on; returns once the engine has read it."""
        assert self._plan is not None
        assert self._folder is not None
        if self._client is None:
            self._client = connect_ranks(self._folder, self._ranks)
        buffer = upload.finish()
        offer = BufferOffer(self._plan.transfer, index, buffer.nbytes, "host")
        self._client.offer(offer, buffer.fds)

    def forget(self) -> None:
        """End or abandon the transfer: the engine releases what it still holds of it."""
        client, self._client, self._plan = self._client, None, None
        if client is not None:
            client.close()
