"""What a machine cannot give is refused before it is asked for: nobody is ended for it."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from clairai.errors import RingError, WeightsError
from clairai.local import shared_buffer
from clairai.ring.memory import HostMemory
from clairai.weights.host_buffers import HostBuffer
from tests.process.footprint import nothing_left_behind

GIB = 1 << 30


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """8 GiB available, and a group within a group; limits are written by the tests."""
    (tmp_path / "meminfo").write_text(f"MemTotal: 99 kB\nMemAvailable:   {8 * GIB >> 10} kB\n")
    (tmp_path / "cgroup").write_text("1:name=old:/x\n0::/outer/inner\n")
    (tmp_path / "groups" / "outer" / "inner").mkdir(parents=True)
    for name, file in (
        ("MEMINFO_FILE", "meminfo"),
        ("CGROUP_FILE", "cgroup"),
        ("CGROUP_ROOT", "groups"),
    ):
        monkeypatch.setattr(shared_buffer, name, tmp_path / file)
    return tmp_path / "groups"


def limit(folder: Path, most: str, used: int) -> None:
    (folder / "memory.max").write_text(f"{most}\n")
    (folder / "memory.current").write_text(f"{used}\n")


def test_a_machine_without_limits_gives_what_it_has_available(machine: Path) -> None:
    limit(machine / "outer", "max", 5 * GIB)
    assert shared_buffer.free_memory_bytes() == 8 * GIB - shared_buffer.RESERVED_BYTES


@pytest.mark.parametrize("group", ["outer", "outer/inner"])
def test_a_group_gives_what_it_has_left(machine: Path, group: str) -> None:
    limit(machine / group, str(3 * GIB), GIB)
    assert shared_buffer.free_memory_bytes() == 2 * GIB - shared_buffer.RESERVED_BYTES


def test_a_group_that_is_full_gives_nothing(machine: Path) -> None:
    limit(machine / "outer", str(GIB), 2 * GIB)
    assert shared_buffer.free_memory_bytes() == 0


@pytest.mark.usefixtures("machine")
def test_a_buffer_larger_than_that_is_refused_and_nothing_is_made() -> None:
    with nothing_left_behind(), pytest.raises(WeightsError, match=r"are free; free some"):
        HostBuffer(8 * GIB)


def test_this_machine_can_be_asked_and_gives_less_than_it_has() -> None:
    in_all = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    assert 0 < shared_buffer.free_memory_bytes() < in_all
    HostBuffer(2 << 20).close()


def test_a_ring_that_the_machine_has_no_room_for_is_refused_before_the_kernel_is_asked(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Asked for, it would be promised, and somebody ended for it."""

    def promise(*_: object) -> None:
        raise AssertionError("the kernel was asked")

    monkeypatch.setattr(os, "posix_fallocate", promise)
    with pytest.raises(RingError, match=r"no \d+ bytes for the ring: \d+ are free; lower its size"):
        HostMemory.create(1 << 60)
