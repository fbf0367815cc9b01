"""Random steering plans, and a slow reference of how they steer each row.

D = model width. The reference steers one row at a time, in float64, straight from the plan: no
programs, no segments, no map. Rows, directions and biases are chosen so that every score is exact
in float32 and none equals a threshold, so a gate opens in both or in neither.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any, Literal

import msgspec
import numpy as np
from numpy.typing import NDArray

from clairai.engine.steer.steering_plan import PlanAction, PlanGate, PlanRow, SteeringPlan
from clairai.fields.ranges import OPEN_END, Range

WIDTH = 12
SITE_OF = {"pre_attn.0": "a", "post_block.0": "b", "pre_attn.1": "b", "post_block.1": "c"}
SITES = ("a", "b", "c")

Float = NDArray[np.float64]
State = dict[int, float]


def row(point: str, values_D: Sequence[float] | NDArray[Any]) -> PlanRow:
    values = np.asarray(values_D, "<f4").tobytes()
    return PlanRow(point, hashlib.sha256(values).hexdigest(), values)


def random_row(rng: np.random.Generator, point: str) -> PlanRow:
    values_D = rng.integers(-2, 3, WIDTH)
    values_D[rng.integers(WIDTH)] = 3  # never of length 0
    return row(point, values_D)


def random_plan(rng: np.random.Generator) -> SteeringPlan:
    actions: list[PlanAction] = []
    gates: list[PlanGate] = []
    for _ in range(rng.integers(1, 4)):
        points = sorted(rng.choice(4, rng.integers(1, 4), replace=False))
        names = [[*SITE_OF][index] for index in points]
        gate = None
        if rng.random() < 0.7:
            gate = len(gates)
            gates.append(random_gate(rng, [*SITE_OF][rng.integers(points[0] + 1)]))
        actions.append(random_action(rng, names, gate))
    return SteeringPlan(tuple(actions), tuple(gates))


def rich_plan(rng: np.random.Generator) -> SteeringPlan:
    """Many features in few rows: three stateful gates, skipped special tokens, and segments."""
    names = [*SITE_OF]
    gates = tuple(random_gate(rng, names[index], stateful=True) for index in (0, 0, 1))
    ranges: tuple[tuple[Range, ...], ...] = (((1, OPEN_END),), ((0, 3), (4, OPEN_END)))
    points = (names[::2], names[1::2], names[2:], names[::3])
    actions = [random_action(rng, names, None) for names in points]
    return SteeringPlan(
        tuple(
            msgspec.structs.replace(
                action,
                gate=index if index < len(gates) else None,
                ranges=ranges[index % 2],
                skips_special=index > 0,
            )
            for index, action in enumerate(actions)
        ),
        gates,
    )


def courses_of_one_program() -> tuple[SteeringPlan, SteeringPlan]:
    """Both have a segment with the same lone action; its gate is the first of one plan only.

    The other's first gate remembers, at the same site: the shared program must not touch that.
    """
    along, part = row("pre_attn.0", np.ones(WIDTH)), (row("pre_attn.0", np.arange(WIDTH)),)
    always: tuple[Range, ...] = ((0, OPEN_END),)
    is_open = PlanGate("toy", along, 0.0, "none", threshold=-1000.0)
    is_closed = PlanGate("toy", along, 0.0, "none", threshold=1000.0, latch=True)
    alone = SteeringPlan((PlanAction("toy", "", "add", part, 1.0, always, gate=0),), (is_open,))
    latched = PlanAction("toy", "", "add", part, 9.0, ((0, 1), (5, OPEN_END)), gate=0)
    beside = PlanAction("toy", "", "add", part, 1.0, always, gate=1)
    return alone, SteeringPlan((latched, beside), (is_closed, is_open))


def random_action(rng: np.random.Generator, points: list[str], gate: int | None) -> PlanAction:
    ops: tuple[Literal["add", "ablate", "clamp", "replace"], ...]
    ops = ("add", "ablate", "clamp", "replace")
    op = ops[rng.integers(4)]
    bounds = [(-0.4, 0.7), (None, 0.1), (0.3, None)][rng.integers(3)] if op == "clamp" else ()
    low, high = bounds or (None, None)
    return PlanAction(
        "toy", "", op, tuple(random_row(rng, point) for point in points),
        scale=float(rng.choice([-1.0, 0.5, 1.0, 3.0])),
        ranges=random_ranges(rng),
        is_matched=op == "add" and bool(rng.random() < 0.4),
        low=low, high=high, gate=gate, skips_special=bool(rng.random() < 0.4),
    )  # fmt: skip


def random_ranges(rng: np.random.Generator) -> tuple[Range, ...]:
    edges = sorted(rng.choice(20, 2 * rng.integers(1, 3), replace=False).tolist())
    if rng.random() < 0.5:
        edges[-1] = OPEN_END
    return tuple(zip(edges[::2], edges[1::2], strict=True))


def random_gate(rng: np.random.Generator, point: str, *, stateful: bool = False) -> PlanGate:
    kind = rng.choice(3, p=[0.2, 0.3, 0.5])  # hard, soft, held
    is_latched = rng.random() < 0.4 or (stateful and kind != 2)
    activations: tuple[Literal["none", "relu", "sigmoid"], ...] = ("none", "relu", "sigmoid")
    activation = activations[rng.integers(3)]
    threshold = 0.7 if activation == "sigmoid" else float(rng.integers(-1, 4)) + 0.5
    lower = 0.2 if activation == "sigmoid" else threshold - 3
    return PlanGate(
        "toy", random_row(rng, point), bias=0.25, activation=activation, threshold=threshold,
        sharpness=0.2 if kind == 1 else None,
        release=lower if kind == 2 else None,
        latch=bool(is_latched),
    )  # fmt: skip


def steered(
    plan: SteeringPlan, position: int, is_special: bool, rows: dict[str, Float], state: State
) -> dict[str, Float | None]:
    """The expected row of each site; None where it must not be touched."""
    acting = [
        action
        for action in plan.actions
        if any(start <= position < end for start, end in action.ranges)
        and not (action.skips_special and is_special)
    ]
    gates: dict[int, float] = {}
    found: dict[str, Float | None] = {}
    for site in SITES:
        for index in [action.gate for action in acting if action.gate is not None]:
            if SITE_OF[plan.gates[index].row.point] == site:
                gates[index] = _gate(plan.gates[index], rows[site], index, state)
        stream_D, is_changed = rows[site], False
        for action in acting:
            strength = action.scale * (1 if action.gate is None else gates.get(action.gate, np.nan))
            for part in [part for part in action.rows if SITE_OF[part.point] == site]:
                keep, factor = _change(action, stream_D, part.read().astype(float), strength)
                is_changed |= keep != 1 or factor != 0
                stream_D = keep * stream_D + factor * part.read()
        found[site] = stream_D if is_changed else None
    return found


def _gate(gate: PlanGate, row_D: Float, index: int, state: State) -> float:
    score = float(row_D @ gate.row.read()) + gate.bias
    score = {"none": score, "relu": max(score, 0), "sigmoid": 1 / (1 + np.exp(-score))}[
        gate.activation
    ]
    before = state.get(index, 0.0)
    if gate.sharpness is not None:
        opened = 1 / (1 + np.exp(-gate.sharpness * (score - gate.threshold)))
    elif score >= gate.threshold:
        opened = 1.0
    elif gate.release is not None and score >= gate.release:
        opened = before
    else:
        opened = 0.0
    state[index] = max(opened, before) if gate.latch else opened
    return state[index]


def _change(
    action: PlanAction, stream_D: Float, vector_D: Float, strength: float
) -> tuple[float, float]:
    """(1 + c_s) and c_v of s' = (1 + c_s) * s + c_v * v."""
    length = float(np.sqrt(vector_D @ vector_D))
    along = float(stream_D @ vector_D) / length
    if action.op == "replace":
        return 1 - strength, strength
    if action.op == "ablate":
        return 1, -strength * along / length
    if action.op == "clamp":
        low = -np.inf if action.low is None else action.low
        high = np.inf if action.high is None else action.high
        return 1, strength * (min(max(along, low), high) - along) / length
    return 1, strength * float(np.linalg.norm(stream_D)) / length if action.is_matched else strength
