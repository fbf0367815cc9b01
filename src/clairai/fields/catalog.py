"""What requests can name in an engine, and every check of steering and rules that needs only that.

Runs in: the API server, which refuses with a reason before vLLM sees a request, and the engine
core, which decides. The API server knows all of a vector or probe but its numbers.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Final, NamedTuple, Protocol, TypeVar

from clairai.errors import PointError, RequestError
from clairai.fields.json_fields import LARGEST, suggest_names
from clairai.fields.rules import StopRule
from clairai.fields.steer import GateSpec, SteerEntry
from clairai.points import POINT_KINDS, Point
from clairai.probe.bank import join_names

MIN_ROW_LENGTH: Final = 1e-15  # of a row whose length is divided by, in float32
MAX_ROW_LENGTH: Final = 1e15
PLACES_PER_LAYER: Final = len(POINT_KINDS) - 1  # the last point is the next layer's first
_MAX_LISTED: Final = 8
Named = TypeVar("Named")


class RowSize(NamedTuple):
    """What decides whether an operation can use a row of a vector."""

    length: float
    peak: float | None = None  # the largest absolute number; None: not known here


@dataclass(frozen=True)
class KnownVector:
    """A vector without its numbers."""

    digest: str | None  # None: not computed here
    sizes: Mapping[Point, RowSize | None]  # by point; None: only the core reads the row

    @cached_property
    def point_names(self) -> list[str]:
        return [*map(str, self.sizes)]


class KnownProbe(Protocol):
    """A probe without its numbers."""

    @property
    def name(self) -> str: ...
    @property
    def point(self) -> Point: ...
    @property
    def threshold(self) -> float | None: ...


@dataclass(frozen=True)
class Catalog:
    """Everything a request can name, at one moment."""

    points: frozenset[Point] = frozenset()  # that can be steered
    vectors: Mapping[str, KnownVector] = field(default_factory=dict)
    probes: Mapping[str, KnownProbe] = field(default_factory=dict)
    can_skip_special: bool = True

    def check_entry(self, entry: SteerEntry, vector: KnownVector) -> float | None:
        """Raise what is wrong with an entry for every prompt; `vector` is the one it names.

        The threshold of its gate, if it has one.
        """
        _check_digest(entry, vector)
        sizes = vector.sizes if entry.points is None else _choose_rows(entry, vector, entry.points)
        _check_sizes(entry, sizes)
        if entry.when.skip_special and not self.can_skip_special:
            raise RequestError(
                f"{entry.label}: skip_special needs a tokenizer, and this engine has none; "
                "leave it out"
            )
        if entry.gate is None:
            return None
        what = f"{entry.label}.gate"
        probe = find_probe(self.probes, entry.gate.probe, what=what)
        self.check_tapped(f"{what}: probe {probe.name}", [probe.point])
        threshold = _gate_threshold(entry.gate, probe, what)
        _check_gate_order(entry, probe.point, sizes)
        return threshold

    def check_tapped(self, what: str, points: Iterable[Point]) -> None:
        missing = [str(point) for point in points if point not in self.points]
        if missing:
            raise PointError(
                f"{what} is for {join_names(missing)}, not tapped here; tapped are "
                f"{join_names(map(str, sorted(self.points)))}: use those, or add to `points`"
            )


def find_vector(vectors: Mapping[str, Named], name: str, *, what: str) -> Named:
    if name not in vectors:
        raise RequestError(f"{what}: no vector is named {name!r}; {suggest_names(name, vectors)}")
    return vectors[name]


def find_probe(probes: Mapping[str, Named], name: str, *, what: str) -> Named:
    if name not in probes:
        raise RequestError(f"{what}: no probe is named {name!r}; {suggest_names(name, probes)}")
    return probes[name]


def rule_threshold(rule: StopRule, probes: Mapping[str, KnownProbe], *, what: str) -> float:
    """What the score of a rule's probe is compared with."""
    return _threshold(rule.threshold, find_probe(probes, rule.probe, what=what), what)


def path_order(point: Point) -> int:
    """Where the point is on the residual stream's path.

    post_block of one layer is the same place as pre_attn of the next.
    """
    return point.layer * PLACES_PER_LAYER + POINT_KINDS.index(point.kind)


def _check_digest(entry: SteerEntry, vector: KnownVector) -> None:
    if entry.digest is None or vector.digest is None or entry.digest == vector.digest:
        return
    raise RequestError(
        f"{entry.label}: the vector has digest {vector.digest}, not {entry.digest}; it was "
        "changed: look at it again, or leave digest out"
    )


def _choose_rows(
    entry: SteerEntry, vector: KnownVector, points: Iterable[Point]
) -> dict[Point, RowSize | None]:
    missing = next((point for point in points if point not in vector.sizes), None)
    if missing is not None:
        names = vector.point_names
        more = " ..." if len(names) > _MAX_LISTED else ""
        raise PointError(
            f"{entry.label}.points: the vector has no row for {missing}; "
            f"it has {', '.join(names[:_MAX_LISTED])}{more}"
        )
    return {point: vector.sizes[point] for point in points}


def _check_sizes(entry: SteerEntry, sizes: Mapping[Point, RowSize | None]) -> None:
    is_divided = entry.match_norm or entry.op in ("ablate", "clamp")
    for point, size in sizes.items():
        if size is None:
            continue
        if is_divided and not MIN_ROW_LENGTH <= size.length <= MAX_ROW_LENGTH:
            raise RequestError(
                f"{entry.label}: the row at {point} has length {size.length:.3g}, which "
                f"{'match_norm' if entry.match_norm else entry.op} divides by; "
                f"scale the vector to a length of {MIN_ROW_LENGTH:g} to {MAX_ROW_LENGTH:g}"
            )
        if not is_divided and abs(entry.scale) * (size.peak or 0.0) > LARGEST:
            raise RequestError(
                f"{entry.label}: scale {entry.scale:.3g} times the row at {point} is "
                "beyond float32; use a smaller scale"
            )


def _gate_threshold(gate: GateSpec, probe: KnownProbe, what: str) -> float:
    threshold = _threshold(gate.threshold, probe, what)
    if gate.release is not None and gate.release > threshold:
        raise RequestError(
            f"{what}: release is {gate.release} and the threshold {threshold}; "
            "release must not be above it"
        )
    return threshold


def _threshold(given: float | None, probe: KnownProbe, what: str) -> float:
    threshold = probe.threshold if given is None else given
    if threshold is None:
        raise RequestError(f"{what}: probe {probe.name} has no threshold of its own; give one")
    return threshold


def _check_gate_order(entry: SteerEntry, gate: Point, points: Iterable[Point]) -> None:
    earlier = next((point for point in points if path_order(point) < path_order(gate)), None)
    if earlier is not None:
        raise PointError(
            f"{entry.label}.gate reads {gate}, which comes after {earlier}, where the vector acts; "
            "use a probe of the same point or an earlier one, or steer at later `points`"
        )
