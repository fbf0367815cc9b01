"""Steers the requests of one worker: writes, before each step, which program each row runs.

Runs in: the worker, on every rank, between the layout of a batch and its forward pass. While the
same requests decode inside the same segments of their plans, the map on the device stays valid and
nothing is sent. Where only the device knows a request's positions, because earlier drafts of it may
have been rejected, and they may lie in several segments, the device chooses the programs.

T = tokens in this step, R = requests in this step, B = slots: places of steered requests in the
arrays below, K = requests of this step with drafts and stateful gates.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
import torch
from numpy.typing import NDArray

from clairai.engine.steer import steer_tables as t
from clairai.engine.steer.program_cache import ProgramCache, Schedule
from clairai.engine.steer.steer_tables import SteerTables
from clairai.engine.steer.steering_plan import SteeringPlan
from clairai.engine.step import ForwardInputs, NewRequest, RequestErrors, StepBatch, try_each
from clairai.fields.ranges import OPEN_END

UNSTEERED: Final = 0  # the slot of every request that is not steered
NO_GATE_SLOT: Final = -1
NEVER: Final = -1  # below every position
CHOSEN: Final = -1  # the program of a row whose own one the device chooses


@dataclass(frozen=True, eq=False)
class _ValidMap:
    """The steps for which the map on the device is right."""

    req_ids: Sequence[str]
    slots_R: NDArray[np.intp]
    counts: bytes  # of the tokens of each request
    first_R: NDArray[np.int64]  # bounds of each request's first position, both included
    last_R: NDArray[np.int64]

    def holds(self, batch: StepBatch) -> bool:
        """For a batch of the same requests."""
        if batch.counts_R.tobytes() != self.counts:
            return False
        starts_R = batch.starts_R
        lowest_R = starts_R if batch.lowest_R is None else batch.lowest_R
        return bool(((lowest_R >= self.first_R) & (starts_R <= self.last_R)).all())


@dataclass(frozen=True, eq=False)
class _DraftedGates:
    """The requests of a step that have drafts and stateful gates."""

    index_K: NDArray[np.int64]  # in the batch
    gate_slot_K: NDArray[np.int64]
    last_K: NDArray[np.int64]  # each one's last row


class _ProgramWindows:
    """The programs of all positions that some requests' rows may have: the device chooses."""

    def __init__(self) -> None:
        self._rows: list[NDArray[np.int64]] = []
        self._places: list[NDArray[np.int64]] = []
        self._programs: list[int] = []

    def add(self, schedule: Schedule, first_row: int, count: int, lowest: int, end: int) -> None:
        """Positions from `lowest` up to `end` are possible."""
        place = len(self._programs) - lowest
        self._rows.append(np.arange(first_row, first_row + count))
        self._places.append(np.full(count, place))
        position = lowest
        while position < end:
            program, _, high = schedule.segment(position)
            self._programs += [program] * (min(high, end) - position)
            position = high

    def choose(self, tables: SteerTables) -> None:
        if self._rows:
            rows_N, places_N = np.concatenate(self._rows), np.concatenate(self._places)
            tables.choose_programs(rows_N, places_N, np.array(self._programs, np.int64))


class WorkerSteering:
    """Listens to the worker's steps; every rank has one, since all must steer alike."""

    def __init__(self, tables: SteerTables, site_of: Mapping[str, str]) -> None:
        """`site_of` names the site of each point."""
        self._tables = tables
        self._program_cache = ProgramCache(tables, site_of)
        self._slots: dict[str, int] = {}
        self._free: list[int] = []
        self._schedules: list[Schedule | None] = [None]
        self._map_T4 = np.zeros((tables.max_tokens, t.MAP_WORDS), np.int32)  # as on the device
        self._valid: _ValidMap | None = None
        self._drafted: _DraftedGates | None = None  # of this step
        # For each slot: the program of the current segment, its first position, one past its last,
        # and where the request's gates keep their state.
        self._program_B = np.zeros(64, np.int32)
        self._low_B = np.zeros(64, np.int64)
        self._high_B = np.full(64, OPEN_END, np.int64)
        self._gate_slot_B = np.full(64, NO_GATE_SLOT, np.int32)

    def begin(self, new: Sequence[NewRequest], finished: Sequence[str]) -> RequestErrors:
        for req_id in finished:
            self.remove(req_id)
        return try_each(new, self._add_new)

    def _add_new(self, request: NewRequest) -> None:
        if request.plan is not None:
            self.add(request.req_id, request.plan)

    def amend(self, req_id: str, plan: SteeringPlan | None) -> None:
        """Replace the plan of a running request. Its gates start closed, without their state."""
        self.remove(req_id)
        if plan is not None:
            self.add(req_id, plan)

    def place(self, batch: StepBatch) -> None:
        """Bring the map up to date with a batch whose forward pass has not begun."""
        if not self._slots and not self._tables.num_mapped:  # can_skip, without the call
            return
        valid = self._valid
        if valid is None or batch.req_ids != valid.req_ids:
            find = self._slots.get
            slots = [find(req_id, UNSTEERED) for req_id in batch.req_ids]
            # A copy of the ids: the runner changes its own list in place.
            self._valid = self._write_map(list(batch.req_ids), np.array(slots, np.intp), batch)
        elif not valid.holds(batch):
            self._valid = self._write_map(valid.req_ids, valid.slots_R, batch)
        if batch.drafts_R is not None:
            self._drafted = self._find_drafted(batch.counts_R, batch.drafts_R)

    def reject(self, rejected_R: NDArray[np.int32]) -> None:
        """Gates forget the drafts that were rejected."""
        self._forget(torch.from_numpy(rejected_R))

    def end(self, inputs: Callable[[], ForwardInputs]) -> None:
        """Nothing to publish; but of drafts that the device judged, `reject` was not called."""
        if self._drafted is not None:
            judged = inputs().drafts
            if judged is not None:
                self._forget(judged.rejected_R)
            self._drafted = None

    def _forget(self, rejected_R: torch.Tensor) -> None:
        drafted = self._drafted
        if drafted is not None:
            given = (drafted.gate_slot_K, drafted.last_K, drafted.index_K)
            self._tables.restore_states(*given, rejected_R)

    def drop(self, req_id: str, reason: str) -> None:
        del reason
        self.remove(req_id)

    def place_failed(self, batch: StepBatch) -> Sequence[str]:
        """Steer no row: half a map would steer rows of one request as another's."""
        self._clear_map()
        self._drafted = None
        return [req_id for req_id in batch.req_ids if req_id in self._slots]

    def end_failed(self, batch: StepBatch | None) -> Sequence[str]:
        """`reject` raised: gates may remember drafts that were rejected."""
        return [] if batch is None else [id_ for id_ in batch.req_ids if id_ in self._slots]

    def can_skip(self) -> bool:
        """True while no request is steered and the map on the device is clear."""
        return not self._slots and not self._tables.num_mapped

    def before_dummy_run(self) -> None:
        """Clear the map before a forward pass that belongs to no request."""
        self._valid = None
        self._send(np.zeros((self._tables.num_mapped, t.MAP_WORDS), np.int32), 0)

    def _clear_map(self) -> None:
        """Clear all of the map, whatever was sent last."""
        self._valid = None
        self._map_T4[:] = 0
        self._tables.put_map(self._map_T4)
        self._tables.num_mapped = 0

    def after_dummy_run(self) -> None:
        """Such a forward pass leaves nothing behind."""

    def add(self, req_id: str, plan: SteeringPlan) -> None:
        """Start to steer a request; one that returns after a preemption is known already."""
        if req_id in self._slots:
            return
        schedule = self._program_cache.load(req_id, plan)
        slot = self._free.pop() if self._free else len(self._schedules)
        if slot == len(self._schedules):
            self._schedules.append(None)
        if slot == len(self._program_B):
            self._grow()
        self._slots[req_id], self._schedules[slot] = slot, schedule
        self._gate_slot_B[slot] = NO_GATE_SLOT if schedule.gate_slot is None else schedule.gate_slot
        self._enter_segment(slot, 0)
        self._valid = None

    def remove(self, req_id: str) -> None:
        slot = self._slots.pop(req_id, None)
        if slot is None:
            return  # not steered, or aborted before it reached the worker
        schedule, self._schedules[slot] = self._schedules[slot], None
        assert schedule is not None
        self._program_cache.unload(req_id, schedule)
        self._free.append(slot)
        self._valid, self._drafted = None, None  # the next request may take this slot

    def _find_drafted(
        self, counts_R: NDArray[np.int32], drafts_R: NDArray[np.int32]
    ) -> _DraftedGates | None:
        """Whose gates may have to forget what they read in this step."""
        assert self._valid is not None
        gate_slot_R = self._gate_slot_B[self._valid.slots_R]
        index_K = np.flatnonzero((gate_slot_R != NO_GATE_SLOT) & (drafts_R > 0))
        if not len(index_K):
            return None
        last_R = np.cumsum(counts_R, dtype=np.int64) - 1
        return _DraftedGates(index_K, gate_slot_R[index_K].astype(np.int64), last_R[index_K])

    def _write_map(
        self, req_ids: Sequence[str], slots_R: NDArray[np.intp], batch: StepBatch
    ) -> _ValidMap:
        """Send the map of this batch, and return the later batches it is right for."""
        starts_R, counts_R = batch.starts_R.astype(np.int64), batch.counts_R.astype(np.int64)
        lowest_R = starts_R if batch.lowest_R is None else batch.lowest_R.astype(np.int64)
        windows = _ProgramWindows()
        self._enter_segments(slots_R, lowest_R)
        num_tokens = int(counts_R.sum())
        num_mapped = num_tokens if slots_R.any() else 0
        map_N4 = np.zeros((max(num_mapped, self._tables.num_mapped), t.MAP_WORDS), np.int32)
        first_R, last_R = self._low_B[slots_R], self._high_B[slots_R] - counts_R
        if num_mapped:
            map_N4[:num_tokens, t.PROGRAM] = np.repeat(self._program_B[slots_R], counts_R)
            is_crossing_R = starts_R > last_R
            for index in np.flatnonzero(is_crossing_R).tolist():
                self._map_crossing(map_N4, index, int(slots_R[index]), batch, windows)
            is_fresh_R = self._map_gate_slots(map_N4, slots_R, starts_R, counts_R)
            # The map of a fresh start differs from that of the next step.
            is_stateful_R = self._gate_slot_B[slots_R] != NO_GATE_SLOT
            first_R[is_stateful_R] = np.maximum(first_R[is_stateful_R], 1)
            last_R[is_fresh_R | is_crossing_R] = NEVER
        self._send(map_N4, num_mapped)
        windows.choose(self._tables)
        return _ValidMap(req_ids, slots_R, batch.counts_R.tobytes(), first_R, last_R)

    def _enter_segments(self, slots_R: NDArray[np.intp], starts_R: NDArray[np.int64]) -> None:
        """Move each slot to the segment of its request's first position, or the least it can be."""
        is_outside_R = (starts_R < self._low_B[slots_R]) | (starts_R >= self._high_B[slots_R])
        for index in np.flatnonzero(is_outside_R):
            self._enter_segment(int(slots_R[index]), int(starts_R[index]))

    def _enter_segment(self, slot: int, position: int) -> None:
        schedule = self._schedules[slot]
        assert schedule is not None
        program, low, high = schedule.segment(position)
        self._program_B[slot], self._low_B[slot], self._high_B[slot] = program, low, high

    def _map_crossing(
        self,
        map_N4: NDArray[np.int32],
        index: int,
        slot: int,
        batch: StepBatch,
        windows: _ProgramWindows,
    ) -> None:
        """Map a request whose rows in this step lie in several segments, or may lie there."""
        schedule = self._schedules[slot]
        assert schedule is not None
        count, position = int(batch.counts_R[index]), int(batch.starts_R[index])
        first_row, end = int(batch.counts_R[:index].sum()), position + count
        lowest = position if batch.lowest_R is None else int(batch.lowest_R[index])
        if lowest < position:
            map_N4[first_row : first_row + count, t.PROGRAM] = CHOSEN
            windows.add(schedule, first_row, count, lowest, end)
            return
        row_of_position_0 = first_row - position
        while position < end:
            program, _, high = schedule.segment(position)
            rows = slice(row_of_position_0 + position, row_of_position_0 + min(high, end))
            map_N4[rows, t.PROGRAM] = program
            position = high

    def _map_gate_slots(
        self,
        map_N4: NDArray[np.int32],
        slots_R: NDArray[np.intp],
        starts_R: NDArray[np.int64],
        counts_R: NDArray[np.int64],
    ) -> NDArray[np.bool_]:
        """Map the runs of requests with stateful gates; True for those that start afresh."""
        gate_slot_R = self._gate_slot_B[slots_R]
        is_stateful_R: NDArray[np.bool_] = (gate_slot_R != NO_GATE_SLOT) & (counts_R > 0)
        if not is_stateful_R.any():
            return is_stateful_R
        is_stateful_T = np.repeat(is_stateful_R, counts_R)
        num_tokens = len(is_stateful_T)
        gate_slot_T = np.repeat(gate_slot_R, counts_R)
        map_N4[:num_tokens, t.RUN] = -is_stateful_T.astype(np.int32)
        map_N4[:num_tokens, t.GATE_SLOT] = np.where(is_stateful_T, gate_slot_T, 0)
        firsts = (np.cumsum(counts_R) - counts_R)[is_stateful_R]
        is_fresh_R: NDArray[np.bool_] = is_stateful_R & (starts_R == 0)
        map_N4[firsts, t.RUN] = counts_R[is_stateful_R]
        map_N4[firsts, t.FRESH] = is_fresh_R[is_stateful_R]
        return is_fresh_R

    def _send(self, map_N4: NDArray[np.int32], num_mapped: int) -> None:
        sent_N4 = self._map_T4[: len(map_N4)]
        if not np.array_equal(sent_N4, map_N4):
            sent_N4[:] = map_N4
            self._tables.put_map(map_N4)
        self._tables.num_mapped = num_mapped

    def _grow(self) -> None:
        for name in ("_program_B", "_low_B", "_high_B", "_gate_slot_B"):
            old = getattr(self, name)
            setattr(self, name, np.concatenate([old, np.zeros_like(old)]))
