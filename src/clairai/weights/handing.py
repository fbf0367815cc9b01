"""Takes a packer and a carrier; gives an engine the buffers of a plan, one while the next is made.

Whatever goes wrong is raised, and what the engine has been given stays until its sender is closed.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Final, Protocol

from clairai.weights.carriers import Carrier, OverSocket
from clairai.weights.device_pack import Begun, DevicePacker
from clairai.weights.manifest import Manifest, Tensor
from clairai.weights.pack import Packed, Packer

THREAD_BYTES: Final = 4 << 20  # of less, a thread takes longer than it saves
Progress = Callable[[int, int], None]
Announce = Callable[[], None]


class Handing(Protocol):
    """One plan, on its way."""

    def over(self, announce: Announce) -> tuple[Tensor, ...]:
        """All of it, once the engine has been told; its tensors, with their checksums."""


@dataclass(frozen=True)
class ByHost:
    """Each buffer is carried on a thread while the next is packed."""

    packer: Packer
    is_whole: bool  # any thread may read what is packed
    plan: Manifest
    carrier: Carrier
    buffers: ExitStack
    progress: Progress

    def over(self, announce: Announce) -> tuple[Tensor, ...]:
        first = self.plan.buffers[0]
        if len(self.plan.buffers) > 1 or (self.is_whole and first >= THREAD_BYTES):
            return self._at_once(announce)
        announce()
        packed = self._packed(0)
        self._carry(0, packed)
        self.progress(first, first)
        return packed.tensors

    def _at_once(self, announce: Announce) -> tuple[Tensor, ...]:
        """What is whole is packed while the engine is told; one is carried, the next is packed."""
        tensors: list[Tensor] = []
        with ThreadPoolExecutor(1) as thread:
            early = thread.submit(self._packed, 0) if self.is_whole else None
            announce()
            before: Future[None] | None = None
            for index in range(len(self.plan.buffers)):
                packed = early.result() if early and index == 0 else self._packed(index)
                if before is not None:
                    before.result()
                before = thread.submit(self._carry, index, packed)
                tensors += packed.tensors
                _tell(self.progress, self.plan, index)
            assert before is not None
            before.result()
        return tuple(tensors)

    def _packed(self, index: int) -> Packed:
        packed = self.packer.pack(index)
        self.buffers.callback(packed.close)
        return packed

    def _carry(self, index: int, packed: Packed) -> None:
        self.carrier.carry(self.plan, index, packed)
        packed.close()  # the engine has the pages, or the server a copy


@dataclass(frozen=True)
class ByDevice:
    """The engine opens a buffer while it is filled, and reads it while the next one is."""

    packer: DevicePacker
    is_whole: bool  # two buffers' tensors are there at once, whatever we do
    plan: Manifest
    carrier: OverSocket
    progress: Progress

    def over(self, announce: Announce) -> tuple[Tensor, ...]:
        first = self.packer.begin(0) if self.is_whole else None  # while the engine is told
        announce()
        tensors: list[Tensor] = []
        ahead = 1 if self.is_whole else 0  # the GPU has the next to do while we wait for one
        with ThreadPoolExecutor(1) as thread:
            under_way, reading = deque[tuple[int, Begun]](), list[Future[None]]()
            for index in range(len(self.plan.buffers)):
                begun = first if first is not None and index == 0 else self.packer.begin(index)
                self.carrier.show(self.plan, index, begun.handle)
                under_way.append((index, begun))
                if len(under_way) > ahead:
                    tensors += self._full(*under_way.popleft(), thread, reading)
            for each in under_way:
                tensors += self._full(*each, thread, reading)
            for read in reading:
                read.result()
        return tuple(tensors)

    def _full(
        self, index: int, begun: Begun, thread: ThreadPoolExecutor, reading: list[Future[None]]
    ) -> tuple[Tensor, ...]:
        """Wait until it is filled; then the engine reads it, while we go on."""
        tensors = begun.finish()
        reading.append(thread.submit(self.carrier.full, self.plan, index))
        for each in reading:
            if each.done():
                each.result()  # what was refused is known before the last buffer is filled
        _tell(self.progress, self.plan, index)
        return tensors


def _tell(progress: Progress, plan: Manifest, index: int) -> None:
    progress(sum(plan.buffers[: index + 1]), sum(plan.buffers))
