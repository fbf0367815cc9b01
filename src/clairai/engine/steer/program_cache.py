"""Takes keys of rows and programs; gives each a place in a table of fixed size."""

from __future__ import annotations

from bisect import bisect_right
from collections import OrderedDict, defaultdict
from collections.abc import Hashable, Iterable, Mapping
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
    """Where something is; if it is new there, it is yet to be written."""

    index: int
    is_new: bool = False
    evicted: Key | None = None  # whose place it was until now


class SlotTable(Generic[Key]):
    """What nobody uses keeps its place until that is needed; the longest unused goes first."""

    def __init__(self, what: str, first: int, number: int) -> None:
        """`what` they are, for messages; places are `number` from `first` on."""
        self._what, self._number = what, number
        self._free = list(range(first + number - 1, first - 1, -1))
        self._index: dict[Key, int] = {}
        self._users: dict[Key, int] = {}
        self._unused: OrderedDict[Key, None] = OrderedDict()

    def __getitem__(self, key: Key) -> int:
        return self._index[key]

    def take(self, key: Key) -> TakenSlot[Key]:
        """One more user of `key`."""
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

    def leave(self, key: Key) -> None:
        """One user less."""
        self._users[key] -= 1
        if not self._users[key]:
            del self._users[key]
            self._unused[key] = None

    def forget(self, key: Key) -> None:
        """If nobody uses it, its place is free."""
        if key in self._unused:
            del self._unused[key]
            self._free.append(self._index.pop(key))

    def _evict(self) -> Key:
        if not self._unused:
            raise RuntimeError(
                f"all {self._number} {self._what} are in use; requests beyond that are to be "
                f"refused at admission: please report this"
            )
        key = next(iter(self._unused))
        self.forget(key)
        return key


# MERGED
# Takes courses of requests; gives tracks, and holds in the tables what the courses need.
#
# Rows and programs are known by their content: requests that steer alike share them, and what
# nobody
# uses any more stays as a cache until its place is needed.


@dataclass(frozen=True)
class Schedule:
    """A course, laid along the positions: from each edge up to the next, one program."""

    edges: tuple[int, ...]  # the first is 0; the last, OPEN_END, has no program
    programs: tuple[int, ...]
    seat: int | None  # where its gates remember, if they do
    keys: frozenset[bytes]
    digests: frozenset[str]

    def segment(self, position: int) -> tuple[int, int, int]:
        """Program of a position, and where its segment begins and ends."""
        index = bisect_right(self.edges, position) - 1
        return self.programs[index], self.edges[index], self.edges[index + 1]


class ProgramCache:
    """What the tables hold for the requests that the worker knows."""

    def __init__(self, tables: SteerTables, site_of: Mapping[str, str]) -> None:
        self._tables = tables
        self._assembler = ProgramAssembler(tables.sites, site_of)
        self._rows: SlotTable[str] = SlotTable("rows of vectors", 0, len(tables.vectors_VD))
        self._programs: SlotTable[bytes] = SlotTable("programs", 1, len(tables.words_PSOW) - 1)
        self._seats: SlotTable[str] = SlotTable("seats", 0, len(tables.state_ZG))
        self._digests_of: dict[bytes, frozenset[str]] = {}  # rows of a program
        self._keys_of: defaultdict[str, set[bytes]] = defaultdict(set)  # programs with a row

    def load(self, req_id: str, plan: SteeringPlan) -> Schedule:
        """Have all that this request will need in the tables, from the next forward on."""
        self._check_token_ids(plan)
        rows = {row.digest: row for row in _rows_of(plan)}
        self._load_rows(rows.values())
        parts = split_segments(plan)
        keys = program_keys(plan, parts)
        lists = {key: active for key, (_, _, active) in zip(keys, parts, strict=True)}
        for key, active in lists.items():
            self._load_program(key, plan, active)
        edges, programs = _lay_out(parts, [self._programs[key] for key in keys])
        seat = self._seat(req_id, plan) if plan.is_stateful else None
        return Schedule(edges, programs, seat, frozenset(lists), frozenset(rows))

    def unload(self, req_id: str, track: Schedule) -> None:
        for key in track.keys:
            self._programs.leave(key)
        for digest in track.digests:
            self._rows.leave(digest)
        if track.seat is not None:
            self._seats.leave(req_id)
            self._seats.forget(req_id)

    def _check_token_ids(self, plan: SteeringPlan) -> None:
        if self._tables.token_ids_T is not None:
            return
        if any(action.skips_special for action in plan.actions):
            raise RuntimeError(
                "a course skips special tokens, and this runner shows no token ids; such requests "
                "are to be refused at admission: please report this"
            )

    def _load_rows(self, rows: Iterable[PlanRow]) -> None:
        places = [(self._rows.take(row.digest), row) for row in rows]
        new = [(place, row) for place, row in places if place.is_new]
        for place, _ in new:
            # Nobody uses these either: whoever uses a program uses its rows.
            for key in tuple(self._keys_of.get(place.evicted or "", ())):
                self._programs.forget(key)
                self._unlink(key)
        if new:
            self._tables.put_rows([place.index for place, _ in new], [r.read() for _, r in new])

    def _load_program(self, key: bytes, plan: SteeringPlan, active: tuple[int, ...]) -> None:
        place = self._programs.take(key)
        if not place.is_new:
            return
        if place.evicted is not None:
            self._unlink(place.evicted)
        program = self._assembler.program(plan, active, self._rows.__getitem__)
        self._tables.put_program(place.index, program.words_SOW, program.num_ops_S)
        self._digests_of[key] = frozenset(row.digest for row in _rows_of(plan, active))
        for digest in self._digests_of[key]:
            self._keys_of[digest].add(key)

    def _unlink(self, key: bytes) -> None:
        """A program that is no longer in the tables."""
        for digest in self._digests_of.pop(key):
            self._keys_of[digest].discard(key)
            if not self._keys_of[digest]:
                del self._keys_of[digest]

    def _seat(self, req_id: str, plan: SteeringPlan) -> int:
        seat = self._seats.take(req_id).index
        self._tables.put_gate_state(seat, self._assembler.reads(plan))
        return seat


def _rows_of(plan: SteeringPlan, active: Iterable[int] | None = None) -> list[PlanRow]:
    chosen = range(len(plan.actions)) if active is None else active
    actions = [plan.actions[index] for index in chosen]
    gates = [plan.gates[action.gate].row for action in actions if action.gate is not None]
    return [*gates, *(row for action in actions for row in action.rows)]


def _lay_out(
    parts: Iterable[Segment], programs: Iterable[int]
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Edges and the program behind each; 0 where nothing acts."""
    starts, ends, laid = [], [0], []
    for (start, end, _), program in zip(parts, programs, strict=True):
        if start > ends[-1]:
            starts.append(ends[-1])
            laid.append(0)
        starts.append(start)
        laid.append(program)
        ends.append(end)
    if ends[-1] < OPEN_END:
        starts.append(ends[-1])
        laid.append(0)
    return (*starts, OPEN_END), tuple(laid)
