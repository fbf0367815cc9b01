"""Takes rows as they come from the device; gives blocks to the consumers, on a thread of its own.

Whatever is told to it happens in the order in which it was told: a request begins before its rows
and ends after them. Rows of several steps are handed on together.
"""

from __future__ import annotations

import json
import logging
import threading
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Final

import numpy as np
from numpy.typing import NDArray

from clairai.capture.consumers import Consumer
from clairai.capture.flusher import Flusher
from clairai.capture.gauge import Gauge
from clairai.capture.inbox import Inbox, Pace, Told
from clairai.capture.order import Order
from clairai.capture.pending import Shelf
from clairai.capture.results import Results
from clairai.capture.taken import Load, Seat, Taken, Verdict, by_seat
from clairai.errors import StoreError
from clairai.store.codecs.base import Encoder
from clairai.store.rows import Block, Origin

_log: Final = logging.getLogger("clairai.capture")

OriginOf = Callable[[Encoder], Origin]


class Collector:
    """One thread between the engine and the consumers; nobody who tells it anything waits."""

    def __init__(
        self,
        consumers: Mapping[str, Consumer],
        origin_of: OriginOf,
        *,
        batch_nbytes: int,
        pending_nbytes: int,
        pace: Pace | None = None,
    ) -> None:
        self._consumers, self._origin_of = consumers, origin_of
        self.delivered = 0  # of those that were put
        self.results = Results(consumers)
        self._flushers = {
            name: Flusher(name, consumer, self.results) for name, consumer in consumers.items()
        }
        self._gauge = Gauge()
        self._shelf = Shelf(pending_nbytes)
        self._refused: dict[Seat, str] = {}  # whose rule cannot be judged, and why
        self._orders: dict[Seat, Order] = {}
        self._live: dict[int, set[int]] = {}  # choices of each stream that are not finished
        self._inbox = Inbox(batch_nbytes, pace or Pace())
        self._is_ending = False
        self._thread = threading.Thread(target=self._run, name="clairai-capture", daemon=True)
        self._thread.start()

    @property
    def pending_nbytes(self) -> int:
        return self._shelf.nbytes

    def begin(self, seat: Seat, order: Order, number: int | None = None) -> None:
        """`number` is its in the results of whoever is told of these."""
        self.results.open(seat, order, number)
        self._inbox.put(partial(self._begin, seat, order))

    def amend(self, seat: Seat, steering: str) -> None:
        """From now on the request is steered so."""
        self._inbox.put(partial(self._amend, seat, steering))

    def finish(self, seat: Seat) -> None:
        self._inbox.put(partial(self._finish, seat))

    def put(self, taken: Taken) -> None:
        self._inbox.put(taken)

    def relabel(self, origin_of: OriginOf) -> None:
        """What comes from now on is of other weights."""
        self._inbox.put(partial(setattr, self, "_origin_of", origin_of))

    def commit(self) -> None:
        """Have all that was given so far made safe; nobody waits for it."""
        self._inbox.put(self._commit)

    def close(self) -> None:
        """Give on what is there, then close the consumers."""
        self._inbox.put(self._end)
        self._thread.join()
        for flusher in self._flushers.values():
            flusher.close()
        for name, consumer in self._consumers.items():
            try:
                consumer.close()
            except StoreError as error:
                _log.error("consumer %s: %s", name, error.reason)
            except Exception:  # of somebody's plugin: the others are closed too
                _log.exception("consumer %s could not be closed", name)

    def _commit(self) -> None:
        self._gauge.turn()
        for name, flusher in self._flushers.items():
            if seats := self.results.writing(name):
                flusher.ask(seats)

    def _end(self) -> None:
        for seat in list(self._orders):
            self._finish(seat)
        self._is_ending = True

    def _run(self) -> None:
        while not self._is_ending:
            batch, told = self._inbox.next()
            if batch:
                self._deliver(batch)
            if told is not None:
                self._hear(told)

    def _hear(self, told: Told) -> None:
        try:
            told()
        except Exception:  # as below: the thread goes on for all others
            _log.exception("what was told of a captured request could not be passed on")

    def _deliver(self, batch: list[Taken]) -> None:
        try:
            loads = self._joined(batch)
        except Exception as error:  # a thread that ends unseen would be the worst of answers
            for taken in batch:
                self._lose(taken.counts(), error)
            loads = []
        finally:
            for taken in batch:
                taken.free()
        fidelity = self._measured(loads)
        for load in loads:
            try:
                self._give(load, fidelity[load.encoder])
            except Exception as error:
                self._lose(load.counts(), error)
        self.delivered += len(batch)

    def _measured(self, loads: list[Load]) -> dict[Encoder, dict[str, float]]:
        """One measure for all loads of an encoder that are given together."""
        nbytes: dict[Encoder, int] = {}
        for load in loads:
            nbytes[load.encoder] = nbytes.get(load.encoder, 0) + load.nbytes
        return {encoder: self._read_gauge(encoder, total) for encoder, total in nbytes.items()}

    def _read_gauge(self, encoder: Encoder, nbytes: int) -> dict[str, float]:
        try:
            return self._gauge.read(encoder, nbytes)
        except Exception:  # rows that cannot be measured are kept all the same
            _log.exception("what %s lost of rows cannot be measured", encoder.name)
            return {}

    def _lose(self, counts: Mapping[Seat, int], error: Exception) -> None:
        reason = f"rows could not be read, {type(error).__name__}: {error}"
        _log.error("%d captured rows are lost: %s", sum(counts.values()), reason)
        for seat, count in counts.items():
            self.results.dropped(seat, count, reason)
            self.results.failed(seat, reason)

    def _joined(self, batch: list[Taken]) -> list[Load]:
        """Copies of what came, joined."""
        found: dict[tuple[object, ...], list[Load]] = {}
        for taken in batch:
            for load in self._read(taken):
                found.setdefault(load.key, []).append(load)
        return [Load.joined(loads) for loads in found.values()]

    def _read(self, taken: Taken) -> Sequence[Load]:
        """The rules are judged before their rows go on. One that never comes harms no other."""
        try:
            taken.wait()
            for verdict in taken.verdicts():
                self._judge(verdict)
            loads = taken.loads()
            for encoder, sample in taken.samples():
                self._gauge.add(encoder, sample)
        except Exception as error:
            self._lose(taken.counts(), error)
            return ()
        return loads

    def _give(self, load: Load, fidelity: Mapping[str, float]) -> None:
        origin = self._origin_of(load.encoder)
        held_N = self._held(load.rows_N)
        for at, point in enumerate(load.points):
            arrays = {name: array[at] for name, array in load.arrays.items()}
            block = Block(origin, point, load.rows_N, arrays, fidelity)
            if held_N is None:
                self._offer(block, load.to)
            else:
                self._sort(block, load.to, held_N)
        if held_N is None:
            self.results.gave(load.counts())

    def _held(self, rows_N: NDArray[np.void]) -> NDArray[np.bool_] | None:
        """Which rows wait for a rule; None if none does."""
        if not len(self._shelf) and not self._refused:
            return None
        seats = zip(rows_N["stream"].tolist(), rows_N["choice"].tolist(), strict=True)
        is_held = (seat in self._shelf or seat in self._refused for seat in seats)
        held_N = np.fromiter(is_held, bool, len(rows_N))
        return held_N if held_N.any() else None

    def _sort(self, block: Block, to: tuple[str, ...], held_N: NDArray[np.bool_]) -> None:
        if not held_N.all():
            self._offer_and_count(block.taken(np.flatnonzero(~held_N)), to)
        for seat, places in by_seat(block.rows_N, np.flatnonzero(held_N)):
            if seat in self._refused:
                self._refuse(seat, len(places))
                continue
            part = block.taken(places)
            if lost := self._shelf.put(seat, part, to):
                reason = "no room to hold its rows until its rule is met; raise pending_mib"
                self.results.dropped(seat, lost, reason)

    def _offer(self, block: Block, to: tuple[str, ...]) -> None:
        for name in to:
            self._consumers[name].offer(block)

    def _offer_and_count(self, block: Block, to: tuple[str, ...]) -> None:
        self._offer(block, to)
        self.results.gave({seat: len(p) for seat, p in by_seat(block.rows_N)})

    def _judge(self, verdict: Verdict) -> None:
        seat = verdict.seat
        if seat not in self._shelf:
            return
        if verdict.score is None:
            reason = f"probe {verdict.probe} has no score for it: its rows are not kept"
            self._refused[seat] = reason
            self._refuse(seat, self._shelf.rows(seat))
            self._shelf.take(seat)
        elif verdict.score >= verdict.threshold:
            for block, to in self._shelf.take(seat):
                self._offer_and_count(block, to)

    def _refuse(self, seat: Seat, rows: int) -> None:
        """Those that come later too, until it is finished."""
        self.results.discarded(seat, rows, self._refused[seat])
        self.results.failed(seat, self._refused[seat])

    def _discard(self, seat: Seat, reason: str) -> None:
        rows = self._shelf.rows(seat)
        self._shelf.take(seat)
        self.results.discarded(seat, rows, reason)

    def _begin(self, seat: Seat, order: Order) -> None:
        self._gauge.turn()  # it may have files of its own
        self._orders[seat] = order
        self._live.setdefault(seat[0], set()).add(seat[1])
        if order.hold is not None:
            self._shelf.open(seat)
        self._tell(seat[0], order, order.steering)

    def _amend(self, seat: Seat, steering: str) -> None:
        if seat in self._orders:
            self._tell(seat[0], self._orders[seat], steering)

    def _tell(self, stream: int, order: Order, steering: str) -> None:
        tags, applied = json.loads(order.tags), json.loads(steering)
        if order.adapter is not None:
            applied["adapter"] = order.adapter
        for name in order.to:
            self._consumers[name].begin(stream, tags=tags, steering=applied)

    def _finish(self, seat: Seat) -> None:
        order = self._orders.pop(seat, None)
        if order is None:
            return  # told twice
        self._refused.pop(seat, None)
        if seat in self._shelf:
            assert order.hold is not None
            hold = order.hold
            self._discard(seat, f"probe {hold.probe} stayed below {hold.threshold:g}")
        self.results.finished(seat)
        choices = self._live[seat[0]]
        choices.discard(seat[1])
        if not choices:
            del self._live[seat[0]]
            for name in order.to:
                self._consumers[name].finish(seat[0])
