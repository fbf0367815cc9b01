"""A disk on which one operation fails, and a wait for a condition."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest

from clairai.store.disk import LocalDisk, LocalFile
from clairai.store.write import WriterLimits

DEADLINE_S = 60.0
QUICK = WriterLimits(shard_nbytes=1, retry_s=0.005, reserve_nbytes=0)


def wait_until(is_true: Callable[[], bool]) -> None:
    deadline_s = time.monotonic() + DEADLINE_S
    while not is_true():
        assert time.monotonic() < deadline_s
        time.sleep(0.001)


@contextmanager
def failing(monkeypatch: pytest.MonkeyPatch, name: str, code: int) -> Iterator[None]:
    """Make every call of this disk operation fail with this errno."""

    def fail(*_: object) -> None:
        raise OSError(code, os.strerror(code))

    with monkeypatch.context() as patched:
        patched.setattr(LocalDisk if hasattr(LocalDisk, name) else LocalFile, name, fail)
        yield
