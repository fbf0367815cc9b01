"""Takes records as they come; gives what a person wants to see of them: the newest of each request.

R = rows of a record, C = columns (probes) of its bank
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Final

import numpy as np
from numpy.typing import NDArray

from clairai.match.row_collector import RowSpan, split_rows
from clairai.ring.reader import ReaderStatistics, Record
from clairai.wire import ring_messages

MAX_REQUESTS: Final = 4096
RATE_WINDOW_S: Final = 2.0


@dataclass(frozen=True, eq=False)
class ProbeColumns:
    """The bank as the board needs it; a probe without a threshold is never at or above it."""

    names: tuple[str, ...]
    thresholds_C: NDArray[np.float32]

    @classmethod
    def of(cls, bank: ring_messages.Bank) -> ProbeColumns:
        limits = [np.inf if p.threshold is None else p.threshold for p in bank.probes]
        return cls(tuple(p.name for p in bank.probes), np.array(limits, np.float32))


@dataclass(frozen=True)
class Cell:
    """One probe's newest score of one request."""

    score: float
    is_above: bool  # at or above the threshold now
    was_above: bool  # or at any earlier token


@dataclass
class LiveRequest:
    """One choice of one request, as far as it has come."""

    stream: int
    choice: int
    phase: int = ring_messages.PREFILL
    num_scored: int = 0
    num_cached: int = 0
    position: int = 0
    is_cut_off: bool = False  # its engine died first
    _columns: ProbeColumns | None = None
    _newest_C: NDArray[np.float32] = field(default_factory=lambda: np.empty(0, np.float32))
    _above: set[str] = field(default_factory=set)

    def add_tokens(
        self, rows: NDArray[np.void], scores_RC: NDArray[np.float32], columns: ProbeColumns
    ) -> None:
        last = rows[-1]
        self.phase, self.position = int(last["phase"]), int(last["position"])
        self.num_scored += len(rows)
        self._columns, self._newest_C = columns, scores_RC[-1].copy()
        is_above_C = (scores_RC >= columns.thresholds_C).any(axis=0)
        self._above.update(columns.names[index] for index in np.flatnonzero(is_above_C))

    def add_marks(self, rows: NDArray[np.void]) -> None:
        is_cached = rows["phase"] == ring_messages.CACHED
        self.num_cached += int(rows["span"][is_cached].sum())
        if not is_cached.all():
            self.phase = ring_messages.FINISHED

    @property
    def is_over(self) -> bool:
        return self.is_cut_off or self.phase == ring_messages.FINISHED

    def cell(self, name: str) -> Cell | None:
        """None where the probe was not in the bank at the newest token."""
        if self._columns is None or name not in self._columns.names:
            return None
        index = self._columns.names.index(name)
        score = self._newest_C[index]
        is_above = bool(score >= self._columns.thresholds_C[index])
        return Cell(float(score), is_above, name in self._above)


class LiveState:
    """Recent requests and running counts over all engines so far; bounded, whatever comes."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self.welcome: ring_messages.Welcome | None = None
        self.columns: ProbeColumns | None = None
        self.num_attached = self.num_rows = self.num_finished = 0
        self._clock = clock
        self._requests: dict[tuple[int, int], LiveRequest] = {}  # oldest first
        self._arrivals: deque[tuple[float, int]] = deque()
        self._known: tuple[ring_messages.Bank, ProbeColumns] | None = None
        self._before = self._now = ReaderStatistics(0, 0, 0, 0, 0)

    def attach(self, welcome: ring_messages.Welcome) -> None:
        self.welcome = welcome
        self.num_attached += 1
        self._known = None

    def detach(self) -> None:
        """The engine is gone, and with it every request that had not finished."""
        self._before, self._now = self.statistics, ReaderStatistics(0, 0, 0, 0, 0)
        self.welcome = None
        for request in self._live():
            request.is_cut_off = True

    def feed(self, record: Record, bank: ring_messages.Bank) -> None:
        columns = self._columns_of(bank)
        num_tokens = 0
        for run in split_rows(record.rows):
            part = slice(run.begin, run.end)
            request = self._request(run, record.rows[part])
            if request is None:
                continue
            if run.is_marks:
                self._mark(request, record.rows[part])
            else:
                request.add_tokens(record.rows[part], record.scores_RC[part], columns)
                num_tokens += run.end - run.begin
        self.num_rows += num_tokens
        self._arrivals.append((self._clock(), num_tokens))
        self._forget_arrivals()

    def note(self, statistics: ReaderStatistics) -> None:
        """Counts of the engine that is attached."""
        self._now = statistics

    @property
    def statistics(self) -> ReaderStatistics:
        """Summed over every engine so far; the lag is that of the one attached."""
        before, now = self._before, self._now
        return ReaderStatistics(
            first=0,
            delivered=before.delivered + now.delivered,
            lost=before.lost + now.lost,
            torn=before.torn + now.torn,
            lag=now.lag,
        )

    @property
    def num_live(self) -> int:
        return sum(1 for _ in self._live())

    def rows_per_s(self) -> float:
        """Over the last moments, so that it falls to 0 when the engine is idle."""
        self._forget_arrivals()
        return sum(num_rows for _, num_rows in self._arrivals) / RATE_WINDOW_S

    def newest(self, limit: int) -> list[LiveRequest]:
        """Requests that are not finished first, then the newest: each stays where it is."""
        newest = [*reversed(self._requests.values())]
        newest.sort(key=lambda request: request.is_over)
        return newest[: max(limit, 0)]

    def _live(self) -> Iterator[LiveRequest]:
        return (request for request in self._requests.values() if not request.is_over)

    def _mark(self, request: LiveRequest, rows: NDArray[np.void]) -> None:
        was_over = request.is_over
        request.add_marks(rows)
        self.num_finished += request.is_over and not was_over

    def _request(self, run: RowSpan, rows: NDArray[np.void]) -> LiveRequest | None:
        """Whose rows these are; nobody's if they only end a request whose rows we never saw."""
        key = (run.stream, run.choice)
        request = self._requests.get(key)
        if _is_finish_mark(rows) or (request is not None and not request.is_over):
            return request
        self._requests.pop(key, None)  # the stream id is used again, by a new request
        if len(self._requests) >= MAX_REQUESTS:
            del self._requests[next(iter(self._requests))]
        self._requests[key] = request = LiveRequest(*key)
        return request

    def _forget_arrivals(self) -> None:
        oldest_s = self._clock() - RATE_WINDOW_S
        while self._arrivals and self._arrivals[0][0] < oldest_s:
            self._arrivals.popleft()

    def _columns_of(self, bank: ring_messages.Bank) -> ProbeColumns:
        if self._known is None or self._known[0] is not bank:
            self._known = (bank, ProbeColumns.of(bank))
        self.columns = self._known[1]
        return self.columns


def _is_finish_mark(rows: NDArray[np.void]) -> bool:
    return bool((rows["phase"] == ring_messages.FINISHED).all())
