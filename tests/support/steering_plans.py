"""Small valid steering plans and registries for tests, with only given parts changed."""

from __future__ import annotations

from typing import Any

from clairai.engine.steer.steering_plan import PlanAction, PlanGate, PlanRow, SteeringPlan
from clairai.engine.steer.steering_registry import SteeringLimits, SteeringRegistry
from clairai.fields.ranges import Range
from clairai.fields.steer import SteerEntry, parse_entries
from clairai.points import Point
from clairai.probe.model import Probe
from clairai.vector.model import Vector
from tests.support.probes import numbers

WIDTH = 3
NAMES = [f"{kind}.{layer}" for layer in range(4) for kind in ("pre_attn", "post_attn")]
POINTS = tuple(map(Point.parse, [*NAMES, "post_block.3"]))


def row(point: str = "post_block.3", digest: str = "0") -> PlanRow:
    return PlanRow(point, digest, b"\0" * 12)


def action(*ranges: Range, **changes: Any) -> PlanAction:
    fields: dict[str, Any] = {
        "vector": "v",
        "digest": "d",
        "op": "add",
        "rows": (row(),),
        "scale": 1.0,
        "ranges": ranges,
    }
    return PlanAction(**(fields | changes))


def gate(**changes: Any) -> PlanGate:
    fields: dict[str, Any] = {
        "probe": "p",
        "row": row("pre_attn.0", "g"),
        "bias": 0.0,
        "activation": "none",
        "threshold": 0.5,
    }
    return PlanGate(**(fields | changes))


def plan(*actions: PlanAction, gates: tuple[PlanGate, ...] = ()) -> SteeringPlan:
    return SteeringPlan(actions, gates)


def vector(name: str = "joy", *points: str, values: tuple[float, ...] = (1, 2, -2)) -> Vector:
    names = points or ("pre_attn.1", "post_attn.2")
    return Vector(name, {Point.parse(point): numbers(*values) for point in names})


def probe(name: str = "sad", point: str = "pre_attn.1", **changes: Any) -> Probe:
    fields: dict[str, Any] = {
        "name": name,
        "point": Point.parse(point),
        "direction_D": numbers(1, 0, -1),
        "threshold": 0.5,
    }
    return Probe(**(fields | changes))


def registry(
    *vectors: Vector, limits: SteeringLimits | None = None, **changes: Any
) -> SteeringRegistry:
    made = SteeringRegistry(
        POINTS, WIDTH, limits or SteeringLimits(rows=100, programs=100), **changes
    )
    made.put(vectors or [vector()])
    probes = [probe(), probe("late", "post_attn.3"), probe("bare", threshold=None)]
    made.set_probes({one.name: one for one in probes})
    return made


def entries(*given: Any, what: str = "steer") -> tuple[SteerEntry, ...]:
    return parse_entries(list(given), what=what)
