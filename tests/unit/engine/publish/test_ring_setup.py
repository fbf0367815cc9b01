"""A ring opens in the memory that the settings name, and leaves nothing behind."""

from __future__ import annotations

import ctypes

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from clairai.engine.publish import device_publisher, gpu_launcher
from clairai.engine.publish.publisher import HostPublisher
from clairai.engine.publish.ring_setup import (
    OpenRing,
    _with_ahead,
    choose_shape,
    largest_step_nbytes,
    open_ring,
)
from clairai.engine.score.score_tables import ScoreTables
from clairai.errors import ConfigError, RingError
from clairai.ring.layout import HEADER, RingHeader, RingShape
from clairai.ring.memory import DeviceMemory, HostMemory
from clairai.settings import Settings
from tests.support.cuda import UUIDS, ToyDriver, install
from tests.support.footprint import nothing_left_behind

EPOCH = 7


class ToyLaunch:
    """Stands in for the launcher; keeps where the ring is."""

    def __init__(self, ring: int, shape: RingShape, *_: object) -> None:
        self.ring, self.shape = ring, shape
        self.is_flushed = False

    def begin_step(self) -> None: ...

    def flush(self) -> None:
        self.is_flushed = True


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> ToyDriver:
    monkeypatch.setattr(gpu_launcher, "GpuLauncher", ToyLaunch)
    return install(monkeypatch)


def tables(device: str) -> ScoreTables:
    held = ScoreTables(["a", "b"], width=4, capacity=8, max_tokens=16, device="cpu")
    held.device = torch.device(device)
    return held


def opened(device: str, home: str) -> OpenRing:
    return open_ring(Settings(ring_mib=1, ring_home=home), tables(device), 32, EPOCH)


def test_a_ring_holds_three_of_the_largest_steps_unless_told_otherwise() -> None:
    few, many = tables("cpu"), tables("cpu")
    many.max_tokens = 1 << 20
    assert choose_shape(Settings(), few).nbytes == pytest.approx(64 << 20, rel=1e-3)
    step = largest_step_nbytes(many)
    assert step == pytest.approx((1 << 20) * (24 + 4 * 16), rel=0.1)
    assert choose_shape(Settings(), many).nbytes == pytest.approx(3 * step, rel=1e-3)
    many.max_tokens <<= 4
    assert choose_shape(Settings(), many).nbytes == pytest.approx(1 << 30, rel=1e-3)
    assert choose_shape(Settings(ring_mib=3), many).nbytes == pytest.approx(3 << 20, rel=1e-2)
    on_gpu = Settings(ring_home="device")  # of which there is less
    assert choose_shape(on_gpu, many).nbytes == pytest.approx(64 << 20, rel=1e-3)


def launch_of(ring: OpenRing) -> ToyLaunch:
    assert isinstance(ring.publisher, device_publisher.DevicePublisher)
    assert isinstance(ring.publisher._launcher, ToyLaunch)
    return ring.publisher._launcher


def test_a_cpu_engine_has_its_ring_in_host_memory_and_writes_it_itself() -> None:
    with nothing_left_behind():
        ring = opened("cpu", "host")
        assert isinstance(ring.publisher, HostPublisher)
        assert isinstance(ring.memory, HostMemory)
        assert ring.shape.ahead == 1
        assert ring.shape.rows_per_record(16) >= 16
        ring.close()
        ring.close()
        del ring  # its writer's view keeps the pages: a late write never hits other memory


def test_a_ring_in_gpu_memory_is_refused_on_a_cpu() -> None:
    with nothing_left_behind(), pytest.raises(ConfigError, match='runs on a CPU; use "host"'):
        opened("cpu", "device")


def test_on_a_gpu_the_host_ring_is_mapped_for_as_long_as_it_is_open(driver: ToyDriver) -> None:
    with nothing_left_behind():
        ring = opened("cuda:1", "host")
        launch = launch_of(ring)
        assert isinstance(ring.memory, HostMemory)
        assert RingHeader.unpack(ring.memory.copy(0, HEADER.size)) == RingHeader(EPOCH, ring.shape)
        assert launch.shape.ahead == 64
        here = ctypes.addressof(ctypes.c_char.from_buffer(ring.memory.buffer))
        assert len(driver.held[here]) == ring.memory.nbytes
        assert driver.context == "context of 1"
        assert launch.ring == ctypes.addressof(driver.held[here])
        ring.close()
        assert (launch.is_flushed, driver.held) == (True, {})


def test_on_a_gpu_the_device_ring_lies_where_the_engine_runs(driver: ToyDriver) -> None:
    ring = opened("cuda:1", "device")
    assert isinstance(ring.memory, DeviceMemory)
    assert (ring.memory.uuid, ring.memory.fds) == (UUIDS[1].hex(), ())
    assert RingHeader.unpack(ring.memory.copy(0, HEADER.size)) == RingHeader(EPOCH, ring.shape)
    assert launch_of(ring).ring == ring.memory.address
    ring.close()
    assert driver.held == {}


@pytest.mark.parametrize("home", ["host", "device"])
def test_a_launcher_that_cannot_be_made_leaves_nothing_behind(
    driver: ToyDriver, monkeypatch: pytest.MonkeyPatch, home: str
) -> None:
    def fail(*_: object) -> None:
        raise RingError("no stream")

    monkeypatch.setattr(gpu_launcher, "GpuLauncher", fail)
    with nothing_left_behind(), pytest.raises(RingError, match="no stream"):
        opened("cuda:0", home)
    assert driver.held == {}


@given(st.integers(2, 1000))
def test_a_gpu_writes_a_power_of_two_of_records_at_once_and_half_the_ring_at_most(
    slots: int,
) -> None:
    ahead = _with_ahead(RingShape(slots, 4096)).ahead
    assert ahead in (1, 2, 4, 8, 16, 32, 64)
    assert ahead <= slots // 2
    assert ahead == 64 or 2 * ahead > slots // 2
