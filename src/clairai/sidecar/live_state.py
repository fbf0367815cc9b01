"""What a person wants to see of the ring: the newest scores of each request, and counts.

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
    """The probes of the bank; a probe without a threshold never reaches it."""

    names: tuple[str, ...]
    thresholds_C: NDArray[np.float32]

    @classmethod
    def from_bank(cls, bank: ring_messages.Bank) -> ProbeColumns:
        limits = [np.inf if p.threshold is None else p.threshold for p in bank.probes]
        return cls(tuple(p.name for p in bank.probes), np.array(limits, np.float32))


@dataclass(frozen=True)
class Cell:
    """The newest score of one probe in one request."""

    score: float
    is_above: bool  # at or above the threshold now
    was_above: bool  # at any token so far


@dataclass
class LiveRequest:
    """One choice of one request so far."""

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
        """None if the probe was not in the bank at the newest token."""
        if self._columns is None or name not in self._columns.names:
            return None
        index = self._columns.names.index(name)
        score = self._newest_C[index]
        is_above = bool(score >= self._columns.thresholds_C[index])
        return Cell(float(score), is_above, name in self._above)


class LiveState:
    """Recent requests, and counts over all engines so far; its memory is bounded."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self.welcome: ring_messages.Welcome | None = None
        self.columns: ProbeColumns | None = None
        self.num_attached = self.num_rows = self.num_finished = 0
        self._clock = clock
        self._requests: dict[tuple[int, int], LiveRequest] = {}  # oldest first
        self._arrivals: deque[tuple[float, int]] = deque()
        self._bank_columns: tuple[ring_messages.Bank, ProbeColumns] | None = None
        self._before = self._now = ReaderStatistics(0, 0, 0, 0, 0)

    def attach(self, welcome: ring_messages.Welcome) -> None:
        self.welcome = welcome
        self.num_attached += 1
        self._bank_columns = None

    def detach(self) -> None:
        """The engine is gone: its unfinished requests are cut off."""
        self._before, self._now = self.statistics, ReaderStatistics(0, 0, 0, 0, 0)
        self.welcome = None
        for request in self._live():
            request.is_cut_off = True

    def add(self, record: Record, bank: ring_messages.Bank) -> None:
        columns = self._columns_of(bank)
        num_tokens = 0
        for span in split_rows(record.rows):
            part = slice(span.begin, span.end)
            request = self._find_request(span, record.rows[part])
            if request is None:
                continue
            if span.is_marks:
                self._add_marks(request, record.rows[part])
            else:
                request.add_tokens(record.rows[part], record.scores_RC[part], columns)
                num_tokens += span.end - span.begin
        self.num_rows += num_tokens
        self._arrivals.append((self._clock(), num_tokens))
        self._drop_old_arrivals()

    def set_statistics(self, statistics: ReaderStatistics) -> None:
        """Set the counts of the attached engine."""
        self._now = statistics

    @property
    def statistics(self) -> ReaderStatistics:
        """The sum over all engines so far; the lag is that of the attached one."""
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
        """Rows of the last moments, so that it falls to 0 when the engine is idle."""
        self._drop_old_arrivals()
        return sum(num_rows for _, num_rows in self._arrivals) / RATE_WINDOW_S

    def newest(self, limit: int) -> list[LiveRequest]:
        """Unfinished requests first, then finished ones; each group newest first."""
        newest = [*reversed(self._requests.values())]
        newest.sort(key=lambda request: request.is_over)
        return newest[: max(limit, 0)]

    def _live(self) -> Iterator[LiveRequest]:
        return (request for request in self._requests.values() if not request.is_over)

    def _add_marks(self, request: LiveRequest, rows: NDArray[np.void]) -> None:
        was_over = request.is_over
        request.add_marks(rows)
        self.num_finished += request.is_over and not was_over

    def _find_request(self, span: RowSpan, rows: NDArray[np.void]) -> LiveRequest | None:
        """The request of these rows; None if they only end one that is not known."""
        key = (span.stream, span.choice)
        request = self._requests.get(key)
        if _is_finish_mark(rows) or (request is not None and not request.is_over):
            return request
        self._requests.pop(key, None)  # a new request uses the stream id again
        if len(self._requests) >= MAX_REQUESTS:
            del self._requests[next(iter(self._requests))]
        self._requests[key] = request = LiveRequest(*key)
        return request

    def _drop_old_arrivals(self) -> None:
        oldest_s = self._clock() - RATE_WINDOW_S
        while self._arrivals and self._arrivals[0][0] < oldest_s:
            self._arrivals.popleft()

    def _columns_of(self, bank: ring_messages.Bank) -> ProbeColumns:
        if self._bank_columns is None or self._bank_columns[0] is not bank:
            self._bank_columns = (bank, ProbeColumns.from_bank(bank))
        self.columns = self._bank_columns[1]
        return self.columns


def _is_finish_mark(rows: NDArray[np.void]) -> bool:
    return bool((rows["phase"] == ring_messages.FINISHED).all())
