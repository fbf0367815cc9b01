"""Takes records; gives the rows of each request. A row goes where its stream id says, or nowhere.

R = rows of a record, C = columns (probes) of its bank
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Final, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from clairai import wire
from clairai.errors import ClairaiError, ConfigError
from clairai.match.trail import StreamRows, Trail

MAX_STREAMS: Final = 4096
MAX_ROWS: Final = 1_000_000


class Record(Protocol):
    """What the ledger reads of a record."""

    @property
    def seq(self) -> int: ...
    @property
    def rows(self) -> NDArray[np.void]: ...
    @property
    def scores_RC(self) -> NDArray[np.float32]: ...


@dataclass(frozen=True)
class Statistics:
    """Every row that was fed is in `rows` or in `orphaned`."""

    rows: int  # given to their stream
    orphaned: int  # of streams nobody watches: given to no one
    evicted: int  # streams dropped to stay within the bounds
    streams: int  # held now
    held_rows: int  # held now


class Run(NamedTuple):
    """Neighbours in a record that belong together: one choice of one stream, marks or tokens."""

    begin: int
    end: int
    stream: int
    choice: int
    is_marks: bool


class Ledger:
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
        self._trails: dict[int, dict[int, Trail]] = {}  # stream, choice; oldest stream first
        self._finished: dict[int, None] = {}  # streams in the order they finished
        self._rows = self._orphaned = self._evicted = self._held_rows = 0

    def watch(self, stream: int) -> None:
        """Keep this stream's rows from now on; a ledger that keeps all needs no telling."""
        if self._watched is not None:
            self._watched.add(stream)

    def feed(self, record: Record, bank: wire.Bank) -> None:
        """Give each row to its stream; `bank` is the one whose version the record carries."""
        names = tuple(probe.name for probe in bank.probes)
        _check(record, names)
        rows, scores_RC = record.rows, record.scores_RC
        for run in runs(rows):
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

    def rows(self, stream: int, choice: int = 0) -> StreamRows | None:
        """What is known of one choice so far; None if nothing is."""
        trail = self._trails.get(stream, {}).get(choice)
        return None if trail is None else trail.rows()

    def close(self, stream: int) -> dict[int, StreamRows]:
        """The stream's rows by choice; the ledger forgets it and no longer watches it."""
        if self._watched is not None:
            self._watched.discard(stream)
        return {choice: trail.rows() for choice, trail in self._drop(stream).items()}

    def statistics(self) -> Statistics:
        return Statistics(
            self._rows, self._orphaned, self._evicted, len(self._trails), self._held_rows
        )

    def _trail(self, run: Run, rows: NDArray[np.void]) -> Trail | None:
        """Where the run belongs, by stream and choice exactly; None if nobody wants it."""
        choices = self._trails.get(run.stream)
        if choices is None:
            if not self._is_wanted(run, rows):
                return None
            choices = self._trails[run.stream] = {}
        if run.choice not in choices:
            choices[run.choice] = Trail()
        return choices[run.choice]

    def _is_wanted(self, run: Run, rows: NDArray[np.void]) -> bool:
        if self._watched is not None:
            return run.stream in self._watched
        # An end mark that comes after close() must not open the stream again.
        return not (run.is_marks and (rows["phase"] == wire.FINISHED).all())

    def _note_finished(self, run: Run) -> None:
        # Tokens change it too: a choice that begins after the others ended opens the stream again.
        if run.is_marks or run.stream in self._finished:
            self._finished.pop(run.stream, None)
            if all(trail.finished for trail in self._trails[run.stream].values()):
                self._finished[run.stream] = None

    def _drop(self, stream: int) -> dict[int, Trail]:
        self._finished.pop(stream, None)
        choices = self._trails.pop(stream, {})
        self._held_rows -= sum(trail.num_rows for trail in choices.values())
        return choices

    def _evict(self) -> None:
        while len(self._trails) > self._max_streams or self._held_rows > self._max_rows:
            self._drop(next(iter(self._finished or self._trails)))
            self._evicted += 1


def runs(rows: NDArray[np.void]) -> Iterator[Run]:
    """Cut a record where the stream, the choice or the sort of row changes."""
    if not len(rows):
        return iter(())
    is_marks = rows["phase"] >= wire.CACHED
    changes = np.zeros(len(rows), bool)
    changes[0] = True
    for field in (rows["stream"], rows["choice"], is_marks):
        changes[1:] |= field[1:] != field[:-1]
    begins = np.flatnonzero(changes)
    ends = np.append(begins[1:], len(rows))
    fields = (begins, ends, rows["stream"][begins], rows["choice"][begins], is_marks[begins])
    return map(Run, *(field.tolist() for field in fields))


def _check(record: Record, names: tuple[str, ...]) -> None:
    rows, shape = record.rows, record.scores_RC.shape
    if rows.dtype != wire.ROW or shape != (len(rows), len(names)):
        raise ClairaiError(
            f"record {record.seq} has scores of shape {shape} for {len(rows)} rows and a bank of "
            f"{len(names)} probes: please report"
        )
    if len(rows) and rows["phase"].max() > wire.FINISHED:
        raise ClairaiError(
            f"record {record.seq} has a row of phase {rows['phase'].max()}, and the last phase is "
            f"{wire.FINISHED}: please report"
        )
