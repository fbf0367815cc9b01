"""Takes rows and what is told, from any thread; gives rows to be handed on together, in order.

What is told ends a batch: it is heard behind all that came before it, and does not wait for more.
"""

from __future__ import annotations

import queue
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from clairai.capture.taken import Taken

MAX_STEPS: Final = 256

Told = Callable[[], None]


@dataclass(frozen=True)
class Pace:
    """How long rows wait for others; what is told hurries them."""

    linger_s: float = 0.05
    enough_nbytes: int = 1 << 20  # to go on at once


class Inbox:
    """Many may put, one gets."""

    def __init__(self, batch_nbytes: int, pace: Pace) -> None:
        self._batch_nbytes, self._pace = batch_nbytes, pace
        self._queue: queue.SimpleQueue[Taken | Told] = queue.SimpleQueue()

    def put(self, item: Taken | Told) -> None:
        self._queue.put(item)

    def next(self) -> tuple[list[Taken], Told | None]:
        """Rows, and what was told after them."""
        batch: list[Taken] = []
        nbytes, deadline_s = 0, 0.0
        while len(batch) < MAX_STEPS and nbytes < self._batch_nbytes:
            left_s = deadline_s - time.monotonic() if nbytes < self._pace.enough_nbytes else 0.0
            try:
                item = self._queue.get(timeout=max(left_s, 0) if batch else None)
            except queue.Empty:
                break
            if callable(item):
                return batch, item
            batch.append(item)
            nbytes += item.nbytes
            deadline_s = deadline_s or time.monotonic() + self._pace.linger_s
        return batch, None
