"""The pinned arena: the capture writer reads what torch writes, once the GPU says it is there."""

from __future__ import annotations

import ctypes
import os

import numpy as np
import pytest
import torch

from clairai.capture.staging_arena import COPIED_WORD, HEADER_NBYTES, StagingArena
from clairai.engine.capture.pinned_arena import PinnedArena
from clairai.errors import ConfigError, RingError
from clairai.local import shared_buffer
from tests.support import cuda

NBYTES = 8192


@pytest.mark.parametrize("dtype", [torch.uint8, torch.uint16, torch.int32, torch.float32])
def test_what_torch_writes_lies_where_the_writer_reads(dtype: torch.dtype) -> None:
    arena = StagingArena.create(NBYTES)
    pinned = PinnedArena(arena, torch.device("cpu"))
    values = torch.arange(12).to(dtype)
    pinned.tensor(512, dtype, (12,)).copy_(values)
    pinned.tensor(1024, dtype, (3, 4)).copy_(values.view(3, 4))
    other = StagingArena.attach(_passed(arena))
    for start in (512, 1024):
        read = other.memory[start : start + values.nbytes]
        assert read.tobytes() == values.numpy().tobytes()
    arena.mark_copied(3)
    assert (other.is_copied(3), other.is_copied(4), other.last_copied) == (True, False, 3)
    pinned.close()
    arena.close()


def _passed(arena: StagingArena) -> int:
    assert arena.fd is not None
    return os.dup(arena.fd)


def test_freed_regions_can_be_allocated_again() -> None:
    arena = StagingArena.create(1024)
    writer = StagingArena.attach(_passed(arena))
    regions = [arena.allocate(256) for _ in range(4)]
    assert arena.allocate(1) is None
    assert arena.wait_for_room(1, is_served=lambda: False) is None
    assert regions[1] is not None
    writer.free(regions[1].end)
    assert arena.used_nbytes == 512
    assert arena.allocate(256, spare=512) is None
    again = arena.allocate(256, spare=256)
    assert again is not None
    assert again.start == 0
    arena.close()


def test_memory_that_could_be_resized_is_not_attached() -> None:
    plain = os.memfd_create("plain", os.MFD_ALLOW_SEALING)
    os.ftruncate(plain, HEADER_NBYTES + NBYTES)
    with pytest.raises(RingError, match="not sealed"):
        StagingArena.attach(plain)


def test_missing_memory_is_refused_before_the_first_step() -> None:
    with pytest.raises(ConfigError, match="staging_mib"):
        StagingArena.create(1 << 60)


def test_memory_that_is_in_use_is_not_promised(monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel would promise it, and end some process once it is used."""
    monkeypatch.setattr(shared_buffer, "free_memory_bytes", lambda: NBYTES)
    with pytest.raises(ConfigError, match=f"no {NBYTES} bytes .* {NBYTES} are free"):
        StagingArena.create(NBYTES)


def test_a_gpu_writes_the_message_number_behind_its_copies(monkeypatch: pytest.MonkeyPatch) -> None:
    driver = cuda.install(monkeypatch)
    arena = StagingArena.create(NBYTES)
    pinned = PinnedArena(arena, torch.device("cuda", 1))
    address = int(arena.whole.ctypes.data)
    pinned.mark_copied(7, 41)
    assert driver.ordered == ["stream 7 writes 41"]
    there = ctypes.string_at(driver.held[address], HEADER_NBYTES)
    assert np.frombuffer(there, np.uint64)[COPIED_WORD] == 41
    pinned.close()
    assert address not in driver.held
    driver.failing["cuStreamWriteValue64"] = cuda.CUresult.CUDA_ERROR_INVALID_HANDLE
    with pytest.raises(RingError, match="cuStreamWriteValue64"):
        pinned.mark_copied(7, 42)
    arena.close()
