"""Takes vectors, probes and tiers, each by name; gives requests their courses. One for each engine.

Requests come on one thread and changes on another: what is known is replaced whole, never changed,
and a request is resolved from what was known at one moment.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType
from typing import Any, Final, Literal, get_args

from clairai.errors import ClairaiError, RequestError, VectorCapacityError, VectorError
from clairai.points import Point, quote
from clairai.probe.model import Probe
from clairai.steer.applied import describe
from clairai.steer.claims import Claim as Claim
from clairai.steer.claims import Claims
from clairai.steer.claims import Limits as Limits
from clairai.steer.course import Course
from clairai.steer.fields import close_to
from clairai.steer.known import Engine, Held, Known, Tiers
from clairai.steer.packed import Packed
from clairai.steer.resolve import look_up, resolve
from clairai.steer.spec import MAX_ENTRIES, Entry
from clairai.steer.vector import Vector
from clairai.wire_steer import VectorState

Mode = Literal["add", "replace", "put"]
_MODES: Final[tuple[Mode, ...]] = get_args(Mode)
# Phases that hold no token of a tier.
_IDLE: Final = {"prefill": ("generation",), "decode": ("prompt", "last_prompt")}


class Registry:
    """What names mean. No I/O; every method may be called from any thread."""

    def __init__(
        self,
        points: Iterable[Point],
        width: int,
        limits: Limits,
        *,
        model: str | None = None,
        can_skip_special: bool = True,
    ) -> None:
        self.limits = limits
        self._known = Known(Engine(frozenset(points), width, model, can_skip_special))
        self._changing = threading.Lock()
        self._claims = Claims(limits)

    def put(self, vectors: Sequence[Vector], mode: Mode = "put") -> None:
        """All of them, or none and an error; `add` refuses a name that is taken, `replace` one
        that is not. Running requests keep what they were admitted with."""
        assert mode in _MODES
        with self._changing:
            known = self._known
            held = {one.name: _checked(one, mode, known) for one in vectors}
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
                raise _unknown(missing[0], known)
            kept = {name: held for name, held in known.vectors.items() if name not in gone}
            self._swap_vectors(kept, changed=gone)

    def vectors(self) -> tuple[Vector, ...]:
        """In order of names."""
        return tuple(held.vector for _, held in sorted(self._known.vectors.items()))

    def vector(self, name: str) -> Vector:
        known = self._known
        if name not in known.vectors:
            raise _unknown(name, known)
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
            points=tuple(map(str, sorted(known.engine.points))),
            width=known.engine.width,
            rows=self.limits.rows,
            programs=self.limits.programs,
        )

    def set_probes(self, probes: Mapping[str, Probe]) -> None:
        """Those of the bank as it is now, by name, for gates; nobody changes them any more."""
        with self._changing:
            self._known = replace(self._known, probes=probes)

    def tiers(self) -> Tiers:
        return self._known.tiers

    def set_tiers(
        self,
        *,
        base: Sequence[Entry] | None = None,
        prefill: Sequence[Entry] | None = None,
        decode: Sequence[Entry] | None = None,
    ) -> None:
        """Those given are replaced, all or none. Requests that were admitted before keep what they
        were admitted with."""
        given = {"base": base, "prefill": prefill, "decode": decode}
        with self._changing:
            known = self._known
            changed: dict[str, Any] = {
                tier: tuple(_unpacked(entry, known) for entry in entries)
                for tier, entries in given.items()
                if entries is not None
            }
            tiers = replace(known.tiers, **changed, version=known.tiers.version + 1)
            _check_tiers(replace(known, tiers=tiers))
            self._known = replace(known, tiers=tiers)

    def resolve(self, entries: Iterable[Entry], *, prompt_len: int) -> Course | None:
        """What steers a request: global tiers first, then its own entries; None for nothing."""
        return resolve(entries, self._known, prompt_len)

    def claim(self, course: Course) -> Claim:
        """Room in the engine's tables; VectorCapacityError where there is none."""
        return self._claims.claim(course)

    def in_use(self) -> tuple[int, int]:
        """Rows and programs of unfinished requests."""
        return self._claims.in_use()

    @staticmethod
    def describe(course: Course) -> list[dict[str, Any]]:
        """What is applied, as JSON."""
        return describe(course)

    def _swap_vectors(self, vectors: dict[str, Held], *, changed: frozenset[str]) -> None:
        known, limits = self._known, self.limits
        nbytes = sum(4 * held.vector.width * len(held.rows) for held in vectors.values())
        if len(vectors) > limits.vectors or nbytes > limits.nbytes:
            raise VectorCapacityError(
                f"{len(vectors)} vectors of {nbytes} bytes together; an engine holds at most "
                f"{limits.vectors} of {limits.nbytes}: remove some first"
            )
        named = MappingProxyType(vectors)
        swapped = replace(known, vectors=named, version=known.version + 1)
        _check_use(swapped, changed)
        self._known = swapped


def _checked(vector: Vector, mode: Mode, known: Known) -> Held:
    if mode == "add" and vector.name in known.vectors:
        raise VectorError(f"there is a vector named {vector.name}; replace it, or rename this one")
    if mode == "replace" and vector.name not in known.vectors:
        raise _unknown(vector.name, known)
    return known.engine.hold(vector, what=f"vector {vector.name}")


def _unknown(name: str, known: Known) -> VectorError:
    return VectorError(f"no vector is named {quote(name)}; {close_to(name, known.vectors)}")


def _unpacked(entry: Entry, known: Known) -> Entry:
    """A tier is used by every request: decode what came along once."""
    if not isinstance(entry.vector, Packed):
        return entry
    what = f"{entry.label}.vector"
    return replace(entry, vector=entry.vector.unpack(known.engine.width, what=what))


def _check_use(known: Known, changed: frozenset[str]) -> None:
    """A tier that could not be applied would refuse every request: refuse what breaks it."""
    for entry in known.tiers.entries():
        if not isinstance(entry.vector, str) or entry.vector not in changed:
            continue
        try:
            look_up(entry, known)
        except ClairaiError as error:
            raise VectorError(
                f"a global tier uses {entry.vector}, and could not any more: {error.reason}; "
                "change the tier first"
            ) from None


def _check_tiers(known: Known) -> None:
    entries = known.tiers.entries()
    if len(entries) > MAX_ENTRIES:
        raise RequestError(
            f"global tiers have {len(entries)} entries in all; give at most {MAX_ENTRIES}"
        )
    for tier, phases in _IDLE.items():
        for entry in getattr(known.tiers, tier):
            if entry.when.phase in phases:
                raise RequestError(
                    f"{entry.label}: {entry.when.phase} is no part of the {tier} tier, so it "
                    "would never act; put it into another tier"
                )
    for entry in entries:
        look_up(entry, known)
