"""Collects the rows of records by request: a row goes where its stream id says, or nowhere.

Runs in: any reader.

N = positions with a row, P = probes, R = rows of a record, C = columns (probes) of its bank
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Final, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from clairai.errors import ClairaiError, ConfigError
from clairai.wire import ring_messages

MAX_STREAMS: Final = 4096
MAX_ROWS: Final = 1_000_000
_MIN_ROWS: Final = 4
UNKNOWN_VERSION: Final = -1  # in an array of versions


class ScoreRecord(Protocol):
    """The part of a ring record that is read here."""

    @property
    def seq(self) -> int: ...
    @property
    def rows(self) -> NDArray[np.void]: ...
    @property
    def scores_RC(self) -> NDArray[np.float32]: ...


class RowSpan(NamedTuple):
    """Consecutive rows of a record of one choice of one stream: all marks, or all tokens.

    A mark stands for no forwarded token: a cached span, or the end of a request.
    """

    begin: int
    end: int
    stream: int
    choice: int
    is_marks: bool


def split_rows(rows: NDArray[np.void]) -> Iterator[RowSpan]:
    """Split a record where the stream or the choice changes, or where marks and tokens meet."""
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


class CachedSpan(NamedTuple):
    """Tokens of a prompt that the prefix cache served; they all stand for the same."""

    first: int
    span: int
    media: int  # as of `ring_messages.media_of`


@dataclass(frozen=True, eq=False)
class RowIndex:
    """Which rows one choice of one request has; positions ascend and none occurs twice."""

    names: tuple[str, ...]
    positions: NDArray[np.int64]
    token_ids: NDArray[np.int32]
    phases: NDArray[np.uint8]
    media: NDArray[np.uint8]  # as of `ring_messages.media_of`
    weights_N: NDArray[np.int64]  # version of the weights; -1: unknown
    cached: tuple[CachedSpan, ...]
    finished: bool


@dataclass(frozen=True, eq=False)
class RowsByPosition(RowIndex):
    """The rows of one choice of one request, and their scores."""

    scores_NP: NDArray[np.float32]  # NaN where the bank did not have the probe at that step


class _RowSegment:
    """Rows scored by the same probes and weights, in arrays that double as they fill."""

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
    """All rows of one choice of one request, in order of arrival."""

    def __init__(self) -> None:
        self._segments: list[_RowSegment] = []
        self._cached: list[CachedSpan] = []
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
        """Add rows of forwarded tokens, scored by the probes `names`; how many were added."""
        last = self._segments[-1] if self._segments else None
        if last is None or (last.names, last.weights) != (names, weights):
            last = _RowSegment(names, weights, len(rows))
            self._segments.append(last)
        last.append(rows, scores_RC)
        return len(rows)

    def add_marks(self, rows: NDArray[np.void], names: tuple[str, ...]) -> int:
        """Add marks; how many were added, not counting the end of a request."""
        if not self._segments:  # a request that the cache served whole still names its probes
            self._segments.append(_RowSegment(names, None, 0))
        is_cached = rows["phase"] == ring_messages.CACHED
        self.finished |= not is_cached.all()
        cached = cached_spans(*(rows[name][is_cached] for name in ("position", "span", "flags")))
        self._cached.extend(cached)
        return len(cached)

    def rows(self) -> RowsByPosition:
        """The rows so far in order of position, the newest of each."""
        rows = np.concatenate([segment.rows for segment in self._segments] or [_no_rows()])
        names = tuple(dict.fromkeys(name for part in self._segments for name in part.names))
        newest = newest_rows(rows["position"])
        kept = rows[newest]
        return RowsByPosition(
            names=names,
            positions=kept["position"].astype(np.int64),
            token_ids=kept["token_id"].astype(np.int32),
            phases=kept["phase"].astype(np.uint8),
            media=ring_messages.media_of(kept["flags"]),
            scores_NP=self._scores(names, len(rows))[newest],
            weights_N=self._weights()[newest],
            cached=tuple(self._cached),
            finished=self.finished,
        )

    def _weights(self) -> NDArray[np.int64]:
        versions = [
            UNKNOWN_VERSION if part.weights is None else part.weights for part in self._segments
        ]
        return np.repeat(np.array(versions, np.int64), [part.num_rows for part in self._segments])

    def _scores(self, names: tuple[str, ...], num_rows: int) -> NDArray[np.float32]:
        scores = np.full((num_rows, len(names)), np.nan, np.float32)
        begin = 0
        column_of = {name: column for column, name in enumerate(names)}
        for segment in self._segments:
            columns = [column_of[name] for name in segment.names]
            scores[begin : begin + segment.num_rows, columns] = segment.scores
            begin += segment.num_rows
        return scores


def cached_spans(
    starts: NDArray[np.integer], spans: NDArray[np.integer], flags: NDArray[np.uint8]
) -> tuple[CachedSpan, ...]:
    media = ring_messages.media_of(flags)
    return tuple(map(CachedSpan, starts.tolist(), spans.tolist(), media.tolist()))


def newest_rows(positions: NDArray[np.integer]) -> NDArray[np.intp]:
    """Index of the last row to arrive for each position: a recomputed row replaces an older one."""
    _, from_end = np.unique(positions[::-1], return_index=True)
    newest: NDArray[np.intp] = len(positions) - 1 - from_end
    return newest


def _no_rows() -> NDArray[np.void]:
    return np.empty(0, ring_messages.ROW)


@dataclass(frozen=True)
class CollectorStatistics:
    """Every row that was added is counted in `rows` or in `orphaned`."""

    rows: int  # kept for their stream
    orphaned: int  # of streams that are not watched
    evicted: int  # streams dropped to stay within the bounds
    streams: int  # held now
    held_rows: int  # held now


class RowCollector:
    """Keeps the rows of every stream, or of watched streams only, within bounds.

    Over a bound it drops the stream that finished first; if none has, the one that began first.
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
        self._choices: dict[int, dict[int, ChoiceRows]] = {}  # stream, choice; oldest stream first
        self._finished: dict[int, None] = {}  # streams in the order they finished
        self._rows = self._orphaned = self._evicted = self._held_rows = 0

    def watch(self, stream: int) -> None:
        """Keep this stream's rows from now on; no effect on a collector that keeps all."""
        if self._watched is not None:
            self._watched.add(stream)

    def add(self, record: ScoreRecord, bank: ring_messages.Bank) -> None:
        """Add the rows of a record; `bank` is the one whose version the record carries."""
        names = tuple(probe.name for probe in bank.probes)
        _check_record(record, names)
        rows, scores_RC = record.rows, record.scores_RC
        for span in split_rows(rows):
            part = slice(span.begin, span.end)
            held = self._find_choice(span, rows[part])
            if held is None:
                self._orphaned += span.end - span.begin
                continue
            self._rows += span.end - span.begin
            if span.is_marks:
                self._held_rows += held.add_marks(rows[part], names)
            else:
                scores = scores_RC[part]
                self._held_rows += held.add_tokens(rows[part], scores, names, bank.weights)
            self._note_finished(span)
        self._evict()

    def rows(self, stream: int, choice: int = 0) -> RowsByPosition | None:
        """The rows of one choice so far; None if there are none."""
        held = self._choices.get(stream, {}).get(choice)
        return None if held is None else held.rows()

    def close(self, stream: int) -> dict[int, RowsByPosition]:
        """The stream's rows by choice; it is forgotten and no longer watched."""
        if self._watched is not None:
            self._watched.discard(stream)
        return {choice: held.rows() for choice, held in self._drop(stream).items()}

    def statistics(self) -> CollectorStatistics:
        return CollectorStatistics(
            self._rows, self._orphaned, self._evicted, len(self._choices), self._held_rows
        )

    def _find_choice(self, span: RowSpan, rows: NDArray[np.void]) -> ChoiceRows | None:
        """Where these rows belong, by stream and choice exactly; None if nobody wants them."""
        choices = self._choices.get(span.stream)
        if choices is None:
            if not self._is_wanted(span, rows):
                return None
            choices = self._choices[span.stream] = {}
        if span.choice not in choices:
            choices[span.choice] = ChoiceRows()
        return choices[span.choice]

    def _is_wanted(self, span: RowSpan, rows: NDArray[np.void]) -> bool:
        if self._watched is not None:
            return span.stream in self._watched
        # An end mark that arrives after close() must not open the stream again.
        return not (span.is_marks and (rows["phase"] == ring_messages.FINISHED).all())

    def _note_finished(self, span: RowSpan) -> None:
        # Tokens count too: a choice that begins after the others ended opens the stream again.
        if span.is_marks or span.stream in self._finished:
            self._finished.pop(span.stream, None)
            if all(held.finished for held in self._choices[span.stream].values()):
                self._finished[span.stream] = None

    def _drop(self, stream: int) -> dict[int, ChoiceRows]:
        self._finished.pop(stream, None)
        choices = self._choices.pop(stream, {})
        self._held_rows -= sum(held.num_rows for held in choices.values())
        return choices

    def _evict(self) -> None:
        while len(self._choices) > self._max_streams or self._held_rows > self._max_rows:
            self._drop(next(iter(self._finished or self._choices)))
            self._evicted += 1


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
