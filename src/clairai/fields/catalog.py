"""What requests can name in an engine, and every check of steering and rules that needs only that.

Runs in: the API server, which refuses with a reason before vLLM sees a request, and the engine
core, which decides. The API server knows all of a vector or probe but its numbers.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Final, Protocol, TypeVar

from clairai.errors import PointError, RequestError
from clairai.fields.json_fields import suggest_names
from clairai.fields.row_growth import WIDE_ROWS, Operation, RowGrowth, RowLimits
from clairai.fields.rules import StopRule
from clairai.fields.steer import GateSpec, SteerEntry
from clairai.points import POINT_KINDS, Point
from clairai.probe.bank import join_names

PLACES_PER_LAYER: Final = len(POINT_KINDS) - 1  # the last point is the next layer's first
_MAX_LISTED: Final = 8
Named = TypeVar("Named")


@dataclass(frozen=True)
class KnownVector:
    """A vector without its numbers."""

    digest: str | None  # None: not computed here
    lengths: Mapping[Point, float | None]  # of its rows; None: only the core reads the row

    @cached_property
    def point_names(self) -> list[str]:
        return [*map(str, self.lengths)]


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
    row_limits: RowLimits = WIDE_ROWS  # the core knows the model's dtype, which may allow less

    def check_entry(self, entry: SteerEntry, vector: KnownVector) -> float | None:
        """Raise what is wrong with an entry for every prompt; `vector` is the one it names.

        The threshold of its gate, if it has one.
        """
        _check_digest(entry, vector)
        lengths = choose_lengths(entry, vector)
        entry_growth(entry, lengths).check(self.row_limits, what=entry.label)
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
        _check_gate_order(entry, probe.point, lengths)
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


def choose_lengths(entry: SteerEntry, vector: KnownVector) -> Mapping[Point, float | None]:
    """The lengths of the rows that the entry uses."""
    points = entry.points
    if points is None:
        return vector.lengths
    missing = next((point for point in points if point not in vector.lengths), None)
    if missing is not None:
        names = vector.point_names
        more = " ..." if len(names) > _MAX_LISTED else ""
        raise PointError(
            f"{entry.label}.points: the vector has no row for {missing}; "
            f"it has {', '.join(names[:_MAX_LISTED])}{more}"
        )
    return {point: vector.lengths[point] for point in points}


def entry_growth(entry: SteerEntry, lengths: Mapping[Point, float | None]) -> RowGrowth:
    """How long the entry can make a row, as far as the lengths of its own rows are known."""
    operation = Operation(entry.op, entry.scale, entry.match_norm, entry.low, entry.high)
    growth = RowGrowth()
    for length in lengths.values():
        if length is not None:
            growth = growth.then(operation.growth(length))
    return growth


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
