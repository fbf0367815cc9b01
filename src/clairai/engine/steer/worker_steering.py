"""Takes courses of requests and each step's batch; keeps the tables' map: whose row runs what.

T = tokens in this step, R = requests in this step, B = berths: places of requests in this book.

On the way of every step. While the same requests decode inside the same segments of their courses,
the map on the device stays right, and nothing is sent.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from clairai.engine.steer import steer_tables as t
from clairai.engine.steer.program_cache import ProgramCache, Schedule
from clairai.engine.steer.steer_tables import SteerTables
from clairai.engine.steer.steering_plan import SteeringPlan
from clairai.engine.step import ForwardInputs, NewRequest, StepBatch
from clairai.fields.ranges import OPEN_END

UNSTEERED: Final = 0  # the berth of every request that is not steered
NO_SEAT: Final = -1
NEVER: Final = -1  # no position is that low


@dataclass(frozen=True, eq=False)
class _BatchSlots:
    """Who is in the batch."""

    req_ids: Sequence[str]
    berths_R: NDArray[np.intp]


@dataclass(frozen=True, eq=False)
class _MapValidity:
    """For which steps of its roster the map is right: these counts, starts between these."""

    roster: _BatchSlots
    counts: bytes
    first_R: NDArray[np.int64]
    last_R: NDArray[np.int64]

    def holds(self, batch: StepBatch) -> bool:
        if batch.counts_R.tobytes() != self.counts:
            return False
        starts_R = batch.starts_R
        return bool(((starts_R >= self.first_R) & (starts_R <= self.last_R)).all())


class ProgramMap:
    """Every steered request that the worker knows."""

    def __init__(self, tables: SteerTables, site_of: Mapping[str, str]) -> None:
        """`site_of` says for each point which site it is."""
        self._tables = tables
        self._program_cache = ProgramCache(tables, site_of)
        self._berths: dict[str, int] = {}
        self._free: list[int] = []
        self._tracks: list[Schedule | None] = [None]
        self._map_T4 = np.zeros((tables.max_tokens, t.MAP_WORDS), np.int32)  # as on the device
        self._drawn: _MapValidity | None = None
        # Of each berth: the program of its segment, where that begins and ends, and its seat.
        self._program_B = np.zeros(64, np.int32)
        self._low_B = np.zeros(64, np.int64)
        self._high_B = np.full(64, OPEN_END, np.int64)
        self._seat_B = np.full(64, NO_SEAT, np.int32)

    def __len__(self) -> int:
        return len(self._berths)

    @property
    def num_mapped(self) -> int:
        """Tokens of the last step whose map says anything."""
        return self._tables.num_mapped

    def open(self, req_id: str, plan: SteeringPlan) -> None:
        """A request reached the worker; one that comes back after preemption is known already."""
        if req_id in self._berths:
            return
        track = self._program_cache.load(req_id, plan)
        berth = self._free.pop() if self._free else len(self._tracks)
        if berth == len(self._tracks):
            self._tracks.append(None)
        if berth == len(self._program_B):
            self._grow()
        self._berths[req_id], self._tracks[berth] = berth, track
        self._seat_B[berth] = NO_SEAT if track.seat is None else track.seat
        self._enter(berth, 0)
        self._drawn = None

    def close(self, req_id: str) -> None:
        berth = self._berths.pop(req_id, None)
        if berth is None:
            return  # not steered, or aborted before it ever reached the worker
        track, self._tracks[berth] = self._tracks[berth], None
        assert track is not None
        self._program_cache.unload(req_id, track)
        self._free.append(berth)
        self._drawn = None  # its place may soon be somebody else's

    def clear_rows(self) -> None:
        """Nobody's rows are forwarded next: none is steered."""
        self._drawn = None
        self._send(np.zeros((self._tables.num_mapped, t.MAP_WORDS), np.int32), 0)

    def place(self, batch: StepBatch) -> None:
        """The batch is laid out, the forward has not begun."""
        if not self._berths and not self._tables.num_mapped:
            return
        drawn = self._drawn
        if drawn is None or batch.req_ids != drawn.roster.req_ids:
            self._drawn = self._draw(self._muster(batch.req_ids), batch)
        elif not drawn.holds(batch):
            self._drawn = self._draw(drawn.roster, batch)

    def _muster(self, req_ids: Sequence[str]) -> _BatchSlots:
        find = self._berths.get
        berths = [find(req_id, UNSTEERED) for req_id in req_ids]
        return _BatchSlots(list(req_ids), np.array(berths, np.intp))  # the runner changes its own

    def _draw(self, roster: _BatchSlots, batch: StepBatch) -> _MapValidity:
        """Make the map for this batch; gives for which later ones it holds too."""
        berths_R = roster.berths_R
        starts_R, counts_R = batch.starts_R.astype(np.int64), batch.counts_R.astype(np.int64)
        self._advance(berths_R, starts_R)
        num_tokens = int(counts_R.sum())
        num_mapped = num_tokens if berths_R.any() else 0
        map_N4 = np.zeros((max(num_mapped, self._tables.num_mapped), t.MAP_WORDS), np.int32)
        first_R, last_R = self._low_B[berths_R], self._high_B[berths_R] - counts_R
        if num_mapped:
            map_N4[:num_tokens, t.PROGRAM] = np.repeat(self._program_B[berths_R], counts_R)
            self._paint_crossing(map_N4, np.flatnonzero(starts_R > last_R), berths_R, batch)
            is_fresh_R = self._paint_seated(map_N4, berths_R, starts_R, counts_R)
            first_R[self._seat_B[berths_R] != NO_SEAT] = 1  # a fresh start is not the same map
            last_R[is_fresh_R | (starts_R > last_R)] = NEVER
        self._send(map_N4, num_mapped)
        return _MapValidity(roster, batch.counts_R.tobytes(), first_R, last_R)

    def _advance(self, berths_R: NDArray[np.intp], starts_R: NDArray[np.int64]) -> None:
        """Have each berth in the segment of its request's first position."""
        is_away_R = (starts_R < self._low_B[berths_R]) | (starts_R >= self._high_B[berths_R])
        for index in np.flatnonzero(is_away_R):
            self._enter(int(berths_R[index]), int(starts_R[index]))

    def _enter(self, berth: int, position: int) -> None:
        track = self._tracks[berth]
        assert track is not None
        program, low, high = track.segment(position)
        self._program_B[berth], self._low_B[berth], self._high_B[berth] = program, low, high

    def _paint_crossing(
        self,
        map_N4: NDArray[np.int32],
        crossing: NDArray[np.intp],
        berths_R: NDArray[np.intp],
        batch: StepBatch,
    ) -> None:
        """Requests whose rows in this step are in several segments."""
        ends_R = np.cumsum(batch.counts_R)
        for index in crossing:
            track = self._tracks[berths_R[index]]
            assert track is not None
            count, position = int(batch.counts_R[index]), int(batch.starts_R[index])
            first, end = int(ends_R[index]) - count - position, position + count
            while position < end:
                program, _, high = track.segment(position)
                map_N4[first + position : first + min(high, end), t.PROGRAM] = program
                position = high

    def _paint_seated(
        self,
        map_N4: NDArray[np.int32],
        berths_R: NDArray[np.intp],
        starts_R: NDArray[np.int64],
        counts_R: NDArray[np.int64],
    ) -> NDArray[np.bool_]:
        """Runs of the requests that have a seat; gives which of them are fresh."""
        seat_R = self._seat_B[berths_R]
        is_seated_R: NDArray[np.bool_] = (seat_R != NO_SEAT) & (counts_R > 0)
        if not is_seated_R.any():
            return is_seated_R
        is_seated_T = np.repeat(is_seated_R, counts_R)
        num_tokens = len(is_seated_T)
        map_N4[:num_tokens, t.RUN] = -is_seated_T.astype(np.int32)
        map_N4[:num_tokens, t.SEAT] = np.where(is_seated_T, np.repeat(seat_R, counts_R), 0)
        firsts = (np.cumsum(counts_R) - counts_R)[is_seated_R]
        is_fresh_R: NDArray[np.bool_] = is_seated_R & (starts_R == 0)
        map_N4[firsts, t.RUN] = counts_R[is_seated_R]
        map_N4[firsts, t.FRESH] = is_fresh_R[is_seated_R]
        return is_fresh_R

    def _send(self, map_N4: NDArray[np.int32], num_mapped: int) -> None:
        held_N4 = self._map_T4[: len(map_N4)]
        if not np.array_equal(held_N4, map_N4):
            held_N4[:] = map_N4
            self._tables.put_map(map_N4)
        self._tables.num_mapped = num_mapped

    def _grow(self) -> None:
        for name in ("_program_B", "_low_B", "_high_B", "_seat_B"):
            old = getattr(self, name)
            setattr(self, name, np.concatenate([old, np.zeros_like(old)]))


# MERGED
# Takes what the worker tells of each step; gives each steered request its course in the tables.


class WorkerSteering:
    """Beside the Station, and on every rank: all ranks steer alike."""

    def __init__(self, steering: ProgramMap) -> None:
        self.steering = steering

    def begin(self, new: Sequence[NewRequest], finished: Sequence[str]) -> None:
        for req_id in finished:
            self.steering.close(req_id)
        for request in new:
            if request.plan is not None:
                self.steering.open(request.req_id, request.plan)

    def amend(self, req_id: str, plan: SteeringPlan | None) -> None:
        """Its gates begin anew: those that acted before act no more."""
        self.steering.close(req_id)
        if plan is not None:
            self.steering.open(req_id, plan)

    def place(self, batch: StepBatch) -> None:
        self.steering.place(batch)

    def end(self, inputs: Callable[[], ForwardInputs]) -> None:
        del inputs  # what was steered shows in the rows themselves

    def can_skip(self) -> bool:
        return not len(self.steering) and not self.steering.num_mapped

    def before_dummy_run(self) -> None:
        self.steering.clear_rows()

    def after_dummy_run(self) -> None:
        """Nothing of it is left."""
