"""Keeps an engine from overwriting records that its spool has not read yet.

Runs in: the worker, before a step is published. Only an engine that keeps scores waits, and only
for its own spool: a starved or slow spool then costs time instead of rows. Other readers are never
waited for.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import Final, Protocol

from clairai.ring.layout import RingShape

NO_LIMIT: Final = (1 << 63) - 1
PAUSE_S: Final = 0.0005
STALL_S: Final = 10.0  # a spool that reads nothing for so long is not waited for any more
_log: Final = logging.getLogger("clairai.spool")

# Up to which record the ring may be written, from the number published and of those to come.
FindLimit = Callable[[int, int], int]


class SpoolReader(Protocol):
    """The spool as its engine sees it; SpoolLauncher, or a stand-in for tests."""

    @property
    def num_read(self) -> int:
        """Records that it has read, or lost."""

    @property
    def returncode(self) -> int | None:
        """None while the process runs."""


class RingRoom:
    """The part of a ring that may be written now."""

    def __init__(
        self, shape: RingShape, spool: SpoolReader, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._spool, self._clock = spool, clock
        # A reader counts records as lost that the writer may be about to overwrite.
        self._num_slots = shape.slots - shape.ahead
        self._given_up_at: int | None = None  # what the spool had read when the waiting ended
        self.waited_s = 0.0

    def find_limit(self, published: int, num_records: int) -> int:
        """Wait until the next records overwrite none that the spool has not read.

        At once if that cannot be: the step is larger than the ring, or the spool does not go on.
        """
        needed = published + num_records
        limit = self._spool.num_read + self._num_slots
        if needed <= limit:
            return limit
        if num_records > self._num_slots or self._spool.num_read == self._given_up_at:
            return needed
        began_s = self._clock()
        self._wait(needed)
        self.waited_s += self._clock() - began_s
        return max(needed, self._spool.num_read + self._num_slots)

    def _wait(self, needed: int) -> None:
        num_read, deadline_s = self._spool.num_read, self._clock() + STALL_S
        while needed > num_read + self._num_slots:
            time.sleep(PAUSE_S)
            before, num_read = num_read, self._spool.num_read
            if num_read != before:
                deadline_s = self._clock() + STALL_S
            elif self._clock() >= deadline_s or self._spool.returncode is not None:
                self._give_up(num_read)
                return

    def _give_up(self, num_read: int) -> None:
        self._given_up_at = num_read
        _log.warning(
            "the spool of scores reads nothing and is not waited for any more; it has read %d "
            "records, and those that are overwritten before it goes on are lost",
            num_read,
        )
