"""The named vectors, probes and global tiers of an engine, and what its requests use of the tables.

Runs in: the engine core. Requests come on one thread and changes on another, so what is known is an
immutable snapshot that changes replace as a whole; a request is resolved from one snapshot.
"""

from __future__ import annotations

import threading
from collections import Counter, deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any, Final, Literal, get_args

from clairai.engine.steer.resolve_steering import resolve_entry, resolve_plan
from clairai.engine.steer.snapshot import (
    PreparedVector,
    SteeringSnapshot,
    SteeringTiers,
)
from clairai.engine.steer.steering_plan import SteeringPlan, all_program_keys
from clairai.errors import ClairaiError, RequestError, VectorCapacityError, VectorError, quote
from clairai.fields.json_fields import suggest_names
from clairai.fields.packed_vector import PackedVector
from clairai.fields.row_growth import row_limits
from clairai.fields.steer import MAX_ENTRIES, SteerEntry
from clairai.points import Point
from clairai.probe.model import Probe
from clairai.vector.model import Vector
from clairai.wire.steering_messages import VectorState

Mode = Literal["add", "replace", "put"]
USUAL_PROMPT: Final = 1024  # tokens; for it the tiers must be possible together
_MODES: Final[tuple[Mode, ...]] = get_args(Mode)
# Phases that share no token with a tier.
_PHASES_OUTSIDE_TIER: Final = {"prefill": ("generation",), "decode": ("prompt", "last_prompt")}

ClaimKey = tuple[str, object]  # the kind of table, and the content
_ROW: Final = "row"
_PROGRAM: Final = "program"
_GATE_SLOT: Final = "gate slot"


@dataclass(frozen=True)
class SteeringLimits:
    """What unfinished requests may use at once, and how many vectors may have a name."""

    rows: int  # of vectors and gates, counted by content
    programs: int  # counted by content
    gate_slots: int = 4096  # requests with stateful gates
    vectors: int = 2048
    nbytes: int = 1 << 30  # of the numbers of all named vectors


class TableClaim:
    """What one request uses of the tables, until it is released."""

    def __init__(self, keys: frozenset[ClaimKey], released: deque[TableClaim]) -> None:
        self.keys = keys
        self._released = released

    def release(self) -> None:
        """Safe to repeat, from any thread and inside a finalizer: takes no lock."""
        self._released.append(self)


class TableClaims:
    """Counts what unfinished requests use of the tables; equal content counts once."""

    def __init__(self, limits: SteeringLimits) -> None:
        self._limits = {_ROW: limits.rows, _PROGRAM: limits.programs, _GATE_SLOT: limits.gate_slots}
        self._lock = threading.Lock()
        self._live: set[TableClaim] = set()
        self._users: Counter[ClaimKey] = Counter()
        self._in_use: Counter[str] = Counter()
        # A finalizer may run while this thread holds the lock: it only leaves its claim here.
        self._released: deque[TableClaim] = deque()

    def claim(self, plan: SteeringPlan) -> TableClaim:
        """VectorCapacityError, and nothing is claimed, if it does not fit."""
        claim = TableClaim(frozenset(_claim_keys(plan)), self._released)
        with self._lock:
            self._drop_released()
            new = [key for key in claim.keys if not self._users[key]]
            for kind, limit in self._limits.items():
                self._check(kind, limit, sum(key[0] == kind for key in new))
            self._in_use.update(key[0] for key in new)
            self._users.update(claim.keys)
            self._live.add(claim)
        return claim

    def in_use(self) -> tuple[int, int]:
        """Rows and programs."""
        with self._lock:
            self._drop_released()
            return self._in_use[_ROW], self._in_use[_PROGRAM]

    def _check(self, kind: str, limit: int, count: int) -> None:
        if self._in_use[kind] + count <= limit:
            return
        raise VectorCapacityError(
            f"this request needs {count} more steering {kind}s; {self._in_use[kind]} of {limit} "
            f"are in use by unfinished requests: ask again later, steer at fewer points, or raise "
            f"`steer_{kind}s` in the settings"
            if kind != _GATE_SLOT
            else f"{limit} unfinished requests have gates with latch or release, the most there "
            f"can be: ask again later, or leave out latch and release"
        )

    def _drop_released(self) -> None:
        while self._released:
            claim = self._released.popleft()
            if claim in self._live:
                self._live.remove(claim)
                self._users.subtract(claim.keys)
                unused = [key for key in claim.keys if not self._users[key]]
                self._in_use.subtract(key[0] for key in unused)
                for key in unused:
                    del self._users[key]


def _claim_keys(plan: SteeringPlan) -> Iterable[ClaimKey]:
    for action in plan.actions:
        yield from ((_ROW, row.digest) for row in action.rows)
    yield from ((_ROW, gate.row.digest) for gate in plan.gates)
    yield from ((_PROGRAM, key) for key in all_program_keys(plan))
    if plan.is_stateful:
        yield _GATE_SLOT, object()  # the state of gates is never shared


class SteeringRegistry:
    """One for each engine. Does no I/O; every method can be called from any thread."""

    def __init__(
        self,
        points: Iterable[Point],
        width: int,
        limits: SteeringLimits,
        *,
        model: str | None = None,
        can_skip_special: bool = True,
        dtype: str = "float32",
    ) -> None:
        """`dtype` is that of the model's rows."""
        self.limits = limits
        self._snapshot = SteeringSnapshot(
            frozenset(points),
            can_skip_special=can_skip_special,
            row_limits=row_limits(dtype),
            width=width,
            model=model,
        )
        self._changing = threading.Lock()
        self._claims = TableClaims(limits)

    def put(self, vectors: Sequence[Vector], mode: Mode = "put") -> None:
        """Name all of the vectors, or none and raise.

        `add` refuses a name that is taken, `replace` one that is not. Running requests keep what
        they were admitted with.
        """
        assert mode in _MODES
        with self._changing:
            snapshot = self._snapshot
            prepared = {one.name: _prepare_vector(one, mode, snapshot) for one in vectors}
            if len(prepared) != len(vectors):
                raise VectorError("two of the vectors have one name; names are unique: rename one")
            self._swap_vectors({**snapshot.vectors, **prepared}, changed=frozenset(prepared))

    def remove(self, names: Iterable[str]) -> None:
        """Remove all of the names, or none and raise."""
        gone = frozenset(names)
        with self._changing:
            snapshot = self._snapshot
            missing = sorted(gone - snapshot.vectors.keys())
            if missing:
                raise _unknown_vector(missing[0], snapshot)
            kept = {name: one for name, one in snapshot.vectors.items() if name not in gone}
            self._swap_vectors(kept, changed=gone)

    def vectors(self) -> tuple[Vector, ...]:
        """Sorted by name."""
        return _sorted_vectors(self._snapshot)

    def vector(self, name: str) -> Vector:
        snapshot = self._snapshot
        if name not in snapshot.vectors:
            raise _unknown_vector(name, snapshot)
        return snapshot.vectors[name].vector

    @property
    def version(self) -> int:
        """The version of the vectors; every change raises it."""
        return self._snapshot.version

    def state(self) -> VectorState:
        """The reply to a request for the list of vectors."""
        snapshot = self._snapshot
        return VectorState(
            version=snapshot.version,
            vectors=tuple(vector.listed() for vector in _sorted_vectors(snapshot)),
            points=tuple(map(str, sorted(snapshot.points))),
            width=snapshot.width,
            rows=self.limits.rows,
            programs=self.limits.programs,
        )

    def set_probes(self, probes: Mapping[str, Probe]) -> None:
        """Use these probes of the bank for gates; the mapping must not change afterwards."""
        with self._changing:
            self._snapshot = replace(self._snapshot, probes=probes)

    def tiers(self) -> SteeringTiers:
        return self._snapshot.tiers

    def set_tiers(
        self,
        *,
        base: Sequence[SteerEntry] | None = None,
        prefill: Sequence[SteerEntry] | None = None,
        decode: Sequence[SteerEntry] | None = None,
    ) -> None:
        """Replace the tiers that are given, all or none.

        Running requests keep what they were admitted with.
        """
        given = {"base": base, "prefill": prefill, "decode": decode}
        with self._changing:
            snapshot = self._snapshot
            changed: dict[str, Any] = {
                tier: tuple(_unpack_entry(entry, snapshot) for entry in entries)
                for tier, entries in given.items()
                if entries is not None
            }
            tiers = replace(snapshot.tiers, **changed, version=snapshot.tiers.version + 1)
            _check_tiers(replace(snapshot, tiers=tiers))
            self._snapshot = replace(snapshot, tiers=tiers)

    def resolve(self, entries: Iterable[SteerEntry], *, prompt_len: int) -> SteeringPlan | None:
        """The plan of a request: global tiers, then its own entries; None if nothing acts."""
        return resolve_plan(entries, self._snapshot, prompt_len)

    def claim(self, plan: SteeringPlan) -> TableClaim:
        """Reserve room in the tables; VectorCapacityError if there is none."""
        return self._claims.claim(plan)

    def in_use(self) -> tuple[int, int]:
        """Rows and programs of unfinished requests."""
        return self._claims.in_use()

    def _swap_vectors(self, vectors: dict[str, PreparedVector], *, changed: frozenset[str]) -> None:
        snapshot, limits = self._snapshot, self.limits
        nbytes = sum(4 * one.vector.width * len(one.rows) for one in vectors.values())
        if len(vectors) > limits.vectors or nbytes > limits.nbytes:
            raise VectorCapacityError(
                f"{len(vectors)} vectors of {nbytes} bytes together; an engine holds at most "
                f"{limits.vectors} of {limits.nbytes}: remove some first"
            )
        named = MappingProxyType(vectors)
        swapped = replace(snapshot, vectors=named, version=snapshot.version + 1)
        _check_tiers_still_resolve(swapped, changed)
        self._snapshot = swapped


def _sorted_vectors(snapshot: SteeringSnapshot) -> tuple[Vector, ...]:
    return tuple(one.vector for _, one in sorted(snapshot.vectors.items()))


def _prepare_vector(vector: Vector, mode: Mode, snapshot: SteeringSnapshot) -> PreparedVector:
    if mode == "add" and vector.name in snapshot.vectors:
        raise VectorError(f"there is a vector named {vector.name}; replace it, or rename this one")
    if mode == "replace" and vector.name not in snapshot.vectors:
        raise _unknown_vector(vector.name, snapshot)
    return snapshot.prepare(vector, what=f"vector {vector.name}")


def _unknown_vector(name: str, snapshot: SteeringSnapshot) -> VectorError:
    return VectorError(f"no vector is named {quote(name)}; {suggest_names(name, snapshot.vectors)}")


def _unpack_entry(entry: SteerEntry, snapshot: SteeringSnapshot) -> SteerEntry:
    """Decode an inline vector of a tier once, since every request uses it."""
    if not isinstance(entry.vector, PackedVector):
        return entry
    what = f"{entry.label}.vector"
    return replace(entry, vector=entry.vector.unpack(snapshot.width, what=what))


def _check_tiers_still_resolve(snapshot: SteeringSnapshot, changed: frozenset[str]) -> None:
    """Refuse a change that breaks a tier: every later request would be refused."""
    for entry in snapshot.tiers.entries():
        if not isinstance(entry.vector, str) or entry.vector not in changed:
            continue
        try:
            resolve_entry(entry, snapshot)
            resolve_plan((), snapshot, USUAL_PROMPT)
        except ClairaiError as error:
            raise VectorError(
                f"a global tier uses {entry.vector}, and would no longer work: {error.reason}; "
                "change the tier first"
            ) from None


def _check_tiers(snapshot: SteeringSnapshot) -> None:
    entries = snapshot.tiers.entries()
    if len(entries) > MAX_ENTRIES:
        raise RequestError(
            f"global tiers have {len(entries)} entries in all; give at most {MAX_ENTRIES}"
        )
    for tier, phases in _PHASES_OUTSIDE_TIER.items():
        for entry in getattr(snapshot.tiers, tier):
            if entry.when.phase in phases:
                raise RequestError(
                    f"{entry.label}: {entry.when.phase} is not part of the {tier} tier, so it "
                    "would never act; put it into another tier"
                )
    for entry in entries:
        resolve_entry(entry, snapshot)
    # Together they may be too many at one place, and then every request would be refused.
    resolve_plan((), snapshot, USUAL_PROMPT)
