"""A ring in GPU memory is created, attached, copied and freed in the right order."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import msgspec
import numpy as np
import pytest

from clairai.errors import HandshakeError, RingError
from clairai.local.gpu_memory import GRANULE_BYTES, HANDLE_BYTES
from clairai.ring.attach import RingReader
from clairai.ring.layout import HEAD_OFFSET, RingHeader, RingShape
from clairai.ring.memory import STAGING_BYTES, DeviceMemory, HostMemory
from clairai.ring.reader import RingCursor
from clairai.ring.server import RingServer
from clairai.ring.writer import RingWriter
from tests.support.cuda import UUIDS, CUresult, ToyDriver, install
from tests.support.footprint import nothing_left_behind
from tests.support.ring_engine import is_intact, publish_marked, small_bank, welcome

SHAPE = RingShape(slots=8, slot_bytes=4096, ahead=2)
EPOCH = 0xFEED_FACE_CAFE_BEEF


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> Iterator[ToyDriver]:
    toy = install(monkeypatch)
    yield toy
    assert (toy.held, toy.opened) == ({}, set())  # every test frees what it allocates


def ring_bytes(num_records: int) -> bytes:
    """The bytes of a ring after so many records."""
    with HostMemory.create(SHAPE.nbytes) as memory:
        writer = RingWriter(memory, SHAPE, EPOCH)
        publish_marked(writer, EPOCH, range(num_records))
        return memory.copy(0, SHAPE.nbytes)


def test_new_memory_is_zero_and_has_blocks_of_its_own(driver: ToyDriver) -> None:
    with DeviceMemory.create(SHAPE.nbytes, 1) as memory:
        assert len(driver.held[memory.address]) == GRANULE_BYTES > memory.nbytes == SHAPE.nbytes
        assert memory.copy(0, SHAPE.nbytes) == bytes(SHAPE.nbytes)
        assert (memory.uuid, memory.home, memory.fds) == (UUIDS[1].hex(), "device", ())
        assert driver.context == "context of 1"


@pytest.mark.usefixtures("driver")
def test_what_the_engine_writes_another_process_reads_by_the_handle() -> None:
    with DeviceMemory.create(SHAPE.nbytes, 1) as memory:
        memory.write(HEAD_OFFSET, (5).to_bytes(8, "little"))
        assert len(memory.handle) == HANDLE_BYTES
        with DeviceMemory.attach(memory.handle, SHAPE.nbytes, memory.uuid) as other:
            assert other.load(HEAD_OFFSET) == 5
            assert other.copy(HEAD_OFFSET - 1, 3) == b"\0\5\0"


@pytest.mark.usefixtures("driver")
def test_a_reader_of_device_memory_reads_a_ring_as_of_host_memory() -> None:
    with DeviceMemory.create(SHAPE.nbytes, 0) as memory:
        memory.write(0, ring_bytes(5))
        ring = RingCursor(memory)
        records = ring.poll()
        assert [record.seq for record in records] == [0, 1, 2, 3, 4]
        assert all(is_intact(record, EPOCH) for record in records)
        memory.write(0, ring_bytes(30))
        assert [record.seq for record in ring.poll()] == [24, 25, 26, 27, 28, 29]
        assert (ring.statistics().lost, ring.statistics().torn) == (19, 0)


@pytest.mark.parametrize("length", [0, 63, 65])
def test_a_handle_of_another_length_is_refused_before_the_driver_sees_it(
    driver: ToyDriver, length: int
) -> None:
    with pytest.raises(HandshakeError, match=f"has {length} bytes, a CUDA IPC handle 64"):
        DeviceMemory.attach(bytes(length), SHAPE.nbytes, UUIDS[0].hex())
    assert driver.asked == []


def test_a_gpu_that_this_process_does_not_see_is_named(driver: ToyDriver) -> None:
    with pytest.raises(HandshakeError, match=r"on GPU 00ff, .* CUDA_VISIBLE_DEVICES"):
        DeviceMemory.attach(bytes(64), SHAPE.nbytes, "00ff")
    assert "cuDevicePrimaryCtxRetain" not in driver.asked  # no context on a GPU that is only listed


def test_memory_smaller_than_claimed_is_refused_and_closed_again(driver: ToyDriver) -> None:
    with DeviceMemory.create(SHAPE.nbytes, 0) as memory:
        with pytest.raises(HandshakeError, match=f"has {GRANULE_BYTES} bytes, peer claims"):
            DeviceMemory.attach(memory.handle, GRANULE_BYTES + 1, memory.uuid)
        assert driver.opened == set()
        assert driver.asked[-1] == "cuIpcCloseMemHandle"
        DeviceMemory.attach(memory.handle, GRANULE_BYTES, memory.uuid).close()


@pytest.mark.usefixtures("driver")
def test_a_handle_that_opens_nothing_is_an_error_that_names_the_call() -> None:
    with pytest.raises(RingError, match=r"cuIpcOpenMemHandle failed .*CUDA_ERROR_INVALID_HANDLE"):
        DeviceMemory.attach(bytes(64), SHAPE.nbytes, UUIDS[1].hex())


def test_the_engine_frees_its_memory_last_and_a_reader_only_closes_it(driver: ToyDriver) -> None:
    engine = DeviceMemory.create(SHAPE.nbytes, 0)
    reader = DeviceMemory.attach(engine.handle, SHAPE.nbytes, engine.uuid)
    for memory, last in ((reader, "cuIpcCloseMemHandle"), (engine, "cuMemFree")):
        driver.asked.clear()
        memory.close()
        assert driver.asked == ["cuCtxSetCurrent", "cuStreamDestroy", "cuMemFreeHost", last]
        memory.close()
        assert len(driver.asked) == 4


def test_a_long_copy_goes_in_parts_of_the_staging_memory(driver: ToyDriver) -> None:
    whole = np.random.default_rng(1).bytes(2 * STAGING_BYTES + 5000)
    with DeviceMemory.create(len(whole), 0) as memory:
        memory.write(0, whole)
        assert memory.copy(0, len(whole)) == whole
        assert driver.copied == [STAGING_BYTES, STAGING_BYTES, 5000]
        assert memory.copy(77, STAGING_BYTES) == whole[77 : 77 + STAGING_BYTES]
        assert memory.copy(0, 0) == b""
        assert driver.copied[3:] == [STAGING_BYTES]


@pytest.mark.parametrize(("offset", "nbytes"), [(-1, 8), (4096, 1), (4090, 7), (0, -1)])
def test_a_copy_from_outside_the_memory_never_reaches_the_driver(
    driver: ToyDriver, offset: int, nbytes: int
) -> None:
    with DeviceMemory.create(4096, 0) as memory:
        with pytest.raises(RingError, match="of 4096"):
            memory.copy(offset, nbytes)
        assert driver.copied == []


def test_a_reader_copies_on_a_stream_that_waits_for_no_other(driver: ToyDriver) -> None:
    with DeviceMemory.create(4096, 0) as memory:
        assert memory._stream == "stream of kind 1"
        driver.asked.clear()
        memory.copy(0, 8)
        assert driver.asked == ["cuCtxSetCurrent", "cuMemcpyDtoHAsync", "cuStreamSynchronize"]


@pytest.mark.usefixtures("driver")
def test_memory_dropped_open_warns() -> None:
    memory = DeviceMemory.create(4096, 0)
    with pytest.warns(ResourceWarning, match="dropped open"):
        memory.__del__()
    memory.close()


@pytest.mark.usefixtures("driver")
def test_what_was_written_is_not_what_the_next_byte_reads() -> None:
    """A copy that is off by one byte is noticed."""
    with DeviceMemory.create(4096, 0) as memory:
        memory.write(100, b"clairai")
        assert memory.copy(100, 7) == b"clairai" != memory.copy(101, 7)


def test_a_full_gpu_is_an_error_with_the_drivers_status(driver: ToyDriver) -> None:
    driver.failing["cuMemAlloc"] = CUresult.CUDA_ERROR_OUT_OF_MEMORY
    with pytest.raises(RingError, match=r"cuMemAlloc failed .*CUDA_ERROR_OUT_OF_MEMORY"):
        DeviceMemory.create(4096, 0)


@pytest.mark.parametrize("name", ["cuMemAllocHost", "cuStreamCreate", "cuMemsetD8"])
def test_memory_is_freed_if_a_part_of_it_cannot_be_made(driver: ToyDriver, name: str) -> None:
    driver.failing[name] = CUresult.CUDA_ERROR_OUT_OF_MEMORY
    with pytest.raises(RingError, match=f"{name} failed"):
        DeviceMemory.create(4096, 0)
    assert driver.held == {}


@pytest.mark.parametrize("name", ["cuMemAllocHost", "cuStreamCreate", "cuPointerGetAttribute"])
def test_a_handle_that_cannot_be_used_is_closed_again(driver: ToyDriver, name: str) -> None:
    with DeviceMemory.create(SHAPE.nbytes, 0) as memory:
        driver.failing[name] = CUresult.CUDA_ERROR_OUT_OF_MEMORY
        with pytest.raises(RingError, match=f"{name} failed"):
            DeviceMemory.attach(memory.handle, SHAPE.nbytes, memory.uuid)
        assert driver.opened == set()


@pytest.mark.usefixtures("driver")
def test_a_ring_on_a_gpu_crosses_the_socket_as_a_handle_and_no_descriptor(tmp_path: Path) -> None:
    with DeviceMemory.create(SHAPE.nbytes, 1) as memory:
        memory.write(0, ring_bytes(3))
        greeting = msgspec.structs.replace(
            welcome(EPOCH, SHAPE), home="device", handle=memory.handle, gpu=memory.uuid
        )
        with (
            RingServer(tmp_path, memory, greeting, small_bank) as server,
            RingReader.attach(server.path) as reader,
        ):
            records = reader.poll()
            assert all(is_intact(record, EPOCH) for record in records)
            assert [record.seq for record in records] == [0, 1, 2]
            assert reader.bank(1) == small_bank(1)


def test_a_reader_in_the_engines_process_uses_its_memory_and_frees_nothing(
    driver: ToyDriver, tmp_path: Path
) -> None:
    """CUDA IPC cannot open a handle in the process that made it, where clairai.scores() runs."""
    driver.failing["cuIpcOpenMemHandle"] = CUresult.CUDA_ERROR_INVALID_HANDLE
    with DeviceMemory.create(SHAPE.nbytes, 1) as memory:
        memory.write(0, ring_bytes(3))
        found = {"handle": memory.handle, "gpu": memory.uuid, "address": memory.address}
        greeting = msgspec.structs.replace(welcome(EPOCH, SHAPE), home="device", **found)
        with RingServer(tmp_path, memory, greeting, small_bank) as server:
            with RingReader.attach(server.path) as reader:
                assert [record.seq for record in reader.poll()] == [0, 1, 2]
            assert memory.address in driver.held
            assert memory.load(HEAD_OFFSET) == 3


def test_an_address_of_another_process_is_never_read(
    driver: ToyDriver, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("clairai.local.private_socket.peer_pid", lambda _: os.getpid() + 1)
    with DeviceMemory.create(SHAPE.nbytes, 1) as memory:
        found = {"handle": bytes(64), "gpu": memory.uuid, "address": memory.address}
        greeting = msgspec.structs.replace(welcome(EPOCH, SHAPE), home="device", **found)
        with (
            RingServer(tmp_path, memory, greeting, small_bank) as server,
            pytest.raises(RingError, match="cuIpcOpenMemHandle"),
        ):
            RingReader.attach(server.path)
    assert driver.copied == []


def test_a_ring_on_a_gpu_that_is_not_the_promised_one_is_refused_and_closed(
    driver: ToyDriver, tmp_path: Path
) -> None:
    with DeviceMemory.create(SHAPE.nbytes, 1) as memory:
        memory.write(0, RingHeader(EPOCH + 1, SHAPE).pack())
        greeting = msgspec.structs.replace(
            welcome(EPOCH, SHAPE), home="device", handle=memory.handle, gpu=memory.uuid
        )
        with RingServer(tmp_path, memory, greeting, small_bank) as server, nothing_left_behind():
            with pytest.raises(HandshakeError, match="engine promised"):
                RingReader.attach(server.path)
            assert driver.opened == set()


def test_a_reader_in_the_engines_own_process_opens_no_handle_and_frees_nothing(
    driver: ToyDriver, tmp_path: Path
) -> None:
    """CUDA IPC cannot open a handle in the process that made it."""
    with DeviceMemory.create(SHAPE.nbytes, 1) as memory:
        memory.write(0, ring_bytes(3))
        greeting = msgspec.structs.replace(
            welcome(EPOCH, SHAPE),
            home="device",
            handle=memory.handle,
            gpu=memory.uuid,
            address=memory.address,
        )
        with RingServer(tmp_path, memory, greeting, small_bank) as server:
            with RingReader.attach(server.path) as reader:
                assert [record.seq for record in reader.poll()] == [0, 1, 2]
            assert "cuIpcOpenMemHandle" not in driver.asked
            assert memory.address in driver.held
