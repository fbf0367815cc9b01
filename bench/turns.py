"""Benches beside each other on one machine: all start at the same time, each measures alone.

A start takes most of a bench's time, and most of the machine is idle in it. So a bench holds a lock
together with the others while it starts, and alone while it measures: none measures before all have
started, and none starts while one measures.
"""

from __future__ import annotations

import fcntl
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def share(lock: Path | None) -> Iterator[Callable[[], None]]:
    """Gives a function that waits until this bench is alone; without a lock it always is."""
    if lock is None:
        yield lambda: None
        return
    with lock.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_SH)
        # Not atomic, and so no deadlock: the shared lock is given up first (flock(2)).
        yield lambda: fcntl.flock(file, fcntl.LOCK_EX)
