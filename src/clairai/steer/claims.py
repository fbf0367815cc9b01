"""Takes courses of requests; gives claims on the engine's tables, or says that they are full."""

from __future__ import annotations

import threading
from collections import Counter, deque
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

from clairai.errors import VectorCapacityError
from clairai.steer.course import Course
from clairai.steer.segments import programs

Key = tuple[str, object]
_ROW: Final = "row"
_PROGRAM: Final = "program"
_SEAT: Final = "seat"


@dataclass(frozen=True)
class Limits:
    """What unfinished requests may use at once, and what may have a name."""

    rows: int  # of vectors and gates, different in content
    programs: int  # different ways of steering a row
    seats: int = 4096  # requests whose gates remember
    vectors: int = 2048
    nbytes: int = 1 << 30  # of the numbers of all named vectors


class Claim:
    """What one request has in the tables, until it is released."""

    def __init__(self, keys: frozenset[Key], gone: deque[Claim]) -> None:
        self.keys = keys
        self._gone = gone

    def release(self) -> None:
        """Any number of times, from any thread, and while garbage is collected: takes no lock."""
        self._gone.append(self)


class Claims:
    """Counts rows and programs in use. The same content is one row, whoever uses it."""

    def __init__(self, limits: Limits) -> None:
        self._limits = {_ROW: limits.rows, _PROGRAM: limits.programs, _SEAT: limits.seats}
        self._lock = threading.Lock()
        self._live: set[Claim] = set()
        self._users: Counter[Key] = Counter()
        self._in_use: Counter[str] = Counter()
        # A finalizer may run inside any line of ours, lock held or not: it leaves its claim here.
        self._gone: deque[Claim] = deque()

    def claim(self, course: Course) -> Claim:
        """Raises VectorCapacityError, and then nothing is claimed."""
        claim = Claim(frozenset(_keys(course)), self._gone)
        with self._lock:
            self._forget_gone()
            new = [key for key in claim.keys if not self._users[key]]
            for kind, limit in self._limits.items():
                self._check(kind, limit, sum(key[0] == kind for key in new))
            self._in_use.update(key[0] for key in new)
            self._users.update(claim.keys)
            self._live.add(claim)
        return claim

    def in_use(self) -> tuple[int, int]:
        """Rows and programs."""
        with self._lock:
            self._forget_gone()
            return self._in_use[_ROW], self._in_use[_PROGRAM]

    def _check(self, kind: str, limit: int, count: int) -> None:
        if self._in_use[kind] + count <= limit:
            return
        raise VectorCapacityError(
            f"this request needs {count} more steering {kind}s; {self._in_use[kind]} of {limit} "
            f"are in use by unfinished requests: ask again later, steer at fewer points, or raise "
            f"`steer_{kind}s` in the settings"
            if kind != _SEAT
            else f"{limit} unfinished requests have gates that remember, as many as there can be: "
            f"ask again later, or leave out latch and release"
        )

    def _forget_gone(self) -> None:
        while self._gone:
            claim = self._gone.popleft()
            if claim in self._live:
                self._live.remove(claim)
                self._users.subtract(claim.keys)
                unused = [key for key in claim.keys if not self._users[key]]
                self._in_use.subtract(key[0] for key in unused)
                for key in unused:
                    del self._users[key]


def _keys(course: Course) -> Iterable[Key]:
    for action in course.actions:
        yield from ((_ROW, row.digest) for row in action.rows)
    yield from ((_ROW, gate.row.digest) for gate in course.gates)
    yield from ((_PROGRAM, key) for key in programs(course))
    if course.is_stateful:
        yield _SEAT, object()  # what a gate remembers is never shared
