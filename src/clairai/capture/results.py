"""Keeps what became of the captured rows of each answer. Thread-safe.

A row here is one token at one point. Bounded: the oldest answers are forgotten first. With a
capture writer process there are two of these: the writer's is the truth, and the reports of its
changes update the engine's.
"""

from __future__ import annotations

import threading
import time
from collections import OrderedDict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Final

from clairai.capture.consumers import Consumer, LossEpisode, status_of
from clairai.capture.pipe_messages import AnswerReport
from clairai.engine.capture.capture_plan import AnswerId, CapturePlan
from clairai.wire.capture_messages import (
    Captured,
    CapturePlace,
    CaptureState,
    CaptureStatus,
)

MAX_REMEMBERED_ANSWERS: Final = 1 << 14


@dataclass
class _AnswerState:
    plan: CapturePlan
    number: int  # tells it from earlier answers with the same id
    rows: int = 0
    dropped: int = 0
    reported_dropped: int = 0  # by the capture writer process
    discarded: int = 0
    state: CaptureStatus = "open"
    reason: str = ""
    waits: str = ""  # why it is not safe yet
    safe: set[str] = field(default_factory=set)  # consumers that have made all of it safe
    lost: dict[str, int] = field(default_factory=dict)  # by consumer
    last_report: AnswerReport | None = None
    since: float = field(default_factory=time.time)

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
        self._answers: OrderedDict[AnswerId, _AnswerState] = OrderedDict()
        self._unsafe: dict[AnswerId, None] = {}  # finished, and not known to be safe
        self._by_stream: dict[int, list[AnswerId]] = {}
        self._rows = self._dropped = self._discarded = 0
        self._reported = RowTotals()
        self._last_number = 0
        self._changed: dict[AnswerId, None] = {}  # since the last `changes`
        self._staging_losses = LossEpisode()
        self.news = threading.Event()  # something else than a count has changed

    def open(self, answer: AnswerId, plan: CapturePlan, number: int | None = None) -> int:
        """The number that tells this answer from earlier ones with the same id."""
        with self._lock:
            self._last_number = self._last_number + 1 if number is None else number
            self._unsafe.pop(answer, None)
            if self._answers.pop(answer, None) is None:
                self._by_stream.setdefault(answer[0], []).append(answer)
            self._answers[answer] = _AnswerState(plan, self._last_number)
            while len(self._answers) > MAX_REMEMBERED_ANSWERS:
                self._forget(next(iter(self._answers)))
            return self._last_number

    def _forget(self, answer: AnswerId) -> None:
        del self._answers[answer]
        self._unsafe.pop(answer, None)
        self._changed.pop(answer, None)
        self._by_stream[answer[0]].remove(answer)
        if not self._by_stream[answer[0]]:
            del self._by_stream[answer[0]]

    def _change(self, answer: AnswerId) -> _AnswerState | None:
        """The state of an answer, which the caller will change."""
        found = self._answers.get(answer)
        if found is not None:
            self._changed[answer] = None
        return found

    def add_rows(self, counts: Mapping[AnswerId, int]) -> None:
        """Rows were offered to all of their consumers."""
        with self._lock:
            for answer, rows in counts.items():
                self._rows += rows
                if (found := self._change(answer)) is not None:
                    found.rows += rows

    def add_dropped(self, answer: AnswerId, rows: int, reason: str) -> None:
        with self._lock:
            self._dropped += rows
            if (found := self._change(answer)) is not None:
                found.dropped += rows
                found.reason = found.reason or reason

    def add_discarded(self, answer: AnswerId, rows: int, reason: str) -> None:
        with self._lock:
            self._discarded += rows
            if (found := self._change(answer)) is not None:
                found.discarded += rows
                found.state, found.reason = "discarded", reason
        self.news.set()

    def fail(self, answer: AnswerId, reason: str) -> None:
        with self._lock:
            if (found := self._change(answer)) is not None:
                found.state, found.reason = "failed", reason
                self._unsafe.pop(answer, None)
        self.news.set()

    def finish(self, answer: AnswerId) -> None:
        """No more rows follow; those that came are being written."""
        with self._lock:
            if (found := self._change(answer)) is not None and found.state == "open":
                found.state = "writing"
                self._unsafe[answer] = None
        self.news.set()

    def unsafe_at(self, consumer: str) -> list[AnswerId]:
        """Finished answers that this consumer has not made safe."""
        with self._lock:
            found = ((answer, self._answers[answer]) for answer in self._unsafe)
            return [a for a, one in found if consumer in one.plan.to and consumer not in one.safe]

    def set_waiting(self, answers: Iterable[AnswerId], reason: str) -> None:
        """They are not safe yet, and why."""
        with self._lock:
            for answer in answers:
                if (found := self._change(answer)) is not None:
                    found.waits = reason
        self.news.set()

    def set_safe(self, answers: Iterable[AnswerId], consumer: str) -> None:
        """The consumer has made all of their rows safe, or counted them as lost."""
        with self._lock:
            for answer in answers:
                found = self._change(answer)
                if found is None or found.state != "writing":
                    continue
                found.safe.add(consumer)
                if found.safe.issuperset(found.plan.to):
                    found.state, found.waits = "kept", ""
                    del self._unsafe[answer]
        self.news.set()

    def fail_unsafe(self, reason: str) -> None:
        """Nobody takes rows any more: what is not known to be safe is lost."""
        with self._lock:
            for found in self._answers.values():
                if not found.is_live:
                    continue
                for name in set(found.plan.to) - found.safe:
                    found.lost[name] = max(found.lost.get(name, 0), found.rows)
                found.state, found.reason = "failed", reason
            self._unsafe.clear()

    def keep_totals(self) -> None:
        """The next reports come from another writer process, which counts from 0."""
        with self._lock:
            totals, self._reported = self._totals(), RowTotals()
            self._rows, self._dropped, self._discarded = (
                totals.rows,
                totals.dropped,
                totals.discarded,
            )

    def changes(self, *, asks_consumers: bool = False) -> list[AnswerReport]:
        """Answers that have changed since the last call; `asks_consumers` for new losses too."""
        with self._lock:
            if asks_consumers:
                live = (answer for answer, found in self._answers.items() if found.is_live)
                self._changed.update(dict.fromkeys(live))
            changed, self._changed = [*self._changed], {}
            reports = (self._report(answer) for answer in changed)
            return [report for report in reports if report is not None]

    def _report(self, answer: AnswerId) -> AnswerReport | None:
        """None if it equals the last one."""
        found = self._answers[answer]
        lost = tuple(self._lost(name, answer, found) for name in found.plan.to)
        report = AnswerReport(
            found.number,
            *answer,
            found.state,
            found.rows,
            found.dropped,
            found.discarded,
            found.reason,
            found.waits,
            lost,
            tuple(sorted(found.safe)),
        )
        is_same, found.last_report = report == found.last_report, report
        return None if is_same else report

    def apply(self, reports: Iterable[AnswerReport], totals: RowTotals) -> None:
        """Take over the `changes` of the capture writer process."""
        with self._lock:
            self._reported = totals
            for one in reports:
                found = self._answers.get((one.stream, one.choice))
                if found is None or found.number != one.number:
                    continue
                if found.state != "failed":  # the worker may know what the writer does not
                    found.state = one.state
                found.rows, found.discarded = one.rows, one.discarded
                found.reported_dropped, found.waits = one.dropped, one.waits
                found.reason = one.reason or found.reason
                found.safe = set(one.safe)
                found.lost = dict(zip(found.plan.to, one.lost, strict=True))

    def of_stream(self, stream: int) -> tuple[Captured, ...]:
        with self._lock:
            return tuple(self._captured(a) for a in sorted(self._by_stream.get(stream, ())))

    def newest(self, limit: int, owner: str | None = None) -> tuple[tuple[Captured, ...], ...]:
        """The newest requests; with `owner`, only those of this one."""
        with self._lock:
            return tuple(
                tuple(self._captured(answer) for answer in sorted(self._by_stream[stream]))
                for stream in self._newest_streams(limit, owner)
            )

    def _newest_streams(self, limit: int, owner: str | None) -> list[int]:
        """Looks no further than it has to: the worker waits for this between two steps."""
        streams: dict[int, None] = {}
        for answer, one in reversed(self._answers.items()):
            if len(streams) >= limit:
                break
            if owner in (None, one.plan.owner):
                streams[answer[0]] = None
        return [*streams]

    def _captured(self, answer: AnswerId) -> Captured:
        found = self._answers[answer]
        places = tuple(self._place(name, answer, found) for name in found.plan.to)
        is_failed = found.is_live and any(place.state == "failed" for place in places)
        reasons = (found.reason, *(place.reason for place in places), found.waits)
        return Captured(
            stream=answer[0],
            choice=answer[1],
            state="failed" if is_failed else found.state,
            points=found.plan.points,
            encoder=found.plan.encoder,
            rows=found.rows,
            dropped=found.dropped + found.reported_dropped,
            discarded=found.discarded,
            reason=next(filter(None, reasons), ""),
            places=places,
            label=found.plan.label or "",
            owner=found.plan.owner or "",
            since=found.since,
        )

    def _place(self, name: str, answer: AnswerId, found: _AnswerState) -> CapturePlace:
        consumer = self._consumers[name]
        state, lost = consumer.state, self._lost(name, answer, found)
        since = getattr(state, "since", 0.0)
        return CapturePlace(name, consumer.where, lost, state.name, state.reason, since)

    def _lost(self, name: str, answer: AnswerId, found: _AnswerState) -> int:
        # A consumer tells losses once, and by stream: the stream's first answer keeps the count.
        first_answer = min(self._by_stream[answer[0]])
        if count := self._consumers[name].losses(answer[0]):
            first = self._answers[first_answer]
            first.lost[name] = first.lost.get(name, 0) + count
            self._changed[first_answer] = None
        return found.lost.get(name, 0)

    def totals(self) -> RowTotals:
        with self._lock:
            return self._totals()

    def _totals(self) -> RowTotals:
        reported = self._reported
        return RowTotals(
            self._rows + reported.rows,
            self._dropped + reported.dropped,
            self._discarded + reported.discarded,
        )

    def state(
        self,
        *,
        staging_nbytes: int,
        pending_nbytes: int,
        stash_nbytes: int = 0,
        failure: str = "",
    ) -> CaptureState:
        with self._lock:
            totals = self._totals()
            return CaptureState(
                places=tuple(status_of(name, one) for name, one in self._consumers.items()),
                rows=totals.rows,
                dropped=totals.dropped,
                discarded=totals.discarded,
                staging_nbytes=staging_nbytes,
                pending_nbytes=pending_nbytes,
                stash_nbytes=stash_nbytes,
                dropping_since=self._staging_losses.since(totals.dropped),
                failure=failure,
            )
