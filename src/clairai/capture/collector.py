"""Takes rows and what is told, from any thread; gives rows to be handed on together, in order.

What is told ends a batch: it is heard behind all that came before it, and does not wait for more.
"""

from __future__ import annotations

import json
import logging
import queue
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Final

import numpy as np
from numpy.typing import NDArray

from clairai.capture.consumers import Consumer
from clairai.capture.fidelity_meter import FidelityMeter
from clairai.capture.held_rows import HeldRows
from clairai.capture.results import CaptureResults
from clairai.capture.staging_reader import (
    AnswerId,
    EncodedRows,
    RuleScore,
    StagedBatch,
    group_by_answer,
)
from clairai.engine.capture.capture_plan import CapturePlan
from clairai.errors import StoreError
from clairai.store.codecs.base import Encoder
from clairai.store.row_block import Origin, RowBlock

MAX_STEPS: Final = 256

Command = Callable[[], None]


@dataclass(frozen=True)
class BatchPacing:
    """How long rows wait for others; what is told hurries them."""

    linger_s: float = 0.05
    enough_nbytes: int = 1 << 20  # to go on at once


class Inbox:
    """Many may put, one gets."""

    def __init__(self, batch_nbytes: int, pace: BatchPacing) -> None:
        self._batch_nbytes, self._pace = batch_nbytes, pace
        self._queue: queue.SimpleQueue[StagedBatch | Command] = queue.SimpleQueue()

    def put(self, item: StagedBatch | Command) -> None:
        self._queue.put(item)

    def next(self) -> tuple[list[StagedBatch], Command | None]:
        """Rows, and what was told after them."""
        batch: list[StagedBatch] = []
        nbytes, deadline_s = 0, 0.0
        while len(batch) < MAX_STEPS and nbytes < self._batch_nbytes:
            left_s = deadline_s - time.monotonic() if nbytes < self._pace.enough_nbytes else 0.0
            try:
                item = self._queue.get(timeout=max(left_s, 0) if batch else None)
            except queue.Empty:
                break
            if callable(item):
                return batch, item
            batch.append(item)
            nbytes += item.nbytes
            deadline_s = deadline_s or time.monotonic() + self._pace.linger_s
        return batch, None


# MERGED
# Takes answers whose rows one consumer was given; says when it has made them safe. One thread.


FLUSH_TIMEOUT_S: Final = 30.0


class Flusher:
    """Waits for one consumer, so that nobody else has to: not the others' answers either."""

    def __init__(self, name: str, consumer: Consumer, results: CaptureResults) -> None:
        self._name, self._consumer, self._results = name, consumer, results
        self._asked: set[AnswerId] = set()
        self._is_open = True
        self._changed = threading.Condition()
        self._thread = threading.Thread(target=self._run, name="clairai-flush", daemon=True)
        self._thread.start()

    def ask(self, seats: Iterable[AnswerId]) -> None:
        """Make these safe: all that was given of them."""
        with self._changed:
            self._asked.update(seats)
            self._changed.notify_all()

    def close(self) -> None:
        """Whoever still waits for the consumer is not waited for: closing it ends that too."""
        with self._changed:
            self._is_open = False
            self._changed.notify_all()

    def _run(self) -> None:
        while seats := self._next():
            try:
                self._consumer.flush(FLUSH_TIMEOUT_S)
            except StoreError as error:
                # The consumer's own state says why, for as long as it lasts: ask again.
                self._results.waits(seats, error.reason)
            except Exception as error:  # of somebody's plugin
                self._results.waits(seats, f"{type(error).__name__}: {error}")
            else:
                self._results.safe(seats, self._name)

    def _next(self) -> set[AnswerId]:
        with self._changed:
            while self._is_open and not self._asked:
                self._changed.wait()
            seats, self._asked = self._asked, set()
            return seats if self._is_open else set()


# MERGED
# Takes rows as they come from the device; gives blocks to the consumers, on a thread of its own.
#
# Whatever is told to it happens in the order in which it was told: a request begins before its
# rows
# and ends after them. Rows of several steps are handed on together.


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
        pace: BatchPacing | None = None,
    ) -> None:
        self._consumers, self._origin_of = consumers, origin_of
        self.delivered = 0  # of those that were put
        self.results = CaptureResults(consumers)
        self._flushers = {
            name: Flusher(name, consumer, self.results) for name, consumer in consumers.items()
        }
        self._meter = FidelityMeter()
        self._shelf = HeldRows(pending_nbytes)
        self._refused: dict[AnswerId, str] = {}  # whose rule cannot be judged, and why
        self._orders: dict[AnswerId, CapturePlan] = {}
        self._live: dict[int, set[int]] = {}  # choices of each stream that are not finished
        self._inbox = Inbox(batch_nbytes, pace or BatchPacing())
        self._is_ending = False
        self._thread = threading.Thread(target=self._run, name="clairai-capture", daemon=True)
        self._thread.start()

    @property
    def pending_nbytes(self) -> int:
        return self._shelf.nbytes

    def begin(self, seat: AnswerId, order: CapturePlan, number: int | None = None) -> None:
        """`number` is its in the results of whoever is told of these."""
        self.results.open(seat, order, number)
        self._inbox.put(partial(self._begin, seat, order))

    def amend(self, seat: AnswerId, steering: str) -> None:
        """From now on the request is steered so."""
        self._inbox.put(partial(self._amend, seat, steering))

    def finish(self, seat: AnswerId) -> None:
        self._inbox.put(partial(self._finish, seat))

    def put(self, taken: StagedBatch) -> None:
        self._inbox.put(taken)

    def relabel(self, origin_of: OriginOf) -> None:
        """What comes from now on is of other weights."""
        self._inbox.put(partial(self._relabel, origin_of))

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

    def _relabel(self, origin_of: OriginOf) -> None:
        self._origin_of = origin_of
        self._meter.expire()

    def _commit(self) -> None:
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

    def _hear(self, told: Command) -> None:
        try:
            told()
        except Exception:  # as below: the thread goes on for all others
            _log.exception("what was told of a captured request could not be passed on")

    def _deliver(self, batch: list[StagedBatch]) -> None:
        try:
            loads = self._joined(batch)
        except Exception as error:  # a thread that ends unseen would be the worst of answers
            for taken in batch:
                self._lose(taken.counts(), error)
            loads = []
        finally:
            for taken in batch:
                taken.free()
        fidelity = {encoder: self._measure(encoder) for encoder in {load.encoder for load in loads}}
        for load in loads:
            try:
                self._give(load, fidelity[load.encoder])
            except Exception as error:
                self._lose(load.counts(), error)
        self.delivered += len(batch)

    def _measure(self, encoder: Encoder) -> dict[str, float]:
        """One measure for all rows of an encoder that are handed on together."""
        try:
            return self._meter.measure(encoder)
        except Exception:  # rows that cannot be measured are kept all the same
            _log.exception("what %s lost of rows cannot be measured", encoder.name)
            return {}

    def _lose(self, counts: Mapping[AnswerId, int], error: Exception) -> None:
        reason = f"rows could not be read, {type(error).__name__}: {error}"
        _log.error("%d captured rows are lost: %s", sum(counts.values()), reason)
        for seat, count in counts.items():
            self.results.dropped(seat, count, reason)
            self.results.failed(seat, reason)

    def _joined(self, batch: list[StagedBatch]) -> list[EncodedRows]:
        """Copies of what came, joined."""
        found: dict[tuple[object, ...], list[EncodedRows]] = {}
        for taken in batch:
            for load in self._read(taken):
                found.setdefault(load.key, []).append(load)
        return [EncodedRows.joined(loads) for loads in found.values()]

    def _read(self, taken: StagedBatch) -> Sequence[EncodedRows]:
        """The rules are judged before their rows go on. One that never comes harms no other."""
        try:
            taken.wait()
            for verdict in taken.verdicts():
                self._judge(verdict)
            loads = taken.loads()
            for encoder, sample in taken.samples():
                self._meter.add(encoder, sample)
        except Exception as error:
            self._lose(taken.counts(), error)
            return ()
        return loads

    def _give(self, load: EncodedRows, fidelity: Mapping[str, float]) -> None:
        origin = self._origin_of(load.encoder)
        held_N = self._held(load.rows_N)
        for at, point in enumerate(load.points):
            arrays = {name: array[at] for name, array in load.arrays.items()}
            block = RowBlock(origin, point, load.rows_N, arrays, fidelity)
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

    def _sort(self, block: RowBlock, to: tuple[str, ...], held_N: NDArray[np.bool_]) -> None:
        if not held_N.all():
            self._offer_and_count(block.select(np.flatnonzero(~held_N)), to)
        for seat, places in group_by_answer(block.rows_N, np.flatnonzero(held_N)):
            if seat in self._refused:
                self._refuse(seat, len(places))
                continue
            part = block.select(places)
            if lost := self._shelf.put(seat, part, to):
                reason = "no room to hold its rows until its rule is met; raise pending_mib"
                self.results.dropped(seat, lost, reason)

    def _offer(self, block: RowBlock, to: tuple[str, ...]) -> None:
        for name in to:
            self._consumers[name].offer(block)

    def _offer_and_count(self, block: RowBlock, to: tuple[str, ...]) -> None:
        self._offer(block, to)
        self.results.gave({seat: len(p) for seat, p in group_by_answer(block.rows_N)})

    def _judge(self, verdict: RuleScore) -> None:
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

    def _refuse(self, seat: AnswerId, rows: int) -> None:
        """Those that come later too, until it is finished."""
        self.results.discarded(seat, rows, self._refused[seat])
        self.results.failed(seat, self._refused[seat])

    def _discard(self, seat: AnswerId, reason: str) -> None:
        rows = self._shelf.rows(seat)
        self._shelf.take(seat)
        self.results.discarded(seat, rows, reason)

    def _begin(self, seat: AnswerId, order: CapturePlan) -> None:
        self._orders[seat] = order
        self._live.setdefault(seat[0], set()).add(seat[1])
        if order.hold is not None:
            self._shelf.open(seat)
        self._tell(seat[0], order, order.steering)

    def _amend(self, seat: AnswerId, steering: str) -> None:
        if seat in self._orders:
            self._tell(seat[0], self._orders[seat], steering)

    def _tell(self, stream: int, order: CapturePlan, steering: str) -> None:
        tags, applied = json.loads(order.tags), json.loads(steering)
        if order.adapter is not None:
            applied["adapter"] = order.adapter
        for name in order.to:
            self._consumers[name].begin(stream, tags=tags, steering=applied)

    def _finish(self, seat: AnswerId) -> None:
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
