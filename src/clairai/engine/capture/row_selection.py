"""Takes requests with orders and the engine's batch of a step; gives which of its rows are wanted.

N = wanted rows of a step (tokens), R = requests in it, E = ranges of positions its requests want,
P = points. Nothing here looks at rows one by one.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Final

import numpy as np
from numpy.typing import NDArray

from clairai.engine.capture.capture_plan import CapturePlan, KeepThreshold
from clairai.engine.step import RequestMark, StepBatch
from clairai.store.codecs.base import Encoder
from clairai.store.codecs.registry import named

FOREVER: Final = 1 << 62
AnswerId = tuple[int, int]  # stream and choice
Ints = NDArray[np.int64]


@dataclass(frozen=True, eq=False)
class CaptureFormat:
    """Requests that want the same points in the same form are taken together."""

    encoder: Encoder
    points: tuple[str, ...]
    sites_P: Ints
    to: tuple[str, ...]

    def nbytes(self, width: int) -> int:
        """Of one token."""
        return len(self.points) * self.encoder.nbytes_per_row(width)


@dataclass(frozen=True, eq=False)
class BatchSelection:
    """Who in a batch gives what; ranges of one kind lie together. Shared while the batch is."""

    req_ids: Sequence[str]
    kinds: tuple[CaptureFormat, ...]
    format_E: Ints
    request_E: Ints  # place in the batch
    slot_E: Ints
    first_E: Ints
    end_E: Ints
    stream_E: NDArray[np.uint64]
    choice_E: NDArray[np.uint16]
    prompt_E: Ints
    holders: tuple[
        tuple[AnswerId, KeepThreshold, int], ...
    ]  # whose rows wait for a rule, and where they are

    @cached_property
    def to(self) -> frozenset[str]:
        """All consumers of anybody."""
        return frozenset(name for kind in self.kinds for name in kind.to)


@dataclass(frozen=True)
class RuleTokens:
    """Tokens of a step whose scores decide about a request's rows."""

    seat: AnswerId
    hold: KeepThreshold
    first: int
    end: int


@dataclass(frozen=True, eq=False)
class RowSelection:
    """Wanted rows of one step, or of a part of it, in the order of their kinds."""

    cast: BatchSelection
    entry_N: Ints  # which of the cast's ranges
    row_N: Ints  # in the forward
    position_N: Ints
    seen_E: Ints
    num_tokens: int  # of the whole step
    held: tuple[RuleTokens, ...] = ()

    def __len__(self) -> int:
        return len(self.row_N)

    def bounds(self) -> Ints:
        """Rows of kind k are those from the kth number up to the next."""
        counts = np.bincount(self.cast.format_E[self.entry_N], minlength=len(self.cast.kinds))
        return np.concatenate([np.zeros(1, np.int64), np.cumsum(counts)])

    def cut(self, most: int) -> Iterator[RowSelection]:
        """The same rows, with at most this many in each part; what is held goes with the first."""
        if len(self) <= most:
            yield self
            return
        for first in range(0, max(len(self), 1), most):
            part = slice(first, first + most)
            held = self.held if first == 0 else ()
            cut = (self.entry_N[part], self.row_N[part], self.position_N[part])
            yield replace(self, entry_N=cut[0], row_N=cut[1], position_N=cut[2], held=held)

    def counts(self) -> dict[AnswerId, int]:
        """Tokens of each answer, times the points it wants."""
        cast, found = self.cast, dict[AnswerId, int]()
        for entry, count in enumerate(np.bincount(self.entry_N, minlength=len(cast.format_E))):
            if count:
                seat = (int(cast.stream_E[entry]), int(cast.choice_E[entry]))
                rows = int(count) * len(cast.kinds[cast.format_E[entry]].points)
                found[seat] = found.get(seat, 0) + rows
        return found


@dataclass(frozen=True)
class _CapturedRequest:
    """One request that is captured."""

    slot: int
    seat: AnswerId
    prompt_len: int
    order: CapturePlan
    kind: CaptureFormat


@dataclass(frozen=True, eq=False)
class _SelectedStep:
    """A step, and for how long those after it want the same rows at the next positions."""

    cast: BatchSelection
    starts_R: Ints  # copies: the runner changes its own in place
    end_E: Ints
    seen_E: Ints
    selection: RowSelection | None
    left: int  # steps with one token of each request that differ in nothing but positions

    @staticmethod
    def of(cast: BatchSelection, batch: StepBatch, seen_E: Ints) -> _SelectedStep:
        starts_R, counts_R = batch.starts_R.astype(np.int64), batch.counts_R.astype(np.int64)
        offsets_R = np.cumsum(counts_R) - counts_R
        start_E = starts_R[cast.request_E]
        end_E = start_E + counts_R[cast.request_E]
        low_E = np.maximum(cast.first_E, start_E)
        num_E = np.maximum(np.minimum(cast.end_E, end_E) - low_E, 0)
        held = tuple(
            RuleTokens(seat, hold, int(offsets_R[at]), int(offsets_R[at] + counts_R[at]))
            for seat, hold, at in cast.holders
        )
        num_rows, selection = int(num_E.sum()), None
        if num_rows or held:
            entry_N = np.repeat(np.arange(len(num_E)), num_E)
            # The nth wanted row of a range is n after its first.
            within_N = np.arange(num_rows) - (np.cumsum(num_E) - num_E)[entry_N]
            position_N = low_E[entry_N] + within_N
            row_N = (offsets_R[cast.request_E] - start_E)[entry_N] + position_N
            selection = RowSelection(
                cast, entry_N, row_N, position_N, seen_E, int(counts_R.sum()), held
            )
        left = _steps_alike(cast, start_E) if (counts_R == 1).all() else 0
        return _SelectedStep(cast, starts_R, end_E, seen_E, selection, left)

    def is_before(self, batch: StepBatch) -> bool:
        """Whether the batch is this one, one token later."""
        return (
            self.left > 0
            and bool((batch.counts_R == 1).all())
            and np.array_equal(batch.starts_R, self.starts_R + 1)
        )

    def next(self) -> _SelectedStep:
        seen_E, selection = (
            self.seen_E,
            self.selection,
        )  # what these steps compute, they compute once
        if selection is not None:
            same = (self.cast, selection.entry_N, selection.row_N)
            selection = RowSelection(
                *same, selection.position_N + 1, seen_E, selection.num_tokens, selection.held
            )
        starts_R, end_E = self.starts_R + 1, self.end_E + 1
        return _SelectedStep(self.cast, starts_R, end_E, seen_E, selection, self.left - 1)


def _steps_alike(cast: BatchSelection, start_E: Ints) -> int:
    """Tokens of each request until one of its ranges begins or ends."""
    until_E = np.where(start_E < cast.first_E, cast.first_E, cast.end_E) - start_E - 1
    return int(until_E[start_E < cast.end_E].min(initial=FOREVER))


class RowSelector:
    """The captured requests the engine works on."""

    def __init__(self, site_of: Mapping[str, int]) -> None:
        """`site_of` each tapped point: its place among the tables' sites."""
        self._site_of = site_of
        self._open: dict[str, _CapturedRequest] = {}
        self._free: list[int] = []
        self._seen_S = np.zeros(64, np.int64)  # how far each has been forwarded
        self._kinds: dict[tuple[object, ...], CaptureFormat] = {}
        self._cast = self._read(())
        self._last: _SelectedStep | None = None

    def __len__(self) -> int:
        return len(self._open)

    def open(self, req_id: str, mark: RequestMark, prompt_len: int, order: CapturePlan) -> bool:
        """False for one that comes back after a preemption: it is known."""
        if req_id in self._open:
            return False
        slot = self._free.pop() if self._free else len(self._open)
        if slot == len(self._seen_S):
            self._seen_S = np.concatenate([self._seen_S, np.zeros_like(self._seen_S)])
        self._seen_S[slot] = 0
        seat = (mark.stream, mark.choice)
        self._open[req_id] = _CapturedRequest(slot, seat, prompt_len, order, self._kind(order))
        return True

    def _kind(self, order: CapturePlan) -> CaptureFormat:
        if order.kind not in self._kinds:
            if len(self._kinds) >= 1024:  # nobody asks for so many at once
                self._kinds.clear()
            encoder = named(order.encoder, dict(order.parameters))
            sites_P = np.array([self._site_of[point] for point in order.points], np.int64)
            self._kinds[order.kind] = CaptureFormat(encoder, order.points, sites_P, order.to)
        return self._kinds[order.kind]

    def answer_id_of(self, req_id: str) -> AnswerId | None:
        taking = self._open.get(req_id)
        return None if taking is None else taking.seat

    def close(self, req_id: str) -> AnswerId | None:
        """The engine is done with the request; None for one that is not captured."""
        taking = self._open.pop(req_id, None)
        if taking is None:
            return None
        self._free.append(taking.slot)
        self._cast = self._read(())  # its place may soon be somebody else's
        return taking.seat

    def step(self, batch: StepBatch) -> RowSelection | None:
        if not self._open:
            return None
        cast = self._cast
        if batch.req_ids != cast.req_ids:
            cast = self._cast = self._read(batch.req_ids)
        if not len(cast.format_E):
            return None
        last = self._last
        if last is not None and last.cast is cast and last.is_before(batch):
            self._last = last.next()
        else:
            self._last = _SelectedStep.of(cast, batch, self._seen_S[cast.slot_E])
        self._seen_S[cast.slot_E] = np.maximum(self._last.seen_E, self._last.end_E)
        return self._last.selection

    def _read(self, req_ids: Sequence[str]) -> BatchSelection:
        found = [(at, self._open[id_]) for at, id_ in enumerate(req_ids) if id_ in self._open]
        kinds = tuple(dict.fromkeys(taking.kind for _, taking in found))
        number = {kind: index for index, kind in enumerate(kinds)}
        entries = sorted(
            (number[taking.kind], at, taking.slot, *one, *taking.seat, taking.prompt_len)
            for at, taking in found
            for one in taking.order.ranges
        )
        columns = list(zip(*entries, strict=True)) if entries else [()] * 8
        kind, request, slot, first, end, stream, choice, prompt = columns
        return BatchSelection(
            req_ids=list(req_ids),  # the runner changes its own in place
            kinds=kinds,
            **{
                name: np.array(values, np.int64)
                for name, values in (
                    ("format_E", kind),
                    ("request_E", request),
                    ("slot_E", slot),
                    ("first_E", first),
                    ("end_E", end),
                    ("prompt_E", prompt),
                )
            },
            stream_E=np.array(stream, np.uint64),
            choice_E=np.array(choice, np.uint16),
            holders=tuple(
                (taking.seat, taking.order.hold, at)
                for at, taking in found
                if taking.order.hold is not None
            ),
        )
