"""Free memory is the least that machine, control groups and limits leave; promises are not free."""

from __future__ import annotations

import mmap
import os
import resource
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from clairai.local import free_memory
from clairai.local.free_memory import RESERVED_BYTES, free_memory_bytes, untouched_bytes

GIB = 1 << 30
PAGE = mmap.PAGESIZE


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """8 GiB available, and nested control groups; the tests write their limits."""
    (tmp_path / "meminfo").write_text(f"MemTotal: 99 kB\nMemAvailable:   {8 * GIB >> 10} kB\n")
    (tmp_path / "cgroup").write_text("1:name=old:/x\n0::/outer/inner\n")
    (tmp_path / "groups" / "outer" / "inner").mkdir(parents=True)
    for name, file in (
        ("MEMINFO_FILE", "meminfo"),
        ("CGROUP_FILE", "cgroup"),
        ("CGROUP_ROOT", "groups"),
    ):
        monkeypatch.setattr(free_memory, name, tmp_path / file)
    return tmp_path / "groups"


def limit(folder: Path, most: str, used: int) -> None:
    (folder / "memory.max").write_text(f"{most}\n")
    (folder / "memory.current").write_text(f"{used}\n")


def test_without_limits_the_available_memory_is_free(machine: Path) -> None:
    limit(machine / "outer", "max", 5 * GIB)
    assert free_memory_bytes() == 8 * GIB - RESERVED_BYTES


@pytest.mark.parametrize("group", ["outer", "outer/inner"])
def test_a_control_group_limits_the_free_memory(machine: Path, group: str) -> None:
    limit(machine / group, str(3 * GIB), GIB)
    assert free_memory_bytes() == 2 * GIB - RESERVED_BYTES


def test_a_full_control_group_leaves_no_free_memory(machine: Path) -> None:
    limit(machine / "outer", str(GIB), 2 * GIB)
    assert free_memory_bytes() == 0


def test_file_pages_that_a_group_is_charged_for_are_free(machine: Path) -> None:
    """A checkpoint that was read fills its group to the limit, and takes nothing from anybody."""
    limit(machine / "outer", str(4 * GIB), 4 * GIB)
    stat = f"anon {GIB}\ninactive_file {2 * GIB}\nactive_file {GIB}\nshmem 0\nodd\n"
    (machine / "outer" / "memory.stat").write_text(stat)
    assert free_memory_bytes() == 2 * GIB + GIB // 2 - RESERVED_BYTES


def test_a_control_group_of_version_1_limits_too(machine: Path, tmp_path: Path) -> None:
    (tmp_path / "cgroup").write_text("5:cpu,memory:/outer\n3:pids:/outer\n")
    folder = machine / "memory" / "outer"
    folder.mkdir(parents=True)
    (folder / "memory.limit_in_bytes").write_text(f"{3 * GIB}\n")
    (folder / "memory.usage_in_bytes").write_text(f"{2 * GIB}\n")
    (folder / "memory.stat").write_text(f"inactive_file 1\ntotal_inactive_file {GIB}\n")
    assert free_memory_bytes() == 2 * GIB - RESERVED_BYTES


def test_this_machine_has_less_free_memory_than_memory() -> None:
    in_all = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    assert 0 < free_memory_bytes() < in_all


def test_the_limit_of_a_process_on_its_addresses_counts() -> None:
    """In a process of its own, with a real limit."""
    program = (
        "import resource; from clairai.local.free_memory import free_memory_bytes;"
        "used = int(open('/proc/self/statm').read().split()[0]) * resource.getpagesize();"
        f"resource.setrlimit(resource.RLIMIT_AS, (used + {GIB}, resource.RLIM_INFINITY));"
        "print(free_memory_bytes())"
    )
    command = [sys.executable, "-c", program]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert 0 < int(done.stdout) <= GIB - RESERVED_BYTES
    assert resource.getrlimit(resource.RLIMIT_AS)[0] == resource.RLIM_INFINITY


def test_only_pages_without_memory_are_untouched() -> None:
    with mmap.mmap(-1, 64 * PAGE, mmap.MAP_PRIVATE) as pages:
        pages.madvise(mmap.MADV_NOHUGEPAGE)
        view = np.frombuffer(pages, np.uint8)
        address = view.ctypes.data
        assert untouched_bytes(address, len(pages)) == len(pages)
        pages[3 * PAGE] = 1
        pages[9 * PAGE + 5] = 1
        assert untouched_bytes(address, len(pages)) == 62 * PAGE
        assert untouched_bytes(address + 1, len(pages) - 2) == 60 * PAGE  # whole pages only
        assert untouched_bytes(address, 0) == 0
        del view


def test_memory_that_is_not_there_is_an_error() -> None:
    with pytest.raises(OSError, match="Cannot allocate memory"):
        untouched_bytes(PAGE, PAGE)
