"""Takes a moment to wait for, or a call to break; gives the wait, and a disk that fails there."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest

from clairai.store.disk import LocalDisk, LocalFile
from clairai.store.write import WriterLimits

DEADLINE_S = 20.0
QUICK = WriterLimits(shard_nbytes=1, retry_s=0.005, reserve_nbytes=0)


def until(is_so: Callable[[], bool]) -> None:
    deadline_s = time.monotonic() + DEADLINE_S
    while not is_so():
        assert time.monotonic() < deadline_s
        time.sleep(0.001)


@contextmanager
def faulty(monkeypatch: pytest.MonkeyPatch, name: str, code: int) -> Iterator[None]:
    """A disk whose calls of that name fail."""

    def fail(*_: object) -> None:
        raise OSError(code, os.strerror(code))

    with monkeypatch.context() as patched:
        patched.setattr(LocalDisk if hasattr(LocalDisk, name) else LocalFile, name, fail)
        yield
