"""Takes courses of requests; gives claims on the engine's tables, or says that they are full."""

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
from clairai.engine.steer.steering_plan import SteeringPlan, all_program_keys, describe_plan
from clairai.errors import ClairaiError, RequestError, VectorCapacityError, VectorError
from clairai.fields.json_fields import suggest_names
from clairai.fields.packed_vector import PackedVector
from clairai.fields.steer import MAX_ENTRIES, SteerEntry
from clairai.points import Point, quote
from clairai.probe.model import Probe
from clairai.vector.model import Vector
from clairai.wire.steering_messages import VectorState

ClaimKey = tuple[str, object]
_ROW: Final = "row"
_PROGRAM: Final = "program"
_SEAT: Final = "seat"


@dataclass(frozen=True)
class SteeringLimits:
    """What unfinished requests may use at once, and what may have a name."""

    rows: int  # of vectors and gates, different in content
    programs: int  # different ways of steering a row
    seats: int = 4096  # requests whose gates remember
    vectors: int = 2048
    nbytes: int = 1 << 30  # of the numbers of all named vectors


class TableClaim:
    """What one request has in the tables, until it is released."""

    def __init__(self, keys: frozenset[ClaimKey], gone: deque[TableClaim]) -> None:
        self.keys = keys
        self._gone = gone

    def release(self) -> None:
        """Any number of times, from any thread, and while garbage is collected: takes no lock."""
        self._gone.append(self)


class TableClaims:
    """Counts rows and programs in use. The same content is one row, whoever uses it."""

    def __init__(self, limits: SteeringLimits) -> None:
        self._limits = {_ROW: limits.rows, _PROGRAM: limits.programs, _SEAT: limits.seats}
        self._lock = threading.Lock()
        self._live: set[TableClaim] = set()
        self._users: Counter[ClaimKey] = Counter()
        self._in_use: Counter[str] = Counter()
        # A finalizer may run inside any line of ours, lock held or not: it leaves its claim here.
        self._gone: deque[TableClaim] = deque()

    def claim(self, plan: SteeringPlan) -> TableClaim:
        """Raises VectorCapacityError, and then nothing is claimed."""
        claim = TableClaim(frozenset(_claim_keys(plan)), self._gone)
        with self._lock:
            self._forget_gone()
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
            self._forget_gone()
            return self._in_use[_ROW], self._in_use[_PROGRAM]

    def _check(self, kind: str, limit: int, count: int) -> None:
        if self._in_use[kind] + count <= limit:
            return
        raise VectorCapacityError(
            f"this request needs {count} more steering {kind}s; {self._in_use[kind]} of {limit} "
            f"are in use by unfinished requests: ask again later, steer at fewer points, or raise "
            f"`steer_{kind}s` in the settings"
            if kind != _SEAT
            else f"{limit} unfinished requests have gates that remember, as many as there can be: "
            f"ask again later, or leave out latch and release"
        )

    def _forget_gone(self) -> None:
        while self._gone:
            claim = self._gone.popleft()
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
        yield _SEAT, object()  # what a gate remembers is never shared


# MERGED
# Takes vectors, probes and tiers, each by name; gives requests their courses. One for each
# engine.
#
# Requests come on one thread and changes on another: what is known is replaced whole, never
# changed,
# and a request is resolved from what was known at one moment.


Mode = Literal["add", "replace", "put"]
_MODES: Final[tuple[Mode, ...]] = get_args(Mode)
# Phases that hold no token of a tier.
_PHASES_OUTSIDE_TIER: Final = {"prefill": ("generation",), "decode": ("prompt", "last_prompt")}


class SteeringRegistry:
    """What names mean. No I/O; every method may be called from any thread."""

    def __init__(
        self,
        points: Iterable[Point],
        width: int,
        limits: SteeringLimits,
        *,
        model: str | None = None,
        can_skip_special: bool = True,
    ) -> None:
        self.limits = limits
        self._known = SteeringSnapshot(
            frozenset(points), can_skip_special=can_skip_special, width=width, model=model
        )
        self._changing = threading.Lock()
        self._claims = TableClaims(limits)

    def put(self, vectors: Sequence[Vector], mode: Mode = "put") -> None:
        """All of them, or none and an error; `add` refuses a name that is taken, `replace` one
        that is not. Running requests keep what they were admitted with."""
        assert mode in _MODES
        with self._changing:
            known = self._known
            held = {one.name: _prepare_vector(one, mode, known) for one in vectors}
            if len(held) != len(vectors):
                raise VectorError("two of the vectors have one name; names are unique: rename one")
            self._swap_vectors({**known.vectors, **held}, changed=frozenset(held))

    def remove(self, names: Iterable[str]) -> None:
        """All of them, or none and an error."""
        gone = frozenset(names)
        with self._changing:
            known = self._known
            missing = sorted(gone - known.vectors.keys())
            if missing:
                raise _unknown_vector(missing[0], known)
            kept = {name: held for name, held in known.vectors.items() if name not in gone}
            self._swap_vectors(kept, changed=gone)

    def vectors(self) -> tuple[Vector, ...]:
        """In order of names."""
        return tuple(held.vector for _, held in sorted(self._known.vectors.items()))

    def vector(self, name: str) -> Vector:
        known = self._known
        if name not in known.vectors:
            raise _unknown_vector(name, known)
        return known.vectors[name].vector

    @property
    def version(self) -> int:
        """Of the vectors, all together."""
        return self._known.version

    def state(self) -> VectorState:
        """What people are told."""
        known = self._known
        return VectorState(
            version=known.version,
            vectors=tuple(held.vector.listed() for _, held in sorted(known.vectors.items())),
            points=tuple(map(str, sorted(known.points))),
            width=known.width,
            rows=self.limits.rows,
            programs=self.limits.programs,
        )

    def set_probes(self, probes: Mapping[str, Probe]) -> None:
        """Those of the bank as it is now, by name, for gates; nobody changes them any more."""
        with self._changing:
            self._known = replace(self._known, probes=probes)

    def tiers(self) -> SteeringTiers:
        return self._known.tiers

    def set_tiers(
        self,
        *,
        base: Sequence[SteerEntry] | None = None,
        prefill: Sequence[SteerEntry] | None = None,
        decode: Sequence[SteerEntry] | None = None,
    ) -> None:
        """Those given are replaced, all or none. Requests that were admitted before keep what they
        were admitted with."""
        given = {"base": base, "prefill": prefill, "decode": decode}
        with self._changing:
            known = self._known
            changed: dict[str, Any] = {
                tier: tuple(_unpack_entry(entry, known) for entry in entries)
                for tier, entries in given.items()
                if entries is not None
            }
            tiers = replace(known.tiers, **changed, version=known.tiers.version + 1)
            _check_tiers(replace(known, tiers=tiers))
            self._known = replace(known, tiers=tiers)

    def resolve(self, entries: Iterable[SteerEntry], *, prompt_len: int) -> SteeringPlan | None:
        """What steers a request: global tiers first, then its own entries; None for nothing."""
        return resolve_plan(entries, self._known, prompt_len)

    def claim(self, plan: SteeringPlan) -> TableClaim:
        """Room in the engine's tables; VectorCapacityError where there is none."""
        return self._claims.claim(plan)

    def in_use(self) -> tuple[int, int]:
        """Rows and programs of unfinished requests."""
        return self._claims.in_use()

    @staticmethod
    def describe(plan: SteeringPlan) -> list[dict[str, Any]]:
        """What is applied, as JSON."""
        return describe_plan(plan)

    def _swap_vectors(self, vectors: dict[str, PreparedVector], *, changed: frozenset[str]) -> None:
        known, limits = self._known, self.limits
        nbytes = sum(4 * held.vector.width * len(held.rows) for held in vectors.values())
        if len(vectors) > limits.vectors or nbytes > limits.nbytes:
            raise VectorCapacityError(
                f"{len(vectors)} vectors of {nbytes} bytes together; an engine holds at most "
                f"{limits.vectors} of {limits.nbytes}: remove some first"
            )
        named = MappingProxyType(vectors)
        swapped = replace(known, vectors=named, version=known.version + 1)
        _check_tiers_still_resolve(swapped, changed)
        self._known = swapped


def _prepare_vector(vector: Vector, mode: Mode, known: SteeringSnapshot) -> PreparedVector:
    if mode == "add" and vector.name in known.vectors:
        raise VectorError(f"there is a vector named {vector.name}; replace it, or rename this one")
    if mode == "replace" and vector.name not in known.vectors:
        raise _unknown_vector(vector.name, known)
    return known.prepare(vector, what=f"vector {vector.name}")


def _unknown_vector(name: str, known: SteeringSnapshot) -> VectorError:
    return VectorError(f"no vector is named {quote(name)}; {suggest_names(name, known.vectors)}")


def _unpack_entry(entry: SteerEntry, known: SteeringSnapshot) -> SteerEntry:
    """A tier is used by every request: decode what came along once."""
    if not isinstance(entry.vector, PackedVector):
        return entry
    what = f"{entry.label}.vector"
    return replace(entry, vector=entry.vector.unpack(known.width, what=what))


def _check_tiers_still_resolve(known: SteeringSnapshot, changed: frozenset[str]) -> None:
    """A tier that could not be applied would refuse every request: refuse what breaks it."""
    for entry in known.tiers.entries():
        if not isinstance(entry.vector, str) or entry.vector not in changed:
            continue
        try:
            resolve_entry(entry, known)
        except ClairaiError as error:
            raise VectorError(
                f"a global tier uses {entry.vector}, and could not any more: {error.reason}; "
                "change the tier first"
            ) from None


def _check_tiers(known: SteeringSnapshot) -> None:
    entries = known.tiers.entries()
    if len(entries) > MAX_ENTRIES:
        raise RequestError(
            f"global tiers have {len(entries)} entries in all; give at most {MAX_ENTRIES}"
        )
    for tier, phases in _PHASES_OUTSIDE_TIER.items():
        for entry in getattr(known.tiers, tier):
            if entry.when.phase in phases:
                raise RequestError(
                    f"{entry.label}: {entry.when.phase} is no part of the {tier} tier, so it "
                    "would never act; put it into another tier"
                )
    for entry in entries:
        resolve_entry(entry, known)
