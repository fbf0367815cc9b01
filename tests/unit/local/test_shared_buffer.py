"""Shared memory: refused before the machine runs out of it, and copied safely."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import msgspec
import numpy as np
import pytest
import torch

from clairai.errors import RingError, UnsupportedError, WeightsError, WeightsRoomError
from clairai.local import shared_buffer
from clairai.local.shared_buffer import (
    MAX_FREE_BLOCKS,
    BufferCopier,
    ReusableBuffer,
    SharedBuffer,
)
from clairai.ring.memory import HostMemory
from clairai.weights.host_buffers import HostBuffer
from clairai.wire import weights_messages
from tests.support.footprint import nothing_left_behind


def test_a_reusable_buffer_refuses_few_and_very_many_bytes() -> None:
    buffer = ReusableBuffer()
    assert [
        buffer.can_hold(n)
        for n in (0, shared_buffer.MIN_SHARED_BYTES - 1, weights_messages.MAX_SHARED_BYTES + 1)
    ] == [False] * 3
    assert buffer.can_hold(shared_buffer.MIN_SHARED_BYTES)
    assert buffer.can_hold(512 * 4096 * 4), "a bank of 512 of a wide model"


CHILD = """
import sys, numpy as np
from clairai.local.shared_buffer import ReusableBuffer
with ReusableBuffer().lock() as buffer:
    buffer.view(20000)[:] = np.arange(5000, dtype=np.float32).view(np.uint8)
    told = buffer.reference(20000)
    print(told.pid, told.fd, told.token, told.nbytes, flush=True)
    sys.stdin.read()
"""


def test_another_process_reads_shared_memory_while_its_owner_lives() -> None:
    command = [sys.executable, "-c", CHILD]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as child:
        assert child.stdout is not None
        pid, fd, token, nbytes = child.stdout.readline().decode().split()
        told = weights_messages.SharedBytes(int(pid), int(fd), token, int(nbytes))
        assert told.pid == child.pid != os.getpid()
        found = np.frombuffer(BufferCopier().copy_shared(told), np.float32)
        assert found.tolist() == list(range(5000))
        assert not found.flags.writeable
    with pytest.raises(UnsupportedError, match="cannot be reached"):
        BufferCopier().copy_shared(told)


def told(buffer: SharedBuffer, nbytes: int, **changes: Any) -> weights_messages.SharedBytes:
    made = weights_messages.SharedBytes(os.getpid(), buffer.fds[0], buffer.token, nbytes)
    return msgspec.structs.replace(made, **changes)


def test_memory_of_another_name_is_not_read() -> None:
    buffer, other, copier = SharedBuffer(), SharedBuffer(), BufferCopier()
    buffer.view(10)[:] = 1
    other.view(10)[:] = 2
    for wrong in (told(buffer, 10, fd=other.fds[0]), told(buffer, 10, token="0" * 32)):
        with pytest.raises(UnsupportedError, match="other memory"):
            copier.copy_shared(wrong)
    assert bytes(copier.copy_shared(told(buffer, 10))) == b"\1" * 10


def test_bytes_beyond_the_end_are_not_read() -> None:
    buffer = SharedBuffer()
    buffer.view(4096)
    with pytest.raises(WeightsError, match="has 4096 bytes, 4097 were announced"):
        BufferCopier().copy_shared(told(buffer, 4097))


@pytest.mark.parametrize(
    "field",
    [{"token": "../x"}, {"token": "A" * 32}, {"pid": 0}, {"fd": -1}, {"nbytes": 1 << 40}],
    ids=str,
)
def test_a_message_that_names_no_memory_is_not_understood(field: dict[str, Any]) -> None:
    good = {"pid": 1, "fd": 1, "token": "0" * 32, "nbytes": 1}
    assert msgspec.convert(good, weights_messages.SharedBytes)
    with pytest.raises(msgspec.ValidationError):
        msgspec.convert(good | field, weights_messages.SharedBytes)


def test_a_mapping_is_kept_until_it_must_grow_or_another_memory_comes() -> None:
    one, other, copier = SharedBuffer(), SharedBuffer(), BufferCopier()
    one.view(100)[:] = 1
    first_N = copier.copy(one.fds[0], 100)
    mapped = copier._source_N
    one.view(100)[:] = 2
    assert copier.copy(one.fds[0], 50).tolist() == [2] * 50
    assert copier._source_N is mapped
    assert first_N.tolist() == [1] * 100, "a copy"
    one.view(1 << 20)[:] = 3
    assert copier.copy(one.fds[0], 1 << 20).tolist() == [3] * (1 << 20)
    other.view(100)[:] = 4
    assert copier.copy(other.fds[0], 100).tolist() == [4] * 100
    assert copier.copy(one.fds[0], 100).tolist() == [3] * 100


HOLDERS: dict[str, Callable[[Any], Any]] = {
    "a view": lambda copied_N: copied_N[3:5],
    "a view of another type": lambda copied_N: copied_N.view(np.float32).reshape(2, -1)[1],
    "its bytes": lambda copied_N: copied_N.data.toreadonly()[5:],
    "an array of its bytes": lambda copied_N: np.frombuffer(copied_N.data, np.float32)[1:],
    "a tensor": lambda copied_N: torch.from_numpy(copied_N)[8:].view(torch.float32),
}


@pytest.mark.parametrize("kind", HOLDERS)
def test_memory_of_a_copy_is_reused_once_its_last_array_is_gone(kind: str) -> None:
    buffer, copier = SharedBuffer(), BufferCopier()
    buffer.view(64)[:] = 1
    copied_N = copier.copy(buffer.fds[0], 64)
    address = copied_N.__array_interface__["data"][0]
    held = HOLDERS[kind](copied_N)
    before = bytes(np.asarray(held))
    del copied_N
    buffer.view(64)[:] = 2
    others = [copier.copy(buffer.fds[0], 64) for _ in range(3)]
    assert bytes(np.asarray(held)) == before
    assert address not in [each.__array_interface__["data"][0] for each in others]
    del held
    gc.collect()
    again_N = copier.copy(buffer.fds[0], 32)
    assert again_N.__array_interface__["data"][0] == address
    assert again_N.tolist() == [2] * 32


def test_only_a_few_free_blocks_are_kept() -> None:
    buffer, copier = SharedBuffer(), BufferCopier()
    buffer.view(64)
    held = [copier.copy(buffer.fds[0], 64) for _ in range(3 * MAX_FREE_BLOCKS)]
    assert len(copier._free) == 0
    held.clear()
    assert len(copier._free) == MAX_FREE_BLOCKS


@pytest.mark.parametrize("nbytes", [8 << 30])
def test_a_buffer_larger_than_the_free_memory_is_refused_before_allocation(
    nbytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shared_buffer, "free_memory_bytes", lambda: nbytes - 1)
    with nothing_left_behind(), pytest.raises(WeightsRoomError, match=r"are free; free some"):
        HostBuffer(nbytes)


def test_a_ring_larger_than_the_free_memory_is_refused_before_allocation(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The kernel would promise the memory, and later kill a process for it."""

    def promise(*_: object) -> None:
        raise AssertionError("the kernel was asked")

    monkeypatch.setattr(os, "posix_fallocate", promise)
    with pytest.raises(RingError, match=r"no \d+ bytes for the ring: \d+ are free; lower its size"):
        HostMemory.create(1 << 60)
