"""Keeps vector rows and programs in the device tables, shared by requests that steer alike.

Runs in: the worker. Rows and programs are keyed by content. What no request uses any more stays
cached until its slot is needed.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import OrderedDict, defaultdict
from collections.abc import Hashable, Iterable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Generic, TypeVar

from clairai.engine.steer.assemble_program import ProgramAssembler
from clairai.engine.steer.steer_tables import SteerTables
from clairai.engine.steer.steering_plan import (
    PlanRow,
    Segment,
    SteeringPlan,
    program_keys,
    split_segments,
)
from clairai.fields.ranges import OPEN_END

Key = TypeVar("Key", bound=Hashable)


@dataclass(frozen=True)
class TakenSlot(Generic[Key]):
    index: int
    is_new: bool = False  # its contents are still to be written
    evicted: Key | None = None  # the key that had the slot until now


class SlotTable(Generic[Key]):
    """Gives keys slots of a table of fixed size; evicts the key that was unused for longest."""

    def __init__(self, what: str, first: int, number: int) -> None:
        """`number` slots from `first` on; `what` they hold, for error messages."""
        self._what, self._number = what, number
        self._free = list(range(first + number - 1, first - 1, -1))
        self._index: dict[Key, int] = {}
        self._users: dict[Key, int] = {}
        self._unused: OrderedDict[Key, None] = OrderedDict()

    def __getitem__(self, key: Key) -> int:
        return self._index[key]

    def take(self, key: Key) -> TakenSlot[Key]:
        """Count one more user of `key`, and give it a slot if it has none."""
        index = self._index.get(key)
        if index is not None:
            self._unused.pop(key, None)
            self._users[key] = self._users.get(key, 0) + 1
            return TakenSlot(index)
        evicted = None
        if not self._free:
            evicted = self._evict()
        index = self._index[key] = self._free.pop()
        self._users[key] = 1
        return TakenSlot(index, is_new=True, evicted=evicted)

    def release(self, key: Key) -> None:
        """Count one user less; the last one leaves the key cached."""
        self._users[key] -= 1
        if not self._users[key]:
            del self._users[key]
            self._unused[key] = None

    def give_back(self, key: Key, slot: TakenSlot[Key]) -> None:
        """Undo `take`: what was to be written into a new slot may not be there."""
        self.release(key)
        if slot.is_new:
            self.drop(key)

    def drop(self, key: Key) -> None:
        """Free the slot of an unused key."""
        if key in self._unused:
            del self._unused[key]
            self._free.append(self._index.pop(key))

    def _evict(self) -> Key:
        if not self._unused:
            raise RuntimeError(
                f"all {self._number} {self._what} are in use; requests beyond that should have "
                f"been refused at admission: please report this"
            )
        key = next(iter(self._unused))
        self.drop(key)
        return key


@dataclass(frozen=True)
class Schedule:
    """The program of every position of one request."""

    edges: tuple[int, ...]  # where segments begin, from 0 on; the last is OPEN_END
    programs: tuple[int, ...]  # of each segment; 0: nothing acts
    gate_slot: int | None  # where its gates keep their state, if they have any
    keys: frozenset[bytes]
    digests: frozenset[str]

    def segment(self, position: int) -> tuple[int, int, int]:
        """The program at a position, the segment's first position and one past its last."""
        index = bisect_right(self.edges, position) - 1
        return self.programs[index], self.edges[index], self.edges[index + 1]


class ProgramCache:
    """What the tables hold for the requests that the worker knows."""

    def __init__(self, tables: SteerTables, site_of: Mapping[str, str]) -> None:
        self._tables = tables
        self._assembler = ProgramAssembler(tables.sites, site_of)
        self._rows: SlotTable[str] = SlotTable("rows of vectors", 0, len(tables.vectors_VD))
        # Program 0 does nothing.
        self._programs: SlotTable[bytes] = SlotTable("programs", 1, len(tables.words_PSOW) - 1)
        self._gate_slots: SlotTable[str] = SlotTable("gate slots", 0, len(tables.state_ZG))
        self._digests_of: dict[bytes, frozenset[str]] = {}  # the rows of each program
        self._keys_of: defaultdict[str, set[bytes]] = defaultdict(set)  # the programs of each row

    def load(self, req_id: str, plan: SteeringPlan) -> Schedule:
        """Put all that this request needs into the tables, in time for the next forward pass."""
        self._check_token_ids(plan)
        rows = {row.digest: row for row in _rows_of(plan)}
        segments = split_segments(plan)
        keys = program_keys(plan, segments)
        active_of = {key: active for key, (_, _, active) in zip(keys, segments, strict=True)}
        with ExitStack() as undo:  # a plan that cannot be loaded leaves nothing behind
            self._load_rows(rows.values(), undo)
            for key, active in active_of.items():
                self._load_program(key, plan, active, undo)
            edges, programs = _lay_out(segments, [self._programs[key] for key in keys])
            gate_slot = self._take_gate_slot(req_id, plan, undo) if plan.is_stateful else None
            undo.pop_all()
        return Schedule(edges, programs, gate_slot, frozenset(active_of), frozenset(rows))

    def unload(self, req_id: str, schedule: Schedule) -> None:
        for key in schedule.keys:
            self._programs.release(key)
        for digest in schedule.digests:
            self._rows.release(digest)
        if schedule.gate_slot is not None:
            self._gate_slots.release(req_id)
            self._gate_slots.drop(req_id)

    def _check_token_ids(self, plan: SteeringPlan) -> None:
        if self._tables.token_ids_T is not None:
            return
        if any(action.skips_special for action in plan.actions):
            raise RuntimeError(
                "a steering plan skips special tokens, and this model runner exposes no token ids; "
                "it should have been refused at admission: please report this"
            )

    def _load_rows(self, rows: Iterable[PlanRow], undo: ExitStack) -> None:
        new: list[tuple[TakenSlot[str], PlanRow]] = []
        for row in rows:
            slot = self._rows.take(row.digest)
            undo.callback(self._rows.give_back, row.digest, slot)
            if slot.is_new:
                self._drop_programs_of(slot.evicted)
                new.append((slot, row))
        if new:
            self._tables.put_rows([slot.index for slot, _ in new], [r.read() for _, r in new])

    def _drop_programs_of(self, evicted: str | None) -> None:
        """A program uses its rows, so no program of an evicted row is in use either."""
        for key in tuple(self._keys_of.get(evicted or "", ())):
            self._programs.drop(key)
            self._unlink(key)

    def _load_program(
        self, key: bytes, plan: SteeringPlan, active: tuple[int, ...], undo: ExitStack
    ) -> None:
        slot = self._programs.take(key)
        undo.callback(self._programs.give_back, key, slot)
        if not slot.is_new:
            return
        undo.callback(self._unlink, key)
        if slot.evicted is not None:
            self._unlink(slot.evicted)
        program = self._assembler.assemble(plan, active, self._rows.__getitem__)
        self._tables.put_program(slot.index, program.words_SOW, program.num_ops_S)
        self._digests_of[key] = frozenset(row.digest for row in _rows_of(plan, active))
        for digest in self._digests_of[key]:
            self._keys_of[digest].add(key)

    def _unlink(self, key: bytes) -> None:
        """Forget the rows of a program that is no longer in the tables."""
        for digest in self._digests_of.pop(key, ()):
            self._keys_of[digest].discard(key)
            if not self._keys_of[digest]:
                del self._keys_of[digest]

    def _take_gate_slot(self, req_id: str, plan: SteeringPlan, undo: ExitStack) -> int:
        slot = self._gate_slots.take(req_id)
        undo.callback(self._gate_slots.give_back, req_id, slot)
        self._tables.put_gate_state(slot.index, self._assembler.stateful_gates(plan))
        return slot.index


def _rows_of(plan: SteeringPlan, active: Iterable[int] | None = None) -> list[PlanRow]:
    """The rows of all actions, or of the active ones, with those of their gates."""
    chosen = range(len(plan.actions)) if active is None else active
    actions = [plan.actions[index] for index in chosen]
    gates = [plan.gates[action.gate].row for action in actions if action.gate is not None]
    return [*gates, *(row for action in actions for row in action.rows)]


def _lay_out(
    segments: Iterable[Segment], programs: Iterable[int]
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The edges and programs of a schedule; program 0 fills the gaps between segments."""
    starts, last_end, laid = [], 0, []
    for (start, end, _), program in zip(segments, programs, strict=True):
        if start > last_end:
            starts.append(last_end)
            laid.append(0)
        starts.append(start)
        laid.append(program)
        last_end = end
    if last_end < OPEN_END:
        starts.append(last_end)
        laid.append(0)
    return (*starts, OPEN_END), tuple(laid)
