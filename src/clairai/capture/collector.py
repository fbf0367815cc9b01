"""Reads staged rows and hands them to the consumers, on one thread.

Commands are carried out in the order in which they were given, relative to rows too: a request
begins before its first rows and ends after its last. Rows of several steps are handed on together.

Runs in: the capture writer process, or the worker where there is none.
"""

from __future__ import annotations

import json
import logging
import queue
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Final

import numpy as np

from clairai.capture.consumers import Consumer, EngineInfo, begin_request
from clairai.capture.fidelity_meter import FidelityMeter
from clairai.capture.held_rows import HeldRows
from clairai.capture.results import CaptureResults
from clairai.capture.staging_reader import EncodedRows, StagedBatch, group_by_answer
from clairai.engine.capture.capture_plan import AnswerId, CapturePlan
from clairai.errors import StoreError
from clairai.store.codecs.base import Encoder
from clairai.store.row_block import Origin, RowBlock

MAX_STEPS: Final = 256
FLUSH_TIMEOUT_S: Final = 30.0
_log: Final = logging.getLogger("clairai.capture")

Command = Callable[[], None]


@dataclass(frozen=True)
class BatchPacing:
    """How long rows wait for more rows. A command does not let them wait."""

    linger_s: float = 0.05
    enough_nbytes: int = 1 << 20  # to be handed on at once


class _Inbox:
    """A queue of rows and commands. Many threads put, one gets."""

    def __init__(self, batch_nbytes: int, pacing: BatchPacing) -> None:
        self._batch_nbytes, self._pacing = batch_nbytes, pacing
        self._queue: queue.SimpleQueue[StagedBatch | Command] = queue.SimpleQueue()

    def put(self, item: StagedBatch | Command) -> None:
        self._queue.put(item)

    def next(self) -> tuple[list[StagedBatch], Command | None]:
        """Rows to hand on together, and the command behind them, which ends the batch."""
        batch: list[StagedBatch] = []
        nbytes, deadline_s = 0, 0.0
        while len(batch) < MAX_STEPS and nbytes < self._batch_nbytes:
            left_s = deadline_s - time.monotonic() if nbytes < self._pacing.enough_nbytes else 0.0
            try:
                item = self._queue.get(timeout=max(left_s, 0) if batch else None)
            except queue.Empty:
                break
            if callable(item):
                return batch, item
            batch.append(item)
            nbytes += item.nbytes
            deadline_s = deadline_s or time.monotonic() + self._pacing.linger_s
        return batch, None


class _Flusher:
    """Flushes one consumer on a thread of its own, so that a slow one delays no other."""

    def __init__(self, name: str, consumer: Consumer, results: CaptureResults) -> None:
        self._name, self._consumer, self._results = name, consumer, results
        self._asked: set[AnswerId] = set()
        self._is_open = True
        self._changed = threading.Condition()
        self._thread = threading.Thread(target=self._run, name="clairai-flush", daemon=True)
        self._thread.start()

    def ask(self, answers: Iterable[AnswerId]) -> None:
        """Make the rows of these answers safe."""
        with self._changed:
            self._asked.update(answers)
            self._changed.notify_all()

    def close(self) -> None:
        """Does not wait for a flush that is under way: closing the consumer ends it too."""
        with self._changed:
            self._is_open = False
            self._changed.notify_all()

    def _run(self) -> None:
        while answers := self._next():
            try:
                self._consumer.flush(FLUSH_TIMEOUT_S)
            except StoreError as error:
                # The consumer's state says why while it lasts; the next commit tries again.
                self._results.set_waiting(answers, error.reason)
            except Exception as error:  # a plugin's
                self._results.set_waiting(answers, f"{type(error).__name__}: {error}")
            else:
                self._results.set_safe(answers, self._name)

    def _next(self) -> set[AnswerId]:
        with self._changed:
            while self._is_open and not self._asked:
                self._changed.wait()
            answers, self._asked = self._asked, set()
            return answers if self._is_open else set()


class Collector:
    """The thread between the engine and the consumers. Its public methods never block."""

    def __init__(
        self,
        consumers: Mapping[str, Consumer],
        engine: EngineInfo,
        *,
        batch_nbytes: int,
        pending_nbytes: int,
        pacing: BatchPacing | None = None,
        is_successor: bool = False,
    ) -> None:
        """`is_successor`: rows of answers that began before this may come, and are left out."""
        self._consumers, self._engine, self._is_successor = consumers, engine, is_successor
        self.delivered = 0  # of the staged batches that were put
        self.results = CaptureResults(consumers)
        self._flushers = {
            name: _Flusher(name, consumer, self.results) for name, consumer in consumers.items()
        }
        self._meter = FidelityMeter()
        self._held = HeldRows(pending_nbytes, self.results, self._offer_and_count)
        self._plans: dict[AnswerId, CapturePlan] = {}  # of answers that are not finished
        self._choices: dict[int, set[int]] = {}  # the same, by stream
        self._inbox = _Inbox(batch_nbytes, pacing or BatchPacing())
        self._is_ending = False
        self._thread = threading.Thread(target=self._run, name="clairai-capture", daemon=True)
        self._thread.start()

    @property
    def pending_nbytes(self) -> int:
        return self._held.nbytes

    def begin(self, answer: AnswerId, plan: CapturePlan, number: int | None = None) -> None:
        """`number`: the answer's in the engine's results, where these are another process's."""
        self.results.open(answer, plan, number)
        self._inbox.put(partial(self._begin, answer, plan))

    def amend(self, answer: AnswerId, steering: str) -> None:
        """The steering of an answer has changed."""
        self._inbox.put(partial(self._amend, answer, steering))

    def finish(self, answer: AnswerId) -> None:
        self._inbox.put(partial(self._finish, answer))

    def put(self, staged: StagedBatch) -> None:
        self._inbox.put(staged)

    def set_weights(self, weights: str) -> None:
        """Rows that follow were computed with these weights."""
        self._inbox.put(partial(self._set_weights, weights))

    def commit(self) -> None:
        """Have the rows of all finished answers made safe."""
        self._inbox.put(self._commit)

    def close(self) -> None:
        """Hand on what is there, then close the consumers. This waits."""
        self._inbox.put(self._end)
        self._thread.join()
        for flusher in self._flushers.values():
            flusher.close()
        for name, consumer in self._consumers.items():
            try:
                consumer.close()
            except StoreError as error:
                _log.error("consumer %s: %s", name, error.reason)
            except Exception:  # a plugin's: the others are closed too
                _log.exception("consumer %s could not be closed", name)

    def _run(self) -> None:
        while not self._is_ending:
            batch, command = self._inbox.next()
            if batch:
                self._deliver(batch)
            if command is not None:
                self._execute(command)

    def _execute(self, command: Command) -> None:
        try:
            command()
        except Exception:  # the thread goes on for all other requests
            _log.exception("a change of a captured request could not be passed on")

    def _deliver(self, batch: list[StagedBatch]) -> None:
        try:
            joined = self._join(batch)
        except Exception as error:  # a thread that ends unseen would be worse
            for staged in batch:
                self._lose(staged.counts(), error)
            joined = []
        finally:
            for staged in batch:
                staged.free()
        if self._is_successor:
            joined = [known for known in map(self._select_known, joined) if len(known.rows_N)]
        encoders = dict.fromkeys(rows.encoder for rows in joined)
        fidelity = {encoder: self._measure(encoder) for encoder in encoders}
        for rows in joined:
            try:
                self._hand_on(rows, fidelity[rows.encoder])
            except Exception as error:
                self._lose(rows.counts(), error)
        self.delivered += len(batch)

    def _join(self, batch: list[StagedBatch]) -> list[EncodedRows]:
        found: dict[tuple[object, ...], list[EncodedRows]] = {}
        for staged in batch:
            for rows in self._read(staged):
                found.setdefault(rows.key, []).append(rows)
        return [EncodedRows.join(parts) for parts in found.values()]

    def _select_known(self, rows: EncodedRows) -> EncodedRows:
        """Rows of answers that began here; the engine counts the others as lost."""
        found = group_by_answer(rows.rows_N)
        known = [indices for answer, indices in found if answer in self._plans]
        if len(known) == len(found):
            return rows
        return rows.select(np.sort(np.concatenate([np.empty(0, np.intp), *known])))

    def _read(self, staged: StagedBatch) -> Sequence[EncodedRows]:
        """Scores first: they decide about rows. A batch that cannot be read harms no other."""
        try:
            staged.wait()
            for tokens, score in staged.scores():
                self._held.judge(tokens, score)
            found = staged.rows()
            for encoder, sample in staged.samples():
                self._meter.add(encoder, sample)
        except Exception as error:
            self._lose(staged.counts(), error)
            return ()
        return found

    def _measure(self, encoder: Encoder) -> dict[str, float]:
        """One measure for all rows of an encoder that are handed on together."""
        try:
            return self._meter.measure(encoder)
        except Exception:  # rows that cannot be measured are kept all the same
            _log.exception("what %s lost of rows cannot be measured", encoder.name)
            return {}

    def _hand_on(self, rows: EncodedRows, fidelity: Mapping[str, float]) -> None:
        origin = self._origin(rows.encoder)
        held_N = self._held.mask(rows.rows_N)
        for index, point in enumerate(rows.points):
            arrays = {name: array[index] for name, array in rows.arrays.items()}
            block = RowBlock(origin, point, rows.rows_N, arrays, fidelity)
            if held_N is None:
                self._offer(block, rows.to)
                continue
            if not held_N.all():
                self._offer_and_count(block.select(np.flatnonzero(~held_N)), rows.to)
            self._held.add(block, rows.to, held_N)
        if held_N is None:
            self.results.add_rows(rows.counts())

    def _origin(self, encoder: Encoder) -> Origin:
        engine = self._engine
        return Origin.of(
            model=engine.model,
            weights=engine.weights,
            dtype=engine.dtype,
            width=engine.width,
            encoder=encoder.name,
            parameters=encoder.parameters,
        )

    def _offer(self, block: RowBlock, to: tuple[str, ...]) -> None:
        for name in to:
            self._consumers[name].offer(block)

    def _offer_and_count(self, block: RowBlock, to: tuple[str, ...]) -> None:
        self._offer(block, to)
        found = group_by_answer(block.rows_N)
        self.results.add_rows({answer: len(indices) for answer, indices in found})

    def _lose(self, counts: Mapping[AnswerId, int], error: Exception) -> None:
        reason = f"rows could not be read, {type(error).__name__}: {error}"
        _log.error("%d captured rows are lost: %s", sum(counts.values()), reason)
        for answer, count in counts.items():
            self.results.add_dropped(answer, count, reason)
            self.results.fail(answer, reason)

    def _begin(self, answer: AnswerId, plan: CapturePlan) -> None:
        stream, choice = answer
        self._plans[answer] = plan
        self._choices.setdefault(stream, set()).add(choice)
        if plan.hold is not None:
            self._held.begin(answer)
        self._begin_at_consumers(stream, plan, plan.steering)

    def _amend(self, answer: AnswerId, steering: str) -> None:
        if answer in self._plans:
            self._begin_at_consumers(answer[0], self._plans[answer], steering)

    def _begin_at_consumers(self, stream: int, plan: CapturePlan, steering: str) -> None:
        tags, applied = json.loads(plan.tags), json.loads(steering)
        if plan.adapter is not None:
            applied["adapter"] = plan.adapter
        for name in plan.to:
            consumer = self._consumers[name]
            begin_request(consumer, stream, tags=tags, steering=applied, owner=plan.owner)

    def _finish(self, answer: AnswerId) -> None:
        plan = self._plans.pop(answer, None)
        if plan is None:
            return  # finished before
        self._held.finish(answer, plan.hold)
        self.results.finish(answer)
        stream, choice = answer
        choices = self._choices[stream]
        choices.discard(choice)
        if not choices:
            del self._choices[stream]
            for name in plan.to:
                self._consumers[name].finish(stream)

    def _set_weights(self, weights: str) -> None:
        self._engine = replace(self._engine, weights=weights)
        self._meter.expire()

    def _commit(self) -> None:
        for name, flusher in self._flushers.items():
            if answers := self.results.unsafe_at(name):
                flusher.ask(answers)

    def _end(self) -> None:
        for answer in list(self._plans):
            self._finish(answer)
        self._is_ending = True
