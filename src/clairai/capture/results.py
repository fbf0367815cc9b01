"""Takes what happens to captured rows, answer by answer; gives what to tell of each. Thread-safe.

A row is one token at one point. Bounded: the oldest finished answers are forgotten first.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Final

from clairai.capture.consumers import Consumer
from clairai.capture.order import Order
from clairai.wire_capture import Captured, CaptureState, Place, State

REMEMBERED: Final = 1 << 14  # answers
Seat = tuple[int, int]  # stream and choice


@dataclass
class _Entry:
    order: Order
    rows: int = 0
    dropped: int = 0
    discarded: int = 0
    state: State = "open"
    reason: str = ""
    waits: str = ""  # why it is not safe yet
    safe: set[str] = field(default_factory=set)  # consumers that have all of it
    lost: dict[str, int] = field(default_factory=dict)  # by consumer


class Results:
    """What became of the rows of each answer."""

    def __init__(self, consumers: Mapping[str, Consumer]) -> None:
        self._consumers = consumers
        self._lock = threading.Lock()
        self._entries: OrderedDict[Seat, _Entry] = OrderedDict()
        self._writing: dict[Seat, None] = {}  # finished, and not known to be safe
        self._seats: dict[int, list[Seat]] = {}
        self._totals = _Totals()

    def open(self, seat: Seat, order: Order) -> None:
        with self._lock:
            self._writing.pop(seat, None)
            if self._entries.pop(seat, None) is None:
                self._seats.setdefault(seat[0], []).append(seat)
            self._entries[seat] = _Entry(order)
            while len(self._entries) > REMEMBERED:
                self._forget(next(iter(self._entries)))

    def _forget(self, seat: Seat) -> None:
        del self._entries[seat]
        self._writing.pop(seat, None)
        self._seats[seat[0]].remove(seat)
        if not self._seats[seat[0]]:
            del self._seats[seat[0]]

    def gave(self, counts: Mapping[Seat, int]) -> None:
        """Rows went to all of their consumers."""
        with self._lock:
            for seat, rows in counts.items():
                self._totals.rows += rows
                if seat in self._entries:
                    self._entries[seat].rows += rows

    def dropped(self, seat: Seat, rows: int, reason: str) -> None:
        with self._lock:
            self._totals.dropped += rows
            if seat in self._entries:
                entry = self._entries[seat]
                entry.dropped += rows
                entry.reason = entry.reason or reason

    def discarded(self, seat: Seat, rows: int, reason: str) -> None:
        with self._lock:
            self._totals.discarded += rows
            if seat in self._entries:
                entry = self._entries[seat]
                entry.discarded += rows
                entry.state, entry.reason = "discarded", reason

    def failed(self, seat: Seat, reason: str) -> None:
        with self._lock:
            if seat in self._entries:
                entry = self._entries[seat]
                entry.state, entry.reason = "failed", reason
                self._writing.pop(seat, None)

    def finished(self, seat: Seat) -> None:
        """Nothing follows; what there is is on its way."""
        with self._lock:
            if seat in self._entries and self._entries[seat].state == "open":
                self._entries[seat].state = "writing"
                self._writing[seat] = None

    def writing(self, consumer: str) -> list[Seat]:
        """Those that are finished, and not known to be safe with this consumer."""
        with self._lock:
            entries = ((seat, self._entries[seat]) for seat in self._writing)
            return [
                s for s, one in entries if consumer in one.order.to and consumer not in one.safe
            ]

    def waits(self, seats: Iterable[Seat], reason: str) -> None:
        """They are not safe yet, and why."""
        with self._lock:
            for seat in seats:
                if seat in self._entries:
                    self._entries[seat].waits = reason

    def safe(self, seats: Iterable[Seat], consumer: str) -> None:
        """All that these gave is safe there, or counted as lost."""
        with self._lock:
            for seat in seats:
                entry = self._entries.get(seat)
                if entry is None or entry.state != "writing":
                    continue
                entry.safe.add(consumer)
                if entry.safe.issuperset(entry.order.to):
                    entry.state, entry.waits = "kept", ""
                    del self._writing[seat]

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

    def _told(self, seat: Seat) -> Captured:
        entry = self._entries[seat]
        places = tuple(self._place(name, seat, entry) for name in entry.order.to)
        bad = next((place for place in places if place.state == "failed"), None)
        is_failed = bad is not None and entry.state in ("open", "writing")
        return Captured(
            stream=seat[0],
            choice=seat[1],
            state="failed" if is_failed else entry.state,
            points=entry.order.points,
            encoder=entry.order.encoder,
            rows=entry.rows,
            dropped=entry.dropped,
            discarded=entry.discarded,
            reason=next(filter(None, (entry.reason, *(p.reason for p in places), entry.waits)), ""),
            places=places,
        )

    def _place(self, name: str, seat: Seat, entry: _Entry) -> Place:
        consumer = self._consumers[name]
        # Told once, and of a stream: its first answer keeps the number for all of them.
        first = self._entries.get(min(self._seats[seat[0]]), entry)
        first.lost[name] = first.lost.get(name, 0) + consumer.losses(seat[0])
        state = consumer.state
        return Place(name, consumer.where, entry.lost.get(name, 0), state.name, state.reason)

    def state(
        self, *, staging_nbytes: int, pending_nbytes: int, stash_nbytes: int = 0
    ) -> CaptureState:
        with self._lock:
            totals = self._totals
            return CaptureState(
                places=tuple(
                    Place(name, one.where, 0, one.state.name, one.state.reason)
                    for name, one in self._consumers.items()
                ),
                rows=totals.rows,
                dropped=totals.dropped,
                discarded=totals.discarded,
                staging_nbytes=staging_nbytes,
                pending_nbytes=pending_nbytes,
                stash_nbytes=stash_nbytes,
            )


@dataclass
class _Totals:
    rows: int = 0
    dropped: int = 0
    discarded: int = 0
