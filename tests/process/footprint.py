"""Takes this process; gives what it holds of the kernel's, and fails if that has grown."""

from __future__ import annotations

import gc
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from tests.process.parts import until


@dataclass(frozen=True)
class Footprint:
    """Open descriptors and mapped rings."""

    num_fds: int
    num_rings: int


def footprint() -> Footprint:
    """Right now."""
    maps = Path("/proc/self/maps").read_text()
    return Footprint(len(os.listdir("/proc/self/fd")), maps.count("memfd:clairai-ring"))


@contextmanager
def nothing_left_behind(timeout_s: float = 2.0) -> Iterator[Footprint]:
    """Fail unless, soon after the block, this process holds what it held before it."""
    gc.collect()  # what earlier tests have dropped goes now, not inside the block
    before = footprint()
    yield before
    until(lambda: footprint() == before, timeout_s)
