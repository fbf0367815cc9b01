"""Takes settings and the tables; gives a ring in the home that was asked for, and its writer.

Host home: shared host memory, which a CPU engine writes itself and a GPU writes over the bus.
Device home: memory of the GPU, which readers open through CUDA IPC.
"""

from __future__ import annotations

import contextlib
import ctypes
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

from clairai.errors import ConfigError
from clairai.ring.cuda import DeviceMemory, Gpu
from clairai.ring.layout import RingHeader, RingShape
from clairai.ring.memory import HostMemory
from clairai.ring.writer import RingWriter
from clairai.settings import Settings
from clairai.tap.outlet import Forwards, HostOutlet, Outlet
from clairai.tap.tables import Tables

MOST_AHEAD: Final = 64


@dataclass(frozen=True)
class Home:
    """An open ring: where it lies, and who writes it."""

    memory: HostMemory | DeviceMemory
    shape: RingShape
    outlet: Outlet
    undo: contextlib.ExitStack
    forwards: Forwards | None = None  # who wants to know how they run

    def close(self) -> None:
        self.outlet.close()
        self.undo.close()


def open_home(settings: Settings, tables: Tables, max_requests: int, epoch: int) -> Home:
    shape = RingShape.for_budget(settings.ring_mib << 20, tables.scores_STK[:, 0].numel())
    if tables.device.type == "cuda":
        return _open_on_gpu(settings, tables, max_requests, RingHeader(epoch, _with_ahead(shape)))
    if settings.ring_home == "device":
        raise ConfigError('ring_home is "device", but the engine runs on a CPU; use "host"')
    with contextlib.ExitStack() as undo:
        memory = undo.enter_context(HostMemory.create(shape.nbytes))
        outlet = HostOutlet(RingWriter(memory, shape, epoch), tables)
        return Home(memory, shape, outlet, undo.pop_all())


def _open_on_gpu(settings: Settings, tables: Tables, max_requests: int, header: RingHeader) -> Home:
    from clairai.tap.commit import DeviceOutlet
    from clairai.tap.gpu_launch import GpuLaunch

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
            address = undo.enter_context(_mapped(memory, Gpu(ordinal)))
        launch = GpuLaunch(address, header.shape, tables, max_requests)
        outlet = DeviceOutlet(launch, header, tables, max_requests)
        return Home(memory, header.shape, outlet, undo.pop_all(), outlet)


@contextlib.contextmanager
def _mapped(memory: HostMemory, gpu: Gpu) -> Iterator[int]:
    """The memory's address on the GPU, for as long as the GPU may write there."""
    here = ctypes.addressof(ctypes.c_char.from_buffer(memory.buffer))
    there = gpu.map_host(here, memory.nbytes)
    try:
        yield there
    finally:
        gpu.unmap_host(here)


def _with_ahead(shape: RingShape) -> RingShape:
    """A GPU writes several records at once: as many as half the ring holds, a power of two."""
    most = min(MOST_AHEAD, shape.slots // 2)
    return RingShape(shape.slots, shape.slot_bytes, 1 << (most.bit_length() - 1))
