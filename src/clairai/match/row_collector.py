"""Takes one request's rows as they come; gives them in order of position, the newest of each.

N = positions with a row, P = probes, R = rows of one run, C = columns of its bank
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Final, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from clairai.errors import ClairaiError, ConfigError
from clairai.wire import ring_messages

_MIN_ROWS: Final = 4
_UNKNOWN_VERSION: Final = -1  # in an array of versions


@dataclass(frozen=True, eq=False)
class RowsByPosition:
    """What is known of one choice of one request; positions ascend and none is there twice."""

    names: tuple[str, ...]
    positions: NDArray[np.int64]
    token_ids: NDArray[np.int32]
    phases: NDArray[np.uint8]
    scores_NP: NDArray[np.float32]  # NaN where the bank did not hold the probe at that step
    weights_N: NDArray[np.int64]  # version of the weights; -1: the engine does not say
    cached: tuple[tuple[int, int], ...]  # (first position, span) of each run a cache served
    finished: bool


class _RowSegment:
    """Rows scored by the same probes and weights; its arrays double as they fill."""

    def __init__(self, names: tuple[str, ...], weights: int | None, num_rows: int) -> None:
        self.names, self.weights = names, weights
        self.num_rows = 0
        size = max(num_rows, _MIN_ROWS)
        self._rows = np.empty(size, ring_messages.ROW)
        self._scores = np.empty((size, len(names)), np.float32)

    def append(self, rows: NDArray[np.void], scores_RC: NDArray[np.float32]) -> None:
        end = self.num_rows + len(rows)
        if end > len(self._rows):
            self._grow(max(end, 2 * len(self._rows)))
        self._rows[self.num_rows : end] = rows
        self._scores[self.num_rows : end] = scores_RC
        self.num_rows = end

    @property
    def rows(self) -> NDArray[np.void]:
        return self._rows[: self.num_rows]

    @property
    def scores(self) -> NDArray[np.float32]:
        return self._scores[: self.num_rows]

    def _grow(self, size: int) -> None:
        rows, scores = self.rows, self.scores
        self._rows = np.empty(size, ring_messages.ROW)
        self._scores = np.empty((size, len(self.names)), np.float32)
        self._rows[: self.num_rows], self._scores[: self.num_rows] = rows, scores


class ChoiceRows:
    """Everything one choice of one request left behind, in order of arrival."""

    def __init__(self) -> None:
        self._segments: list[_RowSegment] = []
        self._cached: list[tuple[int, int]] = []
        self.finished = False

    @property
    def num_rows(self) -> int:
        return sum(segment.num_rows for segment in self._segments) + len(self._cached)

    def add_tokens(
        self,
        rows: NDArray[np.void],
        scores_RC: NDArray[np.float32],
        names: tuple[str, ...],
        weights: int | None = None,
    ) -> int:
        """Keep rows of forwarded tokens, scored by the probes `names`; how many it keeps."""
        last = self._segments[-1] if self._segments else None
        if last is None or (last.names, last.weights) != (names, weights):
            last = _RowSegment(names, weights, len(rows))
            self._segments.append(last)
        last.append(rows, scores_RC)
        return len(rows)

    def add_marks(self, rows: NDArray[np.void], names: tuple[str, ...]) -> int:
        """Keep rows that stand for no forwarded token; how many: the end is only noted."""
        if not self._segments:  # a request served whole from a cache still has its probes, unscored
            self._segments.append(_RowSegment(names, None, 0))
        is_cached = rows["phase"] == ring_messages.CACHED
        self.finished |= not is_cached.all()
        starts, spans = rows["position"][is_cached], rows["span"][is_cached]
        self._cached.extend(zip(starts.tolist(), spans.tolist(), strict=True))
        return len(starts)

    def rows(self) -> RowsByPosition:
        """All of it so far."""
        rows = np.concatenate([segment.rows for segment in self._segments] or [_no_rows()])
        names = tuple(dict.fromkeys(name for part in self._segments for name in part.names))
        newest = _newest_rows(rows["position"])
        kept = rows[newest]
        return RowsByPosition(
            names=names,
            positions=kept["position"].astype(np.int64),
            token_ids=kept["token_id"].astype(np.int32),
            phases=kept["phase"].astype(np.uint8),
            scores_NP=self._scores(names, len(rows))[newest],
            weights_N=self._weights()[newest],
            cached=tuple(self._cached),
            finished=self.finished,
        )

    def _weights(self) -> NDArray[np.int64]:
        said = [
            _UNKNOWN_VERSION if part.weights is None else part.weights for part in self._segments
        ]
        return np.repeat(np.array(said, np.int64), [part.num_rows for part in self._segments])

    def _scores(self, names: tuple[str, ...], num_rows: int) -> NDArray[np.float32]:
        scores = np.full((num_rows, len(names)), np.nan, np.float32)
        begin = 0
        column_of = {name: column for column, name in enumerate(names)}
        for segment in self._segments:
            columns = [column_of[name] for name in segment.names]
            scores[begin : begin + segment.num_rows, columns] = segment.scores
            begin += segment.num_rows
        return scores


def _newest_rows(positions: NDArray[np.unsignedinteger]) -> NDArray[np.intp]:
    """Index of the last row to arrive of each position: what was recomputed replaces the old."""
    _, from_end = np.unique(positions[::-1], return_index=True)
    newest: NDArray[np.intp] = len(positions) - 1 - from_end
    return newest


def _no_rows() -> NDArray[np.void]:
    return np.empty(0, ring_messages.ROW)


# MERGED
# Takes records; gives the rows of each request. A row goes where its stream id says, or nowhere.
#
# R = rows of a record, C = columns (probes) of its bank


MAX_STREAMS: Final = 4096
MAX_ROWS: Final = 1_000_000


class ScoreRecord(Protocol):
    """What the ledger reads of a record."""

    @property
    def seq(self) -> int: ...
    @property
    def rows(self) -> NDArray[np.void]: ...
    @property
    def scores_RC(self) -> NDArray[np.float32]: ...


@dataclass(frozen=True)
class CollectorStatistics:
    """Every row that was fed is in `rows` or in `orphaned`."""

    rows: int  # given to their stream
    orphaned: int  # of streams nobody watches: given to no one
    evicted: int  # streams dropped to stay within the bounds
    streams: int  # held now
    held_rows: int  # held now


class RowSpan(NamedTuple):
    """Neighbours in a record that belong together: one choice of one stream, marks or tokens."""

    begin: int
    end: int
    stream: int
    choice: int
    is_marks: bool


class RowCollector:
    """Keeps the rows of every stream, or of watched streams only, within bounds.

    Over a bound, the stream that finished first goes; if none has, the one that began first.
    """

    def __init__(
        self,
        *,
        only: Iterable[int] | None = None,
        max_streams: int = MAX_STREAMS,
        max_rows: int = MAX_ROWS,
    ) -> None:
        if max_streams < 1 or max_rows < 1:
            raise ConfigError(
                f"max_streams is {max_streams} and max_rows {max_rows}; give at least 1 of each"
            )
        self._watched = None if only is None else set(only)
        self._max_streams = max_streams
        self._max_rows = max_rows
        self._trails: dict[int, dict[int, ChoiceRows]] = {}  # stream, choice; oldest stream first
        self._finished: dict[int, None] = {}  # streams in the order they finished
        self._rows = self._orphaned = self._evicted = self._held_rows = 0

    def watch(self, stream: int) -> None:
        """Keep this stream's rows from now on; a ledger that keeps all needs no telling."""
        if self._watched is not None:
            self._watched.add(stream)

    def feed(self, record: ScoreRecord, bank: ring_messages.Bank) -> None:
        """Give each row to its stream; `bank` is the one whose version the record carries."""
        names = tuple(probe.name for probe in bank.probes)
        _check_record(record, names)
        rows, scores_RC = record.rows, record.scores_RC
        for run in split_rows(rows):
            part = slice(run.begin, run.end)
            trail = self._trail(run, rows[part])
            if trail is None:
                self._orphaned += run.end - run.begin
                continue
            self._rows += run.end - run.begin
            if run.is_marks:
                self._held_rows += trail.add_marks(rows[part], names)
            else:
                scores = scores_RC[part]
                self._held_rows += trail.add_tokens(rows[part], scores, names, bank.weights)
            self._note_finished(run)
        self._evict()

    def rows(self, stream: int, choice: int = 0) -> RowsByPosition | None:
        """What is known of one choice so far; None if nothing is."""
        trail = self._trails.get(stream, {}).get(choice)
        return None if trail is None else trail.rows()

    def close(self, stream: int) -> dict[int, RowsByPosition]:
        """The stream's rows by choice; the ledger forgets it and no longer watches it."""
        if self._watched is not None:
            self._watched.discard(stream)
        return {choice: trail.rows() for choice, trail in self._drop(stream).items()}

    def statistics(self) -> CollectorStatistics:
        return CollectorStatistics(
            self._rows, self._orphaned, self._evicted, len(self._trails), self._held_rows
        )

    def _trail(self, run: RowSpan, rows: NDArray[np.void]) -> ChoiceRows | None:
        """Where the run belongs, by stream and choice exactly; None if nobody wants it."""
        choices = self._trails.get(run.stream)
        if choices is None:
            if not self._is_wanted(run, rows):
                return None
            choices = self._trails[run.stream] = {}
        if run.choice not in choices:
            choices[run.choice] = ChoiceRows()
        return choices[run.choice]

    def _is_wanted(self, run: RowSpan, rows: NDArray[np.void]) -> bool:
        if self._watched is not None:
            return run.stream in self._watched
        # An end mark that comes after close() must not open the stream again.
        return not (run.is_marks and (rows["phase"] == ring_messages.FINISHED).all())

    def _note_finished(self, run: RowSpan) -> None:
        # Tokens change it too: a choice that begins after the others ended opens the stream again.
        if run.is_marks or run.stream in self._finished:
            self._finished.pop(run.stream, None)
            if all(trail.finished for trail in self._trails[run.stream].values()):
                self._finished[run.stream] = None

    def _drop(self, stream: int) -> dict[int, ChoiceRows]:
        self._finished.pop(stream, None)
        choices = self._trails.pop(stream, {})
        self._held_rows -= sum(trail.num_rows for trail in choices.values())
        return choices

    def _evict(self) -> None:
        while len(self._trails) > self._max_streams or self._held_rows > self._max_rows:
            self._drop(next(iter(self._finished or self._trails)))
            self._evicted += 1


def split_rows(rows: NDArray[np.void]) -> Iterator[RowSpan]:
    """Cut a record where the stream, the choice or the sort of row changes."""
    if not len(rows):
        return iter(())
    is_marks = rows["phase"] >= ring_messages.CACHED
    changes = np.zeros(len(rows), bool)
    changes[0] = True
    for field in (rows["stream"], rows["choice"], is_marks):
        changes[1:] |= field[1:] != field[:-1]
    begins = np.flatnonzero(changes)
    ends = np.append(begins[1:], len(rows))
    fields = (begins, ends, rows["stream"][begins], rows["choice"][begins], is_marks[begins])
    return map(RowSpan, *(field.tolist() for field in fields))


def _check_record(record: ScoreRecord, names: tuple[str, ...]) -> None:
    rows, shape = record.rows, record.scores_RC.shape
    if rows.dtype != ring_messages.ROW or shape != (len(rows), len(names)):
        raise ClairaiError(
            f"record {record.seq} has scores of shape {shape} for {len(rows)} rows and a bank of "
            f"{len(names)} probes: please report"
        )
    if len(rows) and rows["phase"].max() > ring_messages.FINISHED:
        raise ClairaiError(
            f"record {record.seq} has a row of phase {rows['phase'].max()}, and the last phase is "
            f"{ring_messages.FINISHED}: please report"
        )
