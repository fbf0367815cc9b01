"""A clock that counts only the time in which this process was running."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Final

MAX_TICK_S: Final = 1.0  # a longer pause between two ticks was ours


class OwnClock:
    """Seconds in which this process was running: pauses in which it was not do not count."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock, self._last_s, self._own_s = clock, clock(), 0.0

    def tick(self) -> float:
        """Call it a few times a second."""
        now_s = self._clock()
        self._own_s += min(now_s - self._last_s, MAX_TICK_S)
        self._last_s = now_s
        return self._own_s
