"""Takes packed buffers; gives them to an engine: over its own socket, or as files over HTTP."""

from __future__ import annotations

import mmap
from collections.abc import Iterator
from contextlib import closing
from typing import Final, Protocol

from clairai.serve.calls import Server
from clairai.weights.manifest import Manifest
from clairai.weights.pack import Packed
from clairai.weights.port import Port
from clairai.weights.spool import head
from clairai.wire_weights import Full, Home, Offer

PIECE_BYTES: Final = 1 << 20


class Carrier(Protocol):
    """How buffers come to an engine; on return of close() it reads none of them any more."""

    def carry(self, plan: Manifest, index: int, packed: Packed) -> None:
        """Returns once the engine has read it."""

    def close(self) -> None: ...


class OverSocket:
    """On the engine's machine: what travels is a descriptor, or a handle."""

    def __init__(self, port: Port) -> None:
        self._port = port

    def carry(self, plan: Manifest, index: int, packed: Packed) -> None:
        self._port.offer(_offer_of(plan, index, packed.home, b""), packed.fds)

    def show(self, plan: Manifest, index: int, handle: bytes) -> None:
        """A buffer of a GPU that is being filled; does not wait, nor say what goes wrong."""
        self._port.show(_offer_of(plan, index, "device", handle))

    def full(self, plan: Manifest, index: int) -> None:
        """That one is filled; returns once the engine has read it."""
        self._port.full(Full(plan.transfer, index), plan.buffers[index])

    def close(self) -> None:
        self._port.close()


class OverHttp:
    """From anywhere: what travels is the numbers, a safetensors file for each buffer."""

    def __init__(self, server: Server) -> None:
        self._server = server

    def carry(self, plan: Manifest, index: int, packed: Packed) -> None:
        first = head(packed.tensors)
        nbytes = len(first) + sum(tensor.nbytes for tensor in packed.tensors)
        body = _body(first, packed, plan.buffers[index])
        self._server.put_weights(plan.transfer, index, body, nbytes)

    def close(self) -> None:
        """Nothing of ours is read: the server has its own copy."""


def _offer_of(plan: Manifest, index: int, home: Home, handle: bytes) -> Offer:
    return Offer(plan.transfer, index, plan.buffers[index], home, handle)


def _body(first: bytes, packed: Packed, nbytes: int) -> Iterator[bytes]:
    yield first
    with closing(mmap.mmap(packed.fds[0], nbytes, mmap.MAP_PRIVATE, mmap.PROT_READ)) as pages:
        for tensor in packed.tensors:
            end = tensor.offset + tensor.nbytes
            for start in range(tensor.offset, end, PIECE_BYTES):
                yield pages[start : min(start + PIECE_BYTES, end)]
