"""Takes what happens to captured rows, answer by answer; gives what to tell of each. Thread-safe.

A row is one token at one point. Bounded: the oldest finished answers are forgotten first. Where the
rows are taken in a process of their own, there is one of these in each: the clerk's knows, and what
changes in it is told to the engine's.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Final

from clairai.capture.consumers import Consumer
from clairai.capture.pipe_messages import AnswerReport
from clairai.engine.capture.capture_plan import CapturePlan
from clairai.wire.capture_messages import Captured, CapturePlace, CaptureState, CaptureStatus

MAX_REMEMBERED_ANSWERS: Final = 1 << 14  # answers
AnswerId = tuple[int, int]  # stream and choice


@dataclass
class _AnswerState:
    order: CapturePlan
    number: int  # tells it from others that had its seat
    rows: int = 0
    dropped: int = 0
    heard_dropped: int = 0  # as the clerk's own results say
    discarded: int = 0
    state: CaptureStatus = "open"
    reason: str = ""
    waits: str = ""  # why it is not safe yet
    safe: set[str] = field(default_factory=set)  # consumers that have all of it
    lost: dict[str, int] = field(default_factory=dict)  # by consumer
    last: AnswerReport | None = None  # what was told of it

    @property
    def is_live(self) -> bool:
        return self.state in ("open", "writing")


@dataclass(frozen=True)
class RowTotals:
    """Rows since the engine started."""

    rows: int = 0
    dropped: int = 0
    discarded: int = 0


class CaptureResults:
    """What became of the rows of each answer."""

    def __init__(self, consumers: Mapping[str, Consumer]) -> None:
        self._consumers = consumers
        self._lock = threading.Lock()
        self._entries: OrderedDict[AnswerId, _AnswerState] = OrderedDict()
        self._writing: dict[AnswerId, None] = {}  # finished, and not known to be safe
        self._seats: dict[int, list[AnswerId]] = {}
        self._rows = self._dropped = self._discarded = 0
        self._heard = RowTotals()
        self._opened = 0
        self._changed: dict[AnswerId, None] = {}  # since somebody last asked
        self.news = threading.Event()  # something else than a number has changed

    def open(self, seat: AnswerId, order: CapturePlan, number: int | None = None) -> int:
        """The number by which it is told from others that had its seat."""
        with self._lock:
            self._opened = self._opened + 1 if number is None else number
            self._writing.pop(seat, None)
            if self._entries.pop(seat, None) is None:
                self._seats.setdefault(seat[0], []).append(seat)
            self._entries[seat] = _AnswerState(order, self._opened)
            while len(self._entries) > MAX_REMEMBERED_ANSWERS:
                self._forget(next(iter(self._entries)))
            return self._opened

    def _forget(self, seat: AnswerId) -> None:
        del self._entries[seat]
        self._writing.pop(seat, None)
        self._changed.pop(seat, None)
        self._seats[seat[0]].remove(seat)
        if not self._seats[seat[0]]:
            del self._seats[seat[0]]

    def _entry(self, seat: AnswerId) -> _AnswerState | None:
        """To be changed."""
        entry = self._entries.get(seat)
        if entry is not None:
            self._changed[seat] = None
        return entry

    def gave(self, counts: Mapping[AnswerId, int]) -> None:
        """Rows went to all of their consumers."""
        with self._lock:
            for seat, rows in counts.items():
                self._rows += rows
                if (entry := self._entry(seat)) is not None:
                    entry.rows += rows

    def dropped(self, seat: AnswerId, rows: int, reason: str) -> None:
        with self._lock:
            self._dropped += rows
            if (entry := self._entry(seat)) is not None:
                entry.dropped += rows
                entry.reason = entry.reason or reason

    def discarded(self, seat: AnswerId, rows: int, reason: str) -> None:
        with self._lock:
            self._discarded += rows
            if (entry := self._entry(seat)) is not None:
                entry.discarded += rows
                entry.state, entry.reason = "discarded", reason
        self.news.set()

    def failed(self, seat: AnswerId, reason: str) -> None:
        with self._lock:
            if (entry := self._entry(seat)) is not None:
                entry.state, entry.reason = "failed", reason
                self._writing.pop(seat, None)
        self.news.set()

    def finished(self, seat: AnswerId) -> None:
        """Nothing follows; what there is is on its way."""
        with self._lock:
            if (entry := self._entry(seat)) is not None and entry.state == "open":
                entry.state = "writing"
                self._writing[seat] = None
        self.news.set()

    def writing(self, consumer: str) -> list[AnswerId]:
        """Those that are finished, and not known to be safe with this consumer."""
        with self._lock:
            entries = ((seat, self._entries[seat]) for seat in self._writing)
            return [
                s for s, one in entries if consumer in one.order.to and consumer not in one.safe
            ]

    def waits(self, seats: Iterable[AnswerId], reason: str) -> None:
        """They are not safe yet, and why."""
        with self._lock:
            for seat in seats:
                if (entry := self._entry(seat)) is not None:
                    entry.waits = reason
        self.news.set()

    def safe(self, seats: Iterable[AnswerId], consumer: str) -> None:
        """All that these gave is safe there, or counted as lost."""
        with self._lock:
            for seat in seats:
                entry = self._entry(seat)
                if entry is None or entry.state != "writing":
                    continue
                entry.safe.add(consumer)
                if entry.safe.issuperset(entry.order.to):
                    entry.state, entry.waits = "kept", ""
                    del self._writing[seat]
        self.news.set()

    def fail_unsafe(self, reason: str) -> None:
        """Nobody takes rows any more: what is not known to be safe is lost."""
        with self._lock:
            for entry in self._entries.values():
                if not entry.is_live:
                    continue
                for name in set(entry.order.to) - entry.safe:
                    entry.lost[name] = max(entry.lost.get(name, 0), entry.rows)
                entry.state, entry.reason = "failed", reason
            self._writing.clear()

    def changes(self, *, asks_consumers: bool = False) -> list[AnswerReport]:
        """What has changed since this was last asked; a thorough look asks the consumers too."""
        with self._lock:
            if asks_consumers:
                live = (seat for seat, entry in self._entries.items() if entry.is_live)
                self._changed.update(dict.fromkeys(live))
            found, self._changed = [*self._changed], {}
            return [told for seat in found if (told := self._summed(seat)) is not None]

    def _summed(self, seat: AnswerId) -> AnswerReport | None:
        """None if that is what was last told."""
        entry = self._entries[seat]
        lost = tuple(self._lost(name, seat, entry) for name in entry.order.to)
        told = AnswerReport(
            entry.number,
            *seat,
            entry.state,
            entry.rows,
            entry.dropped,
            entry.discarded,
            entry.reason,
            entry.waits,
            lost,
            tuple(sorted(entry.safe)),
        )
        is_same, entry.last = told == entry.last, told
        return None if is_same else told

    def hear(self, told: Iterable[AnswerReport], totals: RowTotals) -> None:
        """What another's `changes` say, of answers that are still those."""
        with self._lock:
            self._heard = totals
            for one in told:
                entry = self._entries.get((one.stream, one.choice))
                if entry is None or entry.number != one.number:
                    continue
                entry.state, entry.rows, entry.discarded = one.state, one.rows, one.discarded
                entry.heard_dropped, entry.waits = one.dropped, one.waits
                entry.reason = one.reason or entry.reason
                entry.safe = set(one.safe)
                entry.lost = dict(zip(entry.order.to, one.lost, strict=True))

    def of_stream(self, stream: int) -> tuple[Captured, ...]:
        with self._lock:
            return tuple(self._told(seat) for seat in sorted(self._seats.get(stream, ())))

    def newest(self, limit: int) -> tuple[tuple[Captured, ...], ...]:
        with self._lock:
            streams = dict.fromkeys(stream for stream, _ in reversed(self._entries))
            return tuple(
                tuple(self._told(seat) for seat in sorted(self._seats[stream]))
                for stream in [*streams][: max(limit, 0)]
            )

    def _told(self, seat: AnswerId) -> Captured:
        entry = self._entries[seat]
        places = tuple(self._place(name, seat, entry) for name in entry.order.to)
        bad = next((place for place in places if place.state == "failed"), None)
        is_failed = bad is not None and entry.is_live
        return Captured(
            stream=seat[0],
            choice=seat[1],
            state="failed" if is_failed else entry.state,
            points=entry.order.points,
            encoder=entry.order.encoder,
            rows=entry.rows,
            dropped=entry.dropped + entry.heard_dropped,
            discarded=entry.discarded,
            reason=next(filter(None, (entry.reason, *(p.reason for p in places), entry.waits)), ""),
            places=places,
        )

    def _place(self, name: str, seat: AnswerId, entry: _AnswerState) -> CapturePlace:
        consumer = self._consumers[name]
        state, lost = consumer.state, self._lost(name, seat, entry)
        return CapturePlace(name, consumer.where, lost, state.name, state.reason)

    def _lost(self, name: str, seat: AnswerId, entry: _AnswerState) -> int:
        # Told once, and of a stream: its first answer keeps the number for all of them.
        first_answer = min(self._seats[seat[0]])
        if count := self._consumers[name].losses(seat[0]):
            first = self._entries[first_answer]
            first.lost[name] = first.lost.get(name, 0) + count
            self._changed[first_answer] = None
        return entry.lost.get(name, 0)

    def totals(self) -> RowTotals:
        with self._lock:
            return self._totals()

    def _totals(self) -> RowTotals:
        heard = self._heard
        return RowTotals(
            self._rows + heard.rows,
            self._dropped + heard.dropped,
            self._discarded + heard.discarded,
        )

    def state(
        self, *, staging_nbytes: int, pending_nbytes: int, stash_nbytes: int = 0
    ) -> CaptureState:
        with self._lock:
            totals = self._totals()
            return CaptureState(
                places=tuple(
                    CapturePlace(name, one.where, 0, one.state.name, one.state.reason)
                    for name, one in self._consumers.items()
                ),
                rows=totals.rows,
                dropped=totals.dropped,
                discarded=totals.discarded,
                staging_nbytes=staging_nbytes,
                pending_nbytes=pending_nbytes,
                stash_nbytes=stash_nbytes,
            )
