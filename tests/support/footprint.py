"""Fail a test that leaves descriptors or mapped rings behind."""

from __future__ import annotations

import gc
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from tests.support.ring_engine import DEADLINE_S, until


@dataclass(frozen=True)
class Footprint:
    """Open descriptors and mapped rings."""

    num_fds: int
    num_rings: int


def footprint() -> Footprint:
    """The footprint of this process now."""
    maps = Path("/proc/self/maps").read_text()
    return Footprint(len(os.listdir("/proc/self/fd")), maps.count("memfd:clairai-ring"))


@contextmanager
def nothing_left_behind(timeout_s: float = DEADLINE_S) -> Iterator[Footprint]:
    """Fail unless the process soon holds again what it held before."""
    gc.collect()  # free what earlier tests have dropped, before the block
    before = footprint()
    yield before
    until(lambda: footprint() == before, timeout_s)
