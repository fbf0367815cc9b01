"""Takes the ring of the engine behind the proxy; gives its rows to the event loop, and counts.

One thread waits on the ring. It converts the rows of our own requests to plain lists; rows of
others are counted and shown to the observers only.

R = rows of a record, P = probes of its bank
"""

from __future__ import annotations

import itertools
import logging
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final

import numpy as np
from numpy.typing import NDArray

from clairai import wire
from clairai.errors import RingError
from clairai.match.ledger import Run, runs
from clairai.ring.attach import Reader
from clairai.ring.reader import ReaderStatistics, Record, Start
from clairai.stream.lane import Values
from clairai.stream.observe import Observer, RingNumbers
from clairai.stream.sheet import Parcel

LOOK_PAUSE_S: Final = 0.1
BUSY_PAUSE_S: Final = 2e-3
ATTACH_TIMEOUT_S: Final = 1.0
_NOTHING: Final = ReaderStatistics(0, 0, 0, 0, 0)
_FIELDS: Final = ("position", "token_id", "span")
_log: Final = logging.getLogger(__name__)

Deliver = Callable[[list[Parcel]], None]


class Feed:
    """`deliver` and `on_change` are called on the feed's thread.

    `aim` says which engine's socket to read; the feed attaches to it, again and again if need be.
    """

    def __init__(
        self, *, deliver: Deliver, on_change: Callable[[], None], observers: Sequence[Observer]
    ) -> None:
        # Streams of ours, and whether their prompts are wanted; there before a row can come.
        self.watched: dict[int, bool] = {}
        self.is_attached = False
        self.epoch: int | None = None
        self.model: str | None = None
        self.reason = "no engine was found yet"
        self.lost_at_s: float | None = None  # when a record was last found to be lost
        self.bank: wire.Bank | None = None  # of the newest record
        self._deliver = deliver
        self._on_change = on_change
        self._observers = list(observers)
        self._aim: Path | None = None
        self._aimed = threading.Event()
        self._stopping = threading.Event()
        self._resume: dict[Path, Start] = {}
        self._before = _NOTHING  # engines that are gone
        self._now = _NOTHING
        self._rows = self._orphaned = self._unnamed = 0
        self._thread = threading.Thread(target=self._run, name="clairai-feed", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """Ends the thread; blocks for a moment."""
        self._stopping.set()
        self._aimed.set()
        self._thread.join()

    def aim(self, path: Path | None, *, start: Start = "oldest") -> None:
        """Read the engine at this socket; `start` counts the first time it is read."""
        if path == self._aim:
            return
        if path is not None:
            self._resume.setdefault(path, start)
        self._aim = path
        self._aimed.set()

    def numbers(self, mismatched: int) -> RingNumbers:
        now, before = self._now, self._before
        return RingNumbers(
            attached=self.is_attached,
            epoch=self.epoch,
            records_delivered=before.delivered + now.delivered - self._unnamed,
            records_lost=before.lost + now.lost + self._unnamed,
            lag=now.lag,
            rows=self._rows,
            orphaned=self._orphaned,
            mismatched=mismatched,
        )

    def _run(self) -> None:
        while not self._stopping.is_set():
            self._aimed.clear()
            try:
                is_read = self._aim is not None and self._read_engine(self._aim)
            except Exception:  # a mistake of ours must not end all scores without a word
                _log.exception("the ring's feed failed; it begins again")
                is_read = False
            if not is_read:
                self._aimed.wait(LOOK_PAUSE_S)

    def _read_engine(self, path: Path) -> bool:
        """Whether the engine was there; returns when it is gone, or another is aimed at."""
        try:
            reader = Reader.attach(
                path, start=self._resume.get(path, "oldest"), timeout_s=ATTACH_TIMEOUT_S
            )
        except RingError as error:
            self._note_unattached(error.reason)
            return False
        with reader:
            self._note_attached(reader.welcome)
            try:
                self._read(reader, path)
            except RingError as error:
                _log.warning("the ring cannot be read on: %s", error.reason)
                return False
            finally:
                self._note_detached(path)
        return True

    def _read(self, reader: Reader, path: Path) -> None:
        while not self._stopping.is_set() and self._aim == path:
            # Asked before the poll: whatever a dead engine had published is there for that poll.
            is_dead = not reader.is_alive()
            records = reader.poll()
            if records:
                self._hand_over(records, reader)
            self._note(reader.statistics())
            if not records and is_dead and self._now.lag == 0:
                return
            if self._now.lag:
                continue
            if records:
                # A score is told with the next token: nobody waits, and the next look finds more.
                self._stopping.wait(BUSY_PAUSE_S)
            else:
                reader.wait(LOOK_PAUSE_S)

    def _note(self, now: ReaderStatistics) -> None:
        if now.lost > self._now.lost:
            self.lost_at_s = time.monotonic()
        self._now = now

    def _hand_over(self, records: list[Record], reader: Reader) -> None:
        named = [(record, bank) for record in records if (bank := self._bank_of(record, reader))]
        parcels: list[Parcel] = []
        for _, group in itertools.groupby(named, key=lambda pair: pair[1].version):
            pairs = list(group)
            parcels += self._parcels([record for record, _ in pairs], pairs[0][1])
        if parcels:
            self._deliver(parcels)
        for record, bank in named:
            self.bank = bank
            self._tell_observers(bank, record)

    def _bank_of(self, record: Record, reader: Reader) -> wire.Bank | None:
        """None if nobody can say what the record's columns are: it is lost."""
        try:
            bank = reader.bank(record.bank_version)
            if record.scores_RC.shape[1] == len(bank.probes):
                return bank
            reason = f"it has {record.scores_RC.shape[1]} columns, its bank {len(bank.probes)}"
        except RingError as error:
            reason = error.reason
        self._unnamed += 1
        self.lost_at_s = time.monotonic()
        _log.warning("a record is lost: %s", reason)
        return None

    def _parcels(self, records: list[Record], bank: wire.Bank) -> list[Parcel]:
        """The rows of our own requests, in order; converted all at once."""
        rows = np.concatenate([record.rows for record in records])
        phases = rows["phase"].tolist()
        kept = [run for run in runs(rows) if self._is_kept(run, phases)]
        if not kept:
            return []
        columns = [rows[name].tolist() for name in _FIELDS]
        scores = _scores(records, [run for run in kept if not run.is_marks])
        made, begin = [], 0
        for run in kept:
            part, end = slice(run.begin, run.end), begin
            end += 0 if run.is_marks else run.end - run.begin
            position, token_id, span = (column[part] for column in columns)
            about = (run.stream, run.choice, bank, position, token_id, phases[part], span)
            made.append(Parcel(*about, scores[begin:end]))
            begin = end
        return made

    def _is_kept(self, run: Run, phases: list[int]) -> bool:
        wants_prompt = self.watched.get(run.stream)
        if wants_prompt is None:
            self._orphaned += run.end - run.begin
            return False
        self._rows += run.end - run.begin
        # A prompt of a hundred thousand tokens that nobody asked about is not converted.
        return wants_prompt or wire.DECODE in phases[run.begin : run.end]

    def _tell_observers(self, bank: wire.Bank, record: Record) -> None:
        for observer in list(self._observers):
            try:
                observer.on_scores(bank, record.rows, record.scores_RC, record.stamp_ns)
            except Exception:
                _log.exception("%r is told no more", observer)
                self._observers.remove(observer)

    def _note_unattached(self, reason: str) -> None:
        if reason != self.reason:  # else: said already
            _log.warning("the ring cannot be attached: %s", reason)
        self.reason = reason

    def _note_attached(self, welcome: wire.Welcome) -> None:
        self.epoch, self.model, self.is_attached = welcome.epoch, welcome.model, True
        self._on_change()

    def _note_detached(self, path: Path) -> None:
        now, before = self._now, self._before
        self._resume[path] = now.first + now.delivered + now.lost
        self._before = ReaderStatistics(
            0,
            before.delivered + now.delivered,
            before.lost + now.lost,
            before.torn + now.torn,
            0,
        )
        self._now = _NOTHING
        self.is_attached, self.reason = False, "the engine has closed its ring"
        self._on_change()


def _scores(records: list[Record], tokens: list[Run]) -> list[Values]:
    """Of the rows of these runs, one after the other."""
    taken = [at for run in tokens for at in range(run.begin, run.end)]
    if not taken:
        return []
    scores_RP = np.concatenate([record.scores_RC for record in records])
    return plain(scores_RP if len(taken) == len(scores_RP) else scores_RP[taken])


def plain(scores_RP: NDArray[np.float32]) -> list[Values]:
    """Numbers that JSON writes in at most nine digits and that are the same float32 when read.

    None for what JSON has no number for.
    """
    wide = scores_RP.astype(np.float64)
    with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
        exponent = 8 - np.floor(np.log10(np.abs(wide)))
        scale = 10.0**exponent
        rounded = np.round(wide * scale) / scale
    is_exact = rounded.astype(np.float32) == scores_RP  # not for 0 and the very small
    made: list[Values] = np.where(is_exact, rounded, wide).tolist()
    if not np.isfinite(wide).all():
        made = [[v if v is not None and np.isfinite(v) else None for v in row] for row in made]
    return made
