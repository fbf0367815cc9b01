"""Opens the ring that a worker publishes to, and makes its publisher.

Runs in: the worker. `ring_home` "host" is shared host memory, which a CPU engine writes itself and
a GPU writes over the bus; "device" is memory of the GPU, which readers open through CUDA IPC.
"""

from __future__ import annotations

import contextlib
import ctypes
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

from clairai.engine.publish.publisher import ForwardListener, HostPublisher, Publisher
from clairai.engine.publish.step_extension import load_step_extension
from clairai.engine.score.score_tables import ScoreTables
from clairai.errors import ConfigError
from clairai.local.gpu_memory import Gpu
from clairai.ring.layout import RingHeader, RingShape
from clairai.ring.memory import DeviceMemory, HostMemory
from clairai.ring.writer import RingWriter
from clairai.settings import Settings

MAX_AHEAD: Final = 64


@dataclass(frozen=True)
class OpenRing:
    """An open ring: its memory, and who writes it."""

    memory: HostMemory | DeviceMemory
    shape: RingShape
    publisher: Publisher
    undo: contextlib.ExitStack
    forwards: ForwardListener | None = None  # a publisher that hears how forwards run

    def close(self) -> None:
        self.publisher.close()
        self.undo.close()


def open_ring(settings: Settings, tables: ScoreTables, max_requests: int, epoch: int) -> OpenRing:
    shape = RingShape.for_budget(settings.ring_mib << 20, tables.scores_STK[:, 0].numel())
    if tables.device.type == "cuda":
        return _open_ring_on_gpu(
            settings, tables, max_requests, RingHeader(epoch, _with_ahead(shape))
        )
    if settings.ring_home == "device":
        raise ConfigError('ring_home is "device", but the engine runs on a CPU; use "host"')
    with contextlib.ExitStack() as undo:
        memory = undo.enter_context(HostMemory.create(shape.nbytes))
        publisher = HostPublisher(RingWriter(memory, shape, epoch), tables)
        return OpenRing(memory, shape, publisher, undo.pop_all())


def _open_ring_on_gpu(
    settings: Settings, tables: ScoreTables, max_requests: int, header: RingHeader
) -> OpenRing:
    from clairai.engine.publish.device_publisher import DevicePublisher
    from clairai.engine.publish.gpu_launcher import GpuLauncher

    ordinal = tables.device.index or 0
    with contextlib.ExitStack() as undo:
        memory: HostMemory | DeviceMemory
        if settings.ring_home == "device":
            memory = undo.enter_context(DeviceMemory.create(header.shape.nbytes, ordinal))
            memory.write(0, header.pack())
            address = memory.address
        else:
            memory = undo.enter_context(HostMemory.create(header.shape.nbytes))
            memory.buffer[: len(header.pack())] = header.pack()
            address = undo.enter_context(_map_to_gpu(memory, Gpu(ordinal)))
        extension = load_step_extension()
        launcher = GpuLauncher(address, header.shape, tables, max_requests, extension)
        publisher = DevicePublisher(launcher, header, tables, max_requests, extension)
        return OpenRing(memory, header.shape, publisher, undo.pop_all(), publisher)


@contextlib.contextmanager
def _map_to_gpu(memory: HostMemory, gpu: Gpu) -> Iterator[int]:
    """The memory's address on the GPU, for as long as the GPU may write there."""
    here = ctypes.addressof(ctypes.c_char.from_buffer(memory.buffer))
    there = gpu.map_host(here, memory.nbytes)
    try:
        yield there
    finally:
        gpu.unmap_host(here)


def _with_ahead(shape: RingShape) -> RingShape:
    """A GPU writes several records at once: as many as half the ring holds, a power of two."""
    most = min(MAX_AHEAD, shape.slots // 2)
    return RingShape(shape.slots, shape.slot_bytes, 1 << (most.bit_length() - 1))
