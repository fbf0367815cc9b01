"""Selects the rows of a step that capture plans ask for.

N = selected rows of a step (tokens), R = requests in it, E = ranges of positions that they want,
P = points. Nothing here loops over rows.

Runs in: the worker.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Final

import numpy as np
from numpy.typing import NDArray

from clairai.capture.pipe_messages import HeldTokens
from clairai.engine.capture.capture_plan import AnswerId, CapturePlan, KeepThreshold
from clairai.engine.step import RequestMark, StepBatch
from clairai.store.codecs.base import Encoder
from clairai.store.codecs.registry import named

FOREVER: Final = 1 << 62
MAX_FORMATS: Final = 1024
Ints = NDArray[np.int64]


@dataclass(frozen=True, eq=False)
class CaptureFormat:
    """Points, encoder and consumers. Rows of requests with one format are copied together."""

    encoder: Encoder
    points: tuple[str, ...]
    sites_P: Ints
    to: tuple[str, ...]

    def nbytes_per_token(self, width: int) -> int:
        return len(self.points) * self.encoder.nbytes_per_row(width)


@dataclass(frozen=True, eq=False)
class BatchSelection:
    """What the requests of a batch want. One object for as long as the batch stays the same.

    Ranges of one format lie together.
    """

    req_ids: Sequence[str]
    formats: tuple[CaptureFormat, ...]
    format_E: Ints
    request_E: Ints  # index in the batch
    slot_E: Ints
    first_E: Ints
    end_E: Ints
    stream_E: NDArray[np.uint64]
    choice_E: NDArray[np.uint16]
    prompt_E: Ints  # prompt length
    # Of those with images or the like: what each position of their request's prompt stands for.
    media_E: Mapping[int, NDArray[np.uint8]]
    holders: tuple[tuple[AnswerId, KeepThreshold, int], ...]  # and the request's index in the batch

    def read_media(
        self, entry_N: Ints, position_N: Ints, start_E: Ints
    ) -> NDArray[np.uint8] | None:
        """What each of these rows stands for; None if no media comes in this step or later."""
        found: NDArray[np.uint8] | None = None
        for entry, media in self.media_E.items():
            if start_E[entry] >= len(media):
                continue
            if found is None:
                found = np.zeros(len(entry_N), np.uint8)
            rows = np.flatnonzero((entry_N == entry) & (position_N < len(media)))
            found[rows] = media[position_N[rows]]
        return found

    @cached_property
    def consumers(self) -> frozenset[str]:
        """All consumers of all requests."""
        return frozenset(name for format in self.formats for name in format.to)

    def tokens_held(self, offsets_R: Ints, counts_R: Ints) -> tuple[HeldTokens, ...]:
        """The tokens of a step whose scores decide about rows that are held."""
        return tuple(
            HeldTokens(
                *answer,
                keep.probe,
                keep.threshold,
                int(offsets_R[index]),
                int(offsets_R[index] + counts_R[index]),
                index,
            )
            for answer, keep, index in self.holders
        )


@dataclass(frozen=True, eq=False)
class RowSelection:
    """The selected rows of one step, or of a part of it, format by format."""

    batch: BatchSelection
    entry_N: Ints  # which of the batch's ranges
    row_N: Ints  # in the forward pass
    position_N: Ints
    seen_E: Ints  # up to which position rows were computed before
    num_tokens: int  # of the whole step
    held: tuple[HeldTokens, ...] = ()
    media_N: NDArray[np.uint8] | None = None  # what each stands for; None: all are text
    # Of a step whose positions and drafts only the device knows: how many rows of the same request
    # follow. `position_N` is the highest that each may have, and rows are selected that may be
    # wanted; who reads them knows which are.
    left_N: Ints | None = None

    def __len__(self) -> int:
        return len(self.row_N)

    def bounds(self) -> Ints:
        """Rows of format k are those from the k-th bound up to the next."""
        counts = np.bincount(self.batch.format_E[self.entry_N], minlength=len(self.batch.formats))
        return np.concatenate([np.zeros(1, np.int64), np.cumsum(counts)])

    def split(self, max_rows: int) -> Iterator[RowSelection]:
        """The same rows in parts of at most this many; held tokens go with the first part."""
        if len(self) <= max_rows:
            yield self
            return
        for first in range(0, len(self), max_rows):
            part = slice(first, first + max_rows)
            yield replace(
                self,
                entry_N=self.entry_N[part],
                row_N=self.row_N[part],
                position_N=self.position_N[part],
                held=self.held if first == 0 else (),
                media_N=None if self.media_N is None else self.media_N[part],
                left_N=None if self.left_N is None else self.left_N[part],
            )

    def leave_out(self, step: StepBatch, rejected_R: NDArray[np.int32]) -> RowSelection:
        """The same step without so many of the last tokens of each request."""
        counts_R, batch = step.counts_R.astype(np.int64), self.batch
        offsets_R, kept_R = np.cumsum(counts_R) - counts_R, counts_R - rejected_R
        end_N = (offsets_R + kept_R)[batch.request_E[self.entry_N]]
        kept = np.flatnonzero(self.row_N < end_N)
        return replace(
            self,
            entry_N=self.entry_N[kept],
            row_N=self.row_N[kept],
            position_N=self.position_N[kept],
            held=batch.tokens_held(offsets_R, kept_R),
            media_N=None if self.media_N is None else self.media_N[kept],
        )

    def counts(self) -> dict[AnswerId, int]:
        """Rows of each answer: its tokens times the points it wants."""
        batch, found = self.batch, dict[AnswerId, int]()
        for entry, count in enumerate(np.bincount(self.entry_N, minlength=len(batch.format_E))):
            if count:
                answer = (int(batch.stream_E[entry]), int(batch.choice_E[entry]))
                rows = int(count) * len(batch.formats[batch.format_E[entry]].points)
                found[answer] = found.get(answer, 0) + rows
        return found


@dataclass(frozen=True)
class _CapturedRequest:
    slot: int
    answer: AnswerId
    prompt_len: int
    plan: CapturePlan
    format: CaptureFormat
    media: NDArray[np.uint8] | None


@dataclass(frozen=True, eq=False)
class _SelectedStep:
    """A step, and for how many of the next ones only the positions change."""

    batch: BatchSelection
    starts_R: Ints  # copies: the runner changes its arrays in place
    end_E: Ints
    seen_E: Ints
    selection: RowSelection | None
    repeats: int  # following steps of one token per request that select the same rows

    @staticmethod
    def of(batch: BatchSelection, step: StepBatch, seen_E: Ints) -> _SelectedStep:
        starts_R, counts_R = step.starts_R.astype(np.int64), step.counts_R.astype(np.int64)
        offsets_R = np.cumsum(counts_R) - counts_R
        start_E = starts_R[batch.request_E]
        end_E = start_E + counts_R[batch.request_E]
        low_E = np.maximum(batch.first_E, start_E)
        # A row may lie lower than its position here by so many: then others may be wanted too.
        spread_E = 0 if step.lowest_R is None else start_E - step.lowest_R[batch.request_E]
        num_E = np.maximum(np.minimum(batch.end_E + spread_E, end_E) - low_E, 0)
        held = batch.tokens_held(offsets_R, counts_R)
        num_rows, selection, media_N, left_N = int(num_E.sum()), None, None, None
        if num_rows or held:
            entry_N = np.repeat(np.arange(len(num_E)), num_E)
            # The n-th selected row of a range is n after its first.
            within_N = np.arange(num_rows) - (np.cumsum(num_E) - num_E)[entry_N]
            position_N = low_E[entry_N] + within_N
            row_N = (offsets_R[batch.request_E] - start_E)[entry_N] + position_N
            media_N = batch.read_media(entry_N, position_N, start_E)
            if step.is_ahead:
                left_N = end_E[entry_N] - 1 - position_N
            found = (entry_N, row_N, position_N, seen_E, int(counts_R.sum()), held, media_N)
            selection = RowSelection(batch, *found, left_N)
        can_repeat = not step.is_ahead and media_N is None and bool((counts_R == 1).all())
        repeats = _count_repeats(batch, start_E) if can_repeat else 0
        return _SelectedStep(batch, starts_R, end_E, seen_E, selection, repeats)

    def is_before(self, step: StepBatch) -> bool:
        """True if the step is this one, one token later."""
        return (
            self.repeats > 0
            and bool((step.counts_R == 1).all())
            and np.array_equal(step.starts_R, self.starts_R + 1)
        )

    def next(self) -> _SelectedStep:
        selection = self.selection
        if selection is not None:
            selection = RowSelection(
                self.batch,
                selection.entry_N,
                selection.row_N,
                selection.position_N + 1,
                self.seen_E,  # these steps compute nothing twice
                selection.num_tokens,
                selection.held,
            )
        return _SelectedStep(
            self.batch,
            self.starts_R + 1,
            self.end_E + 1,
            self.seen_E,
            selection,
            self.repeats - 1,
        )


def _count_repeats(batch: BatchSelection, start_E: Ints) -> int:
    """Tokens of each request until one of its ranges begins or ends."""
    until_E = np.where(start_E < batch.first_E, batch.first_E, batch.end_E) - start_E - 1
    return int(until_E[start_E < batch.end_E].min(initial=FOREVER))


class RowSelector:
    """The captured requests that the engine works on."""

    def __init__(self, site_of: Mapping[str, int]) -> None:
        """`site_of` each tapped point: the index of its site in the score tables."""
        self._site_of = site_of
        self._open: dict[str, _CapturedRequest] = {}
        self._free_slots: list[int] = []
        self._seen_S = np.zeros(64, np.int64)  # how far each slot's request has been forwarded
        self._again_S = np.zeros(64, np.int64)  # and how far before it came back
        self._formats: dict[tuple[object, ...], CaptureFormat] = {}
        self._batch = self._select_batch(())
        self._last: _SelectedStep | None = None

    def __len__(self) -> int:
        return len(self._open)

    def open(
        self,
        req_id: str,
        mark: RequestMark,
        prompt_len: int,
        plan: CapturePlan,
        media: NDArray[np.uint8] | None = None,
        num_known: int = 0,
    ) -> bool:
        """False if the request is open already: it came back after a preemption.

        With as many tokens as are known then, of which all but the last were forwarded, if it was
        not stopped in its prompt: as in RowBuilder.add_request.
        """
        if req_id in self._open:
            slot = self._open[req_id].slot
            self._again_S[slot] = min(max(num_known - 1, 0), int(self._seen_S[slot]))
            return False
        format = self._format(plan)  # before a slot is taken: it may raise
        slot = self._free_slots.pop() if self._free_slots else len(self._open)
        if slot == len(self._seen_S):
            self._seen_S = np.concatenate([self._seen_S, np.zeros_like(self._seen_S)])
            self._again_S = np.concatenate([self._again_S, np.zeros_like(self._again_S)])
        self._seen_S[slot] = self._again_S[slot] = 0
        answer = (mark.stream, mark.choice)
        self._open[req_id] = _CapturedRequest(slot, answer, prompt_len, plan, format, media)
        return True

    def _format(self, plan: CapturePlan) -> CaptureFormat:
        key = plan.format_key
        if key not in self._formats:
            if len(self._formats) >= MAX_FORMATS:
                self._formats.clear()
            encoder = named(plan.encoder, dict(plan.parameters))
            sites_P = np.array([self._site_of[point] for point in plan.points], np.int64)
            self._formats[key] = CaptureFormat(encoder, plan.points, sites_P, plan.to)
        return self._formats[key]

    def answer_of(self, req_id: str) -> AnswerId | None:
        request = self._open.get(req_id)
        return None if request is None else request.answer

    def close(self, req_id: str) -> AnswerId | None:
        """The engine is done with the request; None if it is not captured."""
        request = self._open.pop(req_id, None)
        if request is None:
            return None
        self._free_slots.append(request.slot)
        self._batch = self._select_batch(())  # another request may get the slot
        return request.answer

    def step(self, step: StepBatch) -> RowSelection | None:
        if not self._open:
            return None
        batch = self._batch
        if step.req_ids != batch.req_ids:
            batch = self._batch = self._select_batch(step.req_ids)
        if not len(batch.format_E):
            return None
        last = self._last
        if last is not None and last.batch is batch and last.is_before(step):
            self._last = last.next()
        else:
            before_S = self._again_S if step.is_ahead else self._seen_S
            self._last = _SelectedStep.of(batch, step, before_S[batch.slot_E])
        seen_E = self._seen_S[batch.slot_E]
        self._seen_S[batch.slot_E] = np.maximum(seen_E, self._last.end_E)
        return self._last.selection

    def reject(self, rejected_R: NDArray[np.int32]) -> None:
        """So many of the last tokens of each request of the last step do not count as forwarded."""
        batch = self._batch
        if len(batch.format_E):
            self._last = None
            # A request may have several ranges: numpy takes the number off its slot once.
            self._seen_S[batch.slot_E] -= rejected_R[batch.request_E]

    def _select_batch(self, req_ids: Sequence[str]) -> BatchSelection:
        found = [(at, self._open[id_]) for at, id_ in enumerate(req_ids) if id_ in self._open]
        formats = tuple(dict.fromkeys(request.format for _, request in found))
        number = {format: index for index, format in enumerate(formats)}
        entries = sorted(
            (number[request.format], at, request.slot, *range_, *request.answer, request.prompt_len)
            for at, request in found
            for range_ in request.plan.ranges
        )
        columns = list(zip(*entries, strict=True)) if entries else [()] * 8
        format_E, request_E, slot_E, first_E, end_E, stream_E, choice_E, prompt_E = columns
        media = {at: request.media for at, request in found if request.media is not None}
        return BatchSelection(
            req_ids=list(req_ids),  # the runner changes its list in place
            formats=formats,
            format_E=np.array(format_E, np.int64),
            request_E=np.array(request_E, np.int64),
            slot_E=np.array(slot_E, np.int64),
            first_E=np.array(first_E, np.int64),
            end_E=np.array(end_E, np.int64),
            stream_E=np.array(stream_E, np.uint64),
            choice_E=np.array(choice_E, np.uint16),
            prompt_E=np.array(prompt_E, np.int64),
            media_E={entry: media[at] for entry, at in enumerate(request_E) if at in media},
            holders=tuple(
                (request.answer, request.plan.hold, at)
                for at, request in found
                if request.plan.hold is not None
            ),
        )
