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
# Of a ring whose size was left to us.
USUAL_NBYTES: Final = 64 << 20
MOST_NBYTES: Final = 1 << 30
NUM_STEPS: Final = 3  # one is written, one is read, and one is there in case its reader is late


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
    shape = choose_shape(settings, tables)
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


def choose_shape(settings: Settings, tables: ScoreTables) -> RingShape:
    """As large as the settings say, else as the largest steps need."""
    num_columns = tables.scores_STK[:, 0].numel()
    if settings.ring_mib is not None:
        return RingShape.for_budget(settings.ring_mib << 20, num_columns)
    nbytes = USUAL_NBYTES
    if settings.ring_home == "host":
        nbytes = max(nbytes, min(NUM_STEPS * largest_step_nbytes(tables), MOST_NBYTES))
    return RingShape.for_budget(nbytes, num_columns)


def largest_step_nbytes(tables: ScoreTables) -> int:
    """What a step of as many tokens as there can be takes in a ring, if the bank is full."""
    num_columns = tables.scores_STK[:, 0].numel()
    smallest = RingShape.for_records(2, num_columns)
    num_records = -(-tables.max_tokens // smallest.rows_per_record(num_columns))
    return num_records * smallest.slot_bytes


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
