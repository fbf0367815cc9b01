"""Takes nothing; gives how many bytes this machine, or the group we are in, can still be given.

Shared memory has no limit of its own: who asks for more than there is gets it promised, page by
page, until the kernel ends some process, and not always the one that asked.
"""

from __future__ import annotations

from pathlib import Path
from typing import Final

MEMORY: Final = Path("/proc/meminfo")
GROUP: Final = Path("/proc/self/cgroup")
GROUPS: Final = Path("/sys/fs/cgroup")
KEPT_BYTES: Final = 64 << 20  # for whoever else lives here


def free_bytes() -> int:
    """The least of what the machine has available and what our control groups still allow."""
    return max(min([_of_machine(), *_of_groups()]) - KEPT_BYTES, 0)


def _of_machine() -> int:
    for line in MEMORY.read_text().splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) << 10
    raise AssertionError(f"{MEMORY} of Linux 3.14 or later has MemAvailable")


def _of_groups() -> list[int]:
    """Of every group around us that has a limit, in cgroup v2."""
    named = [line for line in GROUP.read_text().splitlines() if line.startswith("0::/")]
    groups = [GROUPS / line.removeprefix("0::/") for line in named]
    around = [folder for group in groups for folder in (group, *group.parents)]
    limits = [(folder, _number(folder / "memory.max")) for folder in around]
    return [
        limit - (_number(folder / "memory.current") or 0)
        for folder, limit in limits
        if limit is not None
    ]


def _number(file: Path) -> int | None:
    """None where there is no such file, or no limit in it."""
    try:
        text = file.read_text().strip()
    except OSError:
        return None
    return int(text) if text.isdecimal() else None
