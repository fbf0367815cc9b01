"""Takes blocks from whoever captures; gives them to the writer in order, and counts the refused.

Bounded: with no room left it waits, drops or spills, as was chosen. At every moment
accepted + dropped == offered, in rows.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final, Literal, get_args

from clairai.errors import StoreError
from clairai.points import quote
from clairai.store.rows import Given
from clairai.store.spill import Spill

Policy = Literal["block", "drop", "spill"]
POLICIES: Final[tuple[Policy, ...]] = get_args(Policy)
MIN_NBYTES: Final = 1 << 20  # of blocks that are handed on together, if they come
LINGER_S: Final = 0.002  # within this time
MAX_NAMED_LOSSES: Final = 65_536  # requests whose own losses are remembered; the sum always is


@dataclass(frozen=True)
class Counts:
    """Rows. What is accepted and neither committed nor lost is on its way."""

    offered: int = 0
    accepted: int = 0
    dropped: int = 0
    committed: int = 0
    lost: int = 0  # accepted, and given up: the reason is the writer's

    @property
    def pending(self) -> int:
        return self.accepted - self.committed - self.lost


class Intake:
    """Many may put, one gets."""

    def __init__(self, policy: str, nbytes: int, spill: Spill | None = None) -> None:
        if policy not in POLICIES:
            raise StoreError(
                f"no policy is named {quote(policy)}; give one of {', '.join(POLICIES)}"
            )
        if (policy == "spill") != (spill is not None):
            raise StoreError("policy spill needs a folder to spill to, and only it has one")
        self._policy, self._limit, self._spill = policy, nbytes, spill
        self._changed = threading.Condition()
        self._waiting: deque[object] = deque()
        self._nbytes = 0
        self._offered = self._dropped = self._committed = self._lost = 0
        self._losses: dict[int, int] = {}
        self._is_open = True

    @property
    def counts(self) -> Counts:
        with self._changed:
            accepted = self._offered - self._dropped
            return Counts(self._offered, accepted, self._dropped, self._committed, self._lost)

    def put(self, given: Given) -> bool:
        """Whether it was accepted. Waits only under the policy `block`."""
        with self._changed:
            while self._policy == "block" and self._is_open and not self._has_room(given):
                self._changed.wait()
            is_taken = self._is_open and self._take(given)
            self._offered += given.num_rows
            if not is_taken:
                self._dropped += given.num_rows
                self._blame(given.streams())
            elif len(self._waiting) <= 1 or self._nbytes >= MIN_NBYTES:
                self._changed.notify_all()
            return is_taken

    def _has_room(self, given: Given) -> bool:
        # A block larger than the bound is let in when nothing else waits.
        return self._nbytes + given.nbytes <= self._limit or not self._nbytes

    def _take(self, given: Given) -> bool:
        is_spilling = self._spill is not None and len(self._spill) > 0
        if not is_spilling and self._has_room(given):
            self._waiting.append(given)
            self._nbytes += given.nbytes
            return True
        return self._spill is not None and self._spill.put(given)

    def _blame(self, streams: Mapping[int, int]) -> None:
        for stream, count in streams.items():
            if stream in self._losses or len(self._losses) < MAX_NAMED_LOSSES:
                self._losses[stream] = self._losses.get(stream, 0) + count

    def put_other(self, other: object) -> None:
        """Something that takes no room and keeps its place among the blocks."""
        with self._changed:
            if self._spill is not None and len(self._spill):
                self._spill.put_other(other)
            else:
                self._waiting.append(other)
            self._changed.notify_all()

    def get(self, deadline_s: float | None) -> list[object]:
        """The next things, waited for until then (of time.monotonic); nothing if there was none."""
        with self._changed:
            while not self._waiting and not (self._spill is not None and len(self._spill)):
                left_s = None if deadline_s is None else deadline_s - time.monotonic()
                if left_s is not None and left_s <= 0:
                    return []
                self._changed.wait(left_s)
            if not self._waiting:
                assert self._spill is not None
                return [self._spill.get()]
            if self._nbytes < MIN_NBYTES and isinstance(self._waiting[-1], Given):
                self._changed.wait(LINGER_S)  # one waking for many small blocks
            return self._first()

    def _first(self) -> list[object]:
        taken: list[object] = []
        nbytes = 0
        while self._waiting and nbytes < MIN_NBYTES:
            one = self._waiting.popleft()
            nbytes += one.nbytes if isinstance(one, Given) else 0
            taken.append(one)
        self._nbytes -= nbytes
        self._changed.notify_all()
        return taken

    def committed(self, num_rows: int) -> None:
        with self._changed:
            self._committed += num_rows

    def lose(self, streams: Mapping[int, int]) -> None:
        """Rows that were accepted and cannot be committed, by request."""
        with self._changed:
            self._lost += sum(streams.values())
            self._blame(streams)

    def losses(self, stream: int) -> int:
        """Rows of this request that were dropped or lost; told once."""
        with self._changed:
            return self._losses.pop(stream, 0)

    def close(self) -> None:
        """What is put from now on is dropped, and counted."""
        with self._changed:
            self._is_open = False
            self._changed.notify_all()
