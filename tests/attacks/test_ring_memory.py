"""Readers that want to write, and rings that lie, have no effect."""

from __future__ import annotations

import ctypes
import errno
import fcntl
import mmap
import os
import struct
import tracemalloc
from pathlib import Path

import pytest

from clairai.errors import HandshakeError
from clairai.ring import layout
from clairai.ring.memory import HostMemory
from clairai.ring.reader import RingCursor
from clairai.ring.writer import RingWriter
from tests.support.ring_engine import SMALL, publish_plain

EPOCH = 0x0123_4567_89AB_CDEF


def test_a_reader_cannot_map_the_ring_writable() -> None:
    with HostMemory.create(SMALL.nbytes) as memory:
        with pytest.raises(PermissionError):
            mmap.mmap(memory.fd, SMALL.nbytes)
        reopened = os.open(f"/proc/self/fd/{memory.fd}", os.O_RDWR)
        with pytest.raises(PermissionError):
            mmap.mmap(reopened, SMALL.nbytes)
        os.close(reopened)


def test_a_reader_cannot_make_its_mapping_writable() -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    with HostMemory.create(SMALL.nbytes) as memory:
        mapping = mmap.mmap(memory.fd, SMALL.nbytes, mmap.MAP_SHARED, mmap.PROT_READ)
        inode = str(os.fstat(memory.fd).st_ino)  # other tests' rings may still be mapped
        lines = Path("/proc/self/maps").read_text().splitlines()
        (line,) = (line for line in lines if line.split()[4] == inode and " r--s " in line)
        address = ctypes.c_void_p(int(line.partition("-")[0], 16))
        wanted = ctypes.c_int(mmap.PROT_READ | mmap.PROT_WRITE)
        assert libc.mprotect(address, ctypes.c_size_t(SMALL.nbytes), wanted) == -1
        assert ctypes.get_errno() == errno.EACCES
        mapping.close()


def test_a_reader_cannot_write_to_the_descriptor() -> None:
    with HostMemory.create(SMALL.nbytes) as memory, pytest.raises(PermissionError):
        os.pwrite(memory.fd, b"x", 0)


@pytest.mark.parametrize("nbytes", [0, SMALL.nbytes // 2, SMALL.nbytes * 2])
def test_a_reader_cannot_resize_the_ring(nbytes: int) -> None:
    with HostMemory.create(SMALL.nbytes) as memory, pytest.raises(PermissionError):
        os.ftruncate(memory.fd, nbytes)


def test_a_reader_cannot_seal_the_ring_further() -> None:
    with HostMemory.create(SMALL.nbytes) as memory, pytest.raises(PermissionError):
        fcntl.fcntl(memory.fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_WRITE)


def test_a_descriptor_of_another_size_than_claimed_is_refused() -> None:
    with HostMemory.create(SMALL.nbytes) as memory:
        with pytest.raises(HandshakeError, match="were announced"):
            HostMemory.attach(os.dup(memory.fd), SMALL.nbytes * 2)
        with pytest.raises(HandshakeError, match="were announced"):
            HostMemory.attach(os.dup(memory.fd), -1)


def test_an_unsealed_descriptor_is_refused() -> None:
    fd = os.memfd_create("unsealed", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    os.ftruncate(fd, SMALL.nbytes)
    with pytest.raises(HandshakeError, match="seals"):
        HostMemory.attach(fd, SMALL.nbytes)
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(fd)


def test_a_plain_file_or_a_pipe_is_refused(tmp_path: Path) -> None:
    (tmp_path / "ring").write_bytes(bytes(SMALL.nbytes))
    with pytest.raises(HandshakeError):
        HostMemory.attach(os.open(tmp_path / "ring", os.O_RDONLY), SMALL.nbytes)
    read_end, write_end = os.pipe()
    with pytest.raises(HandshakeError):
        HostMemory.attach(read_end, 0)
    os.close(write_end)


@pytest.mark.parametrize(
    ("offset", "form", "value"),
    [
        (layout.SEQ_OFFSET, "<Q", 2**64 - 1),
        (layout.EPOCH_OFFSET, "<I", 1),
        (layout.NUM_ROWS_OFFSET, "<I", 2**31),
        (layout.NUM_ROWS_OFFSET, "<I", 2**32 - 1),
        (layout.NUM_ROWS_OFFSET, "<I", 0),
        (layout.NUM_COLUMNS_OFFSET, "<I", 2**32 - 1),
        (SMALL.slot_bytes - layout.TRAILER_BYTES, "<Q", 77),
    ],
)
def test_a_slot_that_lies_is_counted_torn_and_allocates_nothing(
    offset: int, form: str, value: int
) -> None:
    with HostMemory.create(SMALL.nbytes) as memory:
        writer, ring = RingWriter(memory, SMALL, EPOCH), RingCursor(memory)
        publish_plain(writer, 3)
        struct.pack_into(form, memory.buffer, SMALL.slot_offset(1) + offset, value)
        tracemalloc.start()
        records = ring.poll()
        _, peak_nbytes = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        counts = ring.statistics()
    assert [record.seq for record in records] == [0, 2]
    assert (counts.delivered, counts.lost, counts.torn) == (2, 1, 1)
    assert peak_nbytes < 4 * SMALL.nbytes


def test_a_head_that_lies_is_counted_and_costs_one_lap_at_most() -> None:
    with HostMemory.create(SMALL.nbytes) as memory:
        RingWriter(memory, SMALL, EPOCH)
        ring = RingCursor(memory)
        memory.buffer.cast("Q")[layout.HEAD_OFFSET // layout.WORD_BYTES] = 2**63
        assert ring.poll() == []
        counts = ring.statistics()
    assert counts.lost == 2**63
    assert counts.torn == SMALL.slots - 1
