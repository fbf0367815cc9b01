"""How much memory this process can still use before the kernel kills something for want of it."""

from __future__ import annotations

import ctypes
import os
import resource
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Final

import numpy as np

MEMINFO_FILE: Final = Path("/proc/meminfo")
CGROUP_FILE: Final = Path("/proc/self/cgroup")
CGROUP_ROOT: Final = Path("/sys/fs/cgroup")
RESERVED_BYTES: Final = 64 << 20  # left to the other processes of the machine
_PAGE_BYTES: Final = os.sysconf("SC_PAGE_SIZE")
_PIECE_PAGES: Final = 1 << 20  # asked about at once: 4 GiB


def free_memory_bytes() -> int:
    """The least of what machine, control groups and this process's own limit still allow.

    Shared memory has no limit of its own: the kernel promises more than there is, and later kills
    some process, not always the one that asked.
    """
    free = (_machine_free_bytes(), *_cgroup_free_bytes(), *_address_space_bytes())
    return max(min(free) - RESERVED_BYTES, 0)


def _machine_free_bytes() -> int:
    for line in MEMINFO_FILE.read_text().splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) << 10
    raise AssertionError(f"{MEMINFO_FILE} of Linux 3.14 or later has MemAvailable")


def _cgroup_free_bytes() -> Iterator[int]:
    """What is left in each enclosing group that has a limit, of either version."""
    for line in CGROUP_FILE.read_text().splitlines():
        _, controllers, path = line.split(":", 2)
        if not controllers:
            root, limit, used, prefix = CGROUP_ROOT, "memory.max", "memory.current", ""
        elif "memory" in controllers.split(","):
            root, prefix = CGROUP_ROOT / "memory", "total_"
            limit, used = "memory.limit_in_bytes", "memory.usage_in_bytes"
        else:
            continue
        group = root / path.lstrip("/")
        for folder in (group, *group.parents):
            most = _read_number(folder / limit)
            if most is not None and folder.is_relative_to(root):
                yield most - (_read_number(folder / used) or 0) + _reclaimable(folder, prefix)


def _reclaimable(folder: Path, prefix: str) -> int:
    """Pages of files that a group is charged for, and the kernel gives up before it kills."""
    stat = _read_stat(folder / "memory.stat")
    return stat.get(f"{prefix}inactive_file", 0) + stat.get(f"{prefix}active_file", 0) // 2


def _read_stat(file: Path) -> Mapping[str, int]:
    try:
        pairs = [line.split() for line in file.read_text().splitlines()]
    except OSError:
        return {}
    return {pair[0]: int(pair[1]) for pair in pairs if len(pair) == 2 and pair[1].isdecimal()}


def _read_number(file: Path) -> int | None:
    """None if the file is missing, or says "max"."""
    try:
        text = file.read_text().strip()
    except OSError:
        return None
    return int(text) if text.isdecimal() else None


def _address_space_bytes() -> Iterator[int]:
    """What RLIMIT_AS leaves, if it is set."""
    limit = resource.getrlimit(resource.RLIMIT_AS)[0]
    if limit != resource.RLIM_INFINITY:
        pages = int(Path("/proc/self/statm").read_text().split()[0])
        yield limit - pages * _PAGE_BYTES


def untouched_bytes(address: int, nbytes: int) -> int:
    """How much of an allocation has no pages yet: it is promised, and still counted as free."""
    first = -(-address // _PAGE_BYTES)
    num_pages = max((address + nbytes) // _PAGE_BYTES - first, 0)
    return sum(
        _PAGE_BYTES * _count_absent(first + start, min(_PIECE_PAGES, num_pages - start))
        for start in range(0, num_pages, _PIECE_PAGES)
    )


def _count_absent(first_page: int, num_pages: int) -> int:
    """mincore(2): one byte for each page, whose lowest bit says that it is in memory."""
    flags_P = np.zeros(num_pages, np.uint8)
    libc = ctypes.CDLL(None, use_errno=True)
    start, length = ctypes.c_void_p(first_page * _PAGE_BYTES), num_pages * _PAGE_BYTES
    if libc.mincore(start, ctypes.c_size_t(length), ctypes.c_void_p(flags_P.ctypes.data)):
        error = ctypes.get_errno()
        raise OSError(error, os.strerror(error))
    return num_pages - int(np.count_nonzero(flags_P & 1))
