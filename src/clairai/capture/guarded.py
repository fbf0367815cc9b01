"""Takes a consumer that anybody may have written; gives one that never raises, and says so instead.

What it raises makes it failed, with the reason; rows that it does not take then are counted.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

import numpy as np

from clairai.capture.consumers import Consumer, Policy, Standing
from clairai.errors import ClairaiError, StoreStoppedError
from clairai.store.rows import Block

MAX_NAMED: Final = 65_536  # requests whose own losses are remembered


@dataclass(frozen=True)
class Failed:
    reason: str
    name: str = "failed"


class Guarded:
    """A Consumer around another."""

    def __init__(self, inner: Consumer) -> None:
        self._inner = inner
        self._failed: Failed | None = None
        self._losses: Counter[int] = Counter()
        self._lock = threading.Lock()

    @property
    def policy(self) -> Policy:
        return self._inner.policy

    @property
    def where(self) -> str:
        return self._inner.where

    @property
    def state(self) -> Standing:
        if self._failed is None:
            try:
                return self._inner.state
            except Exception as error:
                self._fail(error)
        assert self._failed is not None
        return self._failed

    def begin(
        self, stream: int, *, tags: Mapping[str, Any] | None, steering: Mapping[str, Any] | None
    ) -> None:
        if self._failed is not None:
            return
        try:
            self._inner.begin(stream, tags=tags, steering=steering)
        except Exception as error:
            self._fail(error)

    def offer(self, block: Block) -> bool:
        if self._failed is None:
            try:
                return bool(self._inner.offer(block))
            except Exception as error:
                self._fail(error)
        with self._lock:
            for stream, count in zip(*_counted(block), strict=True):
                if stream in self._losses or len(self._losses) < MAX_NAMED:
                    self._losses[stream] += count
        return False

    def finish(self, stream: int) -> None:
        if self._failed is not None:
            return
        try:
            self._inner.finish(stream)
        except Exception as error:
            self._fail(error)

    def losses(self, stream: int) -> int:
        with self._lock:
            own = self._losses.pop(stream, 0)
        try:
            return own + self._inner.losses(stream)
        except Exception as error:
            self._fail(error)
            return own

    def flush(self, timeout_s: float) -> None:
        if self._failed is not None:
            raise StoreStoppedError(self._failed.reason)
        self._inner.flush(timeout_s)

    def close(self) -> None:
        self._inner.close()

    def _fail(self, error: Exception) -> None:
        said = error.reason if isinstance(error, ClairaiError) else f"{error}"
        self._failed = Failed(f"the consumer failed, {type(error).__name__}: {said}")


def _counted(block: Block) -> tuple[list[int], list[int]]:
    found, counts = np.unique(block.rows_N["stream"], return_counts=True)
    return found.tolist(), counts.tolist()
