"""Takes the engine's own batch order of a step; gives one row per forwarded token: whose it is.

T = tokens in this step, R = requests in this step. Nothing is guessed: order and counts are what
the model runner laid out, positions and token ids are what the forward pass read.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from clairai.engine.step import RequestMark, StepBatch
from clairai.wire import ring_messages

_INT32: Final = np.dtype(np.int32)
_NO_EVENTS: Final = np.empty(0, ring_messages.ROW)


@dataclass(frozen=True, eq=False)
class BatchRequests:
    """Who is in the batch. While the same requests decode, steps share one: compare with `is`."""

    req_ids: Sequence[str]
    slots_R: NDArray[np.intp]  # their places in the book
    streams_R: NDArray[np.uint64]
    choices_R: NDArray[np.uint16]
    prompts_R: NDArray[np.uint32]


@dataclass(frozen=True, eq=False)
class StepRows:
    """One step's rows, complete but for what only the device knows: positions and token ids."""

    events: NDArray[np.void]  # rows that stand for no forwarded token: finished, cached
    num_tokens: int
    counts_R: NDArray[np.int32]
    roster: BatchRequests
    seen_R: NDArray[np.uint32]
    is_cut: bool = False  # there are further rows of the same step

    @property
    def request_T(self) -> NDArray[np.int32]:
        """Which of the step's requests each token belongs to."""
        return np.repeat(np.arange(len(self.counts_R), dtype=np.int32), self.counts_R)

    def cut_events(self, most: int) -> Iterator[StepRows]:
        """The same rows in the same order, with at most this many events in each part."""
        first = 0
        while len(self.events) - first > most:
            yield replace(_empty_step(), events=self.events[first : first + most], is_cut=True)
            first += most
        yield replace(self, events=self.events[first:]) if first else self

    def fill(
        self, positions_T: NDArray[np.integer], token_ids_T: NDArray[np.integer]
    ) -> NDArray[np.void]:
        """Events first, then a row for each forwarded token, in the order of the forward pass."""
        num_events = len(self.events)
        rows = np.empty(num_events + len(positions_T), ring_messages.ROW)
        rows[:num_events] = self.events
        tokens = rows[num_events:]
        position_T = positions_T.astype(np.uint32)
        tokens["stream"] = np.repeat(self.roster.streams_R, self.counts_R)
        tokens["choice"] = np.repeat(self.roster.choices_R, self.counts_R)
        tokens["position"] = position_T
        tokens["token_id"] = token_ids_T
        tokens["span"] = 1
        # The prompt's length decides, not the scheduler's idea of prefill: a resumed request
        # prefills its own generated tokens again.
        tokens["phase"] = position_T >= np.repeat(self.roster.prompts_R, self.counts_R)
        tokens["flags"] = position_T < np.repeat(self.seen_R, self.counts_R)
        return rows


IsSameBatch = Callable[[Sequence[str], NDArray[np.int32], NDArray[np.int32]], bool]


class RepeatedBatch(ctypes.Structure):
    """Steps that are all alike: the same requests, each going on where it stopped, as decode does.

    They share one StepRows. Its `seen_R` is that of the first of them: what has been forwarded
    since lies before every later position, so that no row's flag depends on it.
    """

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("req_ids", "counts", "ends")),
        ("num_requests", ctypes.c_int64),
        *((name, ctypes.c_void_p) for name in ("array", "int32")),
    )

    def __init__(self, rows: StepRows, ends_R: NDArray[np.int32], native: Any) -> None:
        """`native` is the module that step.c is, or None."""
        req_ids, counts_R = rows.roster.req_ids, rows.counts_R
        addresses = (id(req_ids), counts_R.ctypes.data, ends_R.ctypes.data)
        super().__init__(*addresses, len(ends_R), id(np.ndarray), id(_INT32))
        self.address = ctypes.addressof(self)
        self.rows = replace(rows, events=_NO_EVENTS) if len(rows.events) else rows
        self.ends_R = ends_R  # how far each request has come
        # Whether a step is alike too; then it is counted.
        self.goes_on: IsSameBatch = (
            partial(_is_same_batch, rows, ends_R)
            if native is None
            else partial(native.goes_on, self.address)
        )


def _is_same_batch(
    rows: StepRows,
    ends_R: NDArray[np.int32],
    req_ids: Sequence[str],
    counts_R: NDArray[np.int32],
    starts_R: NDArray[np.int32],
) -> bool:
    """The twin of goes_on() in step.c."""
    # Bytes: of a few hundred numbers they compare faster than arrays do.
    is_alike = (
        req_ids == rows.roster.req_ids
        and counts_R.tobytes() == rows.counts_R.tobytes()
        and starts_R.tobytes() == ends_R.tobytes()
    )
    if is_alike:
        ends_R += rows.counts_R
    return is_alike


def _empty_step() -> StepRows:
    return RowBuilder().idle()


class RowBuilder:
    """The requests the engine works on, and how far each has been forwarded."""

    def __init__(self, native: Any = None) -> None:
        """`native` is the module that step.c is; without it the same takes longer."""
        self._native = native
        self._slots: dict[str, int] = {}
        self._free: list[int] = []
        self._stream_S = np.zeros(64, np.uint64)
        self._choice_S = np.zeros(64, np.uint16)
        self._prompt_S = np.zeros(64, np.uint32)
        self._seen_S = np.zeros(64, np.uint32)
        self._events: list[NDArray[np.void]] = []
        self._roster = self._read_roster(())
        self._pace: RepeatedBatch | None = None

    @property
    def pace(self) -> RepeatedBatch | None:
        """Of the last step; None: it has been written down."""
        return self._pace

    def __len__(self) -> int:
        return len(self._slots)

    def open(self, req_id: str, mark: RequestMark, prompt_len: int) -> None:
        """A request reached the worker; one that comes back after preemption is known already."""
        if req_id in self._slots:
            return
        slot = self._free.pop() if self._free else len(self._slots)
        if slot == len(self._stream_S):
            self._grow()
        self._slots[req_id] = slot
        self._stream_S[slot] = mark.stream
        self._choice_S[slot] = mark.choice
        self._prompt_S[slot] = prompt_len
        self._seen_S[slot] = 0

    def close(self, req_id: str) -> None:
        """The engine is done with the request: say so in the next step's rows."""
        slot = self._slots.pop(req_id, None)
        if slot is None:
            return  # aborted before it ever reached the worker
        self._settle()
        self._free.append(slot)
        self._roster = self._read_roster(())  # its place may soon be somebody else's
        self._events.append(
            _events(
                self._stream_S[slot : slot + 1],
                self._choice_S[slot : slot + 1],
                positions=self._seen_S[slot : slot + 1],
                spans=np.zeros(1, np.uint32),
                phase=ring_messages.FINISHED,
            )
        )

    def step(self, batch: StepBatch) -> StepRows:
        pace = self._pace
        if (
            pace is not None
            and not self._events
            and pace.goes_on(batch.req_ids, batch.counts_R, batch.starts_R)
        ):
            return pace.rows
        self._settle()
        roster = self._roster
        if batch.req_ids != roster.req_ids:
            roster = self._roster = self._read_roster(batch.req_ids)
        starts_R = batch.starts_R.astype(np.uint32)
        counts_R = batch.counts_R.astype(np.int32)  # a copy: the runner soon uses its own again
        seen_R = self._seen_S[roster.slots_R]
        self._note_cached(roster, seen_R, starts_R)
        ends_R = starts_R + counts_R.astype(np.uint32)
        self._seen_S[roster.slots_R] = np.maximum(seen_R, ends_R)
        rows = StepRows(self._take_events(), int(counts_R.sum()), counts_R, roster, seen_R)
        self._pace = RepeatedBatch(rows, ends_R.astype(np.int32), self._native)
        return rows

    def _settle(self) -> None:
        """Write down how far the requests have come whose steps were all alike."""
        pace, self._pace = self._pace, None
        if pace is not None:
            slots_R = pace.rows.roster.slots_R
            ends_R = pace.ends_R.astype(np.uint32)
            self._seen_S[slots_R] = np.maximum(self._seen_S[slots_R], ends_R)

    def _read_roster(self, req_ids: Sequence[str]) -> BatchRequests:
        slots_R = np.fromiter(map(self._slots.__getitem__, req_ids), np.intp, len(req_ids))
        return BatchRequests(
            req_ids=list(req_ids),  # the runner changes its own in place
            slots_R=slots_R,
            streams_R=self._stream_S[slots_R],
            choices_R=self._choice_S[slots_R],
            prompts_R=self._prompt_S[slots_R],
        )

    def idle(self) -> StepRows:
        """A step that forwards nothing may still have something to say."""
        nobody = StepBatch([], np.zeros(0, np.int32), np.zeros(0, np.int32))
        return self.step(nobody)

    def _take_events(self) -> NDArray[np.void]:
        if not self._events:
            return _NO_EVENTS
        events, self._events = self._events, []
        return np.concatenate(events)

    def _note_cached(
        self, roster: BatchRequests, seen_R: NDArray[np.uint32], starts_R: NDArray[np.uint32]
    ) -> None:
        """Positions between what was forwarded and where this step starts came from a cache."""
        is_skipped_R = starts_R > seen_R
        if not np.count_nonzero(is_skipped_R):
            return
        self._events.append(
            _events(
                roster.streams_R[is_skipped_R],
                roster.choices_R[is_skipped_R],
                positions=seen_R[is_skipped_R],
                spans=(starts_R - seen_R)[is_skipped_R],
                phase=ring_messages.CACHED,
            )
        )

    def _grow(self) -> None:
        for name in ("_stream_S", "_choice_S", "_prompt_S", "_seen_S"):
            old = getattr(self, name)
            setattr(self, name, np.concatenate([old, np.zeros_like(old)]))


def _events(
    streams: NDArray[np.uint64],
    choices: NDArray[np.uint16],
    *,
    positions: NDArray[np.uint32],
    spans: NDArray[np.uint32],
    phase: int,
) -> NDArray[np.void]:
    rows = np.zeros(len(streams), ring_messages.ROW)
    rows["stream"], rows["choice"] = streams, choices
    rows["position"], rows["span"] = positions, spans
    rows["token_id"], rows["phase"] = -1, phase
    return rows
