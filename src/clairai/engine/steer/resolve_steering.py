"""Takes entries and what is known; gives the course of one request, or says what cannot be done."""


# A = actions, S = segments, P = places on the residual's path

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Final

import msgspec
import numpy as np

from clairai.engine.steer.snapshot import PreparedRow, PreparedVector, SteeringSnapshot
from clairai.engine.steer.steering_plan import (
    MAX_ACTIONS,
    MAX_GATES,
    MAX_OPS,
    MAX_SEGMENTS,
    PlanAction,
    PlanGate,
    PlanRow,
    SteeringPlan,
    split_segments,
)
from clairai.errors import PointError, RequestError
from clairai.fields.json_fields import LARGEST
from clairai.fields.packed_vector import PackedVector
from clairai.fields.ranges import EVERYWHERE, OPEN_END, Range
from clairai.fields.steer import GateSpec, SteerEntry
from clairai.points import POINT_KINDS, Point
from clairai.vector.model import Vector, digest_row

MIN_ROW_LENGTH: Final = 1e-15  # of a row whose length is divided by, in float32
MAX_ROW_LENGTH: Final = 1e15

_PLACES_PER_LAYER: Final = (
    len(POINT_KINDS) - 1
)  # places of a block that are not the next block's first


@dataclass(frozen=True)
class ResolvedEntry:
    """One entry with everything looked up; its positions wait for the prompt."""

    entry: SteerEntry
    action: PlanAction  # without ranges
    gate: PlanGate | None

    @property
    def acts(self) -> bool:
        return self.action.scale != 0


def path_order(point: Point) -> int:
    """Its order on the path; post_block of one layer is the place of the next one's pre_attn."""
    return point.layer * _PLACES_PER_LAYER + POINT_KINDS.index(point.kind)


def resolve_entry(entry: SteerEntry, known: SteeringSnapshot) -> ResolvedEntry:
    """Everything that can be wrong with an entry, whatever the prompt, is raised here."""
    held = _find_vector(entry, known)
    rows = _choose_rows(entry, held)
    _check_rows(entry, rows)
    if entry.when.skip_special and not known.engine.can_skip_special:
        raise RequestError(
            f"{entry.label}: skip_special needs a tokenizer, and this engine has none; leave it out"
        )
    gate = None if entry.gate is None else _resolve_gate(entry, entry.gate, known)
    if gate is not None:
        _check_gate_order(
            entry, Point.parse(gate.row.point), (Point.parse(r.row.point) for r in rows)
        )
    action = PlanAction(
        vector=entry.vector if isinstance(entry.vector, str) else "",
        digest=held.vector.digest,
        op=entry.op,
        rows=tuple(one.row for one in rows),
        scale=entry.scale,
        ranges=(),
        is_matched=entry.match_norm,
        low=entry.low,
        high=entry.high,
        skips_special=entry.when.skip_special,
    )
    return ResolvedEntry(entry, action, gate)


def resolve_plan(
    entries: Iterable[SteerEntry], known: SteeringSnapshot, prompt_len: int
) -> SteeringPlan | None:
    """Tiers first, then the request's own; None where nothing acts."""
    own = [*entries]
    if not own and not known.tiers.entries():
        return None
    if prompt_len < 1:
        raise RequestError("a prompt without token ids cannot be steered; give it as text or ids")
    found = [*_resolve_tiers(known, prompt_len)]
    for entry in own:
        part, ranges = resolve_entry(entry, known), entry.when.ranges(prompt_len)
        if not ranges:
            raise RequestError(
                f"{entry.label}: its positions hold none of this prompt's {prompt_len} tokens, so "
                "it would not act; mend them, or leave the entry out"
            )
        found.append((part, ranges))
    acting = [(part, ranges) for part, ranges in found if part.acts and ranges]
    return _make_plan(acting) if acting else None


def tier_bounds(prompt_len: int) -> dict[str, Range]:
    return {"base": EVERYWHERE, "prefill": (0, prompt_len), "decode": (prompt_len, OPEN_END)}


def _resolve_tiers(
    known: SteeringSnapshot, prompt_len: int
) -> Iterator[tuple[ResolvedEntry, tuple[Range, ...]]]:
    for tier, bounds in tier_bounds(prompt_len).items():
        for entry in getattr(known.tiers, tier):
            yield resolve_entry(entry, known), entry.when.ranges(prompt_len, within=bounds)


def _find_vector(entry: SteerEntry, known: SteeringSnapshot) -> PreparedVector:
    vector = entry.vector
    if isinstance(vector, PackedVector):
        vector = vector.unpack(known.engine.width, what=f"{entry.label}.vector")
    if isinstance(vector, Vector):
        held = known.engine.hold(vector, what=f"{entry.label}.vector")
    else:
        held = known.vector(vector, what=entry.label)
    if entry.digest is not None and entry.digest != held.vector.digest:
        raise RequestError(
            f"{entry.label}: the vector has digest {held.vector.digest}, not {entry.digest}; it "
            "was changed: look at it again, or leave digest out"
        )
    return held


def _choose_rows(entry: SteerEntry, held: PreparedVector) -> list[PreparedRow]:
    if entry.points is None:
        return [*held.rows.values()]
    missing = [str(point) for point in entry.points if point not in held.rows]
    if missing:
        raise PointError(
            f"{entry.label}.points: the vector has no row for {missing[0]}; "
            f"it has {', '.join(map(str, [*held.rows][:8]))}{' ...' if len(held.rows) > 8 else ''}"
        )
    return [held.rows[point] for point in entry.points]


def _check_rows(entry: SteerEntry, rows: Iterable[PreparedRow]) -> None:
    is_divided = entry.match_norm or entry.op in ("ablate", "clamp")
    for one in rows:
        if is_divided and not MIN_ROW_LENGTH <= one.length <= MAX_ROW_LENGTH:
            raise RequestError(
                f"{entry.label}: the row at {one.row.point} has length {one.length:.3g}, which "
                f"{'match_norm' if entry.match_norm else entry.op} divides by; "
                f"scale the vector to a length of {MIN_ROW_LENGTH:g} to {MAX_ROW_LENGTH:g}"
            )
        if not is_divided and abs(entry.scale) * one.peak > LARGEST:
            raise RequestError(
                f"{entry.label}: scale {entry.scale:.3g} times the row at {one.row.point} is "
                "beyond float32; use a smaller scale"
            )


def _resolve_gate(entry: SteerEntry, spec: GateSpec, known: SteeringSnapshot) -> PlanGate:
    what = f"{entry.label}.gate"
    probe = known.probe(spec.probe, what=what)
    known.engine.check_tapped(f"{what}: probe {probe.name}", [probe.point])
    threshold = probe.threshold if spec.threshold is None else spec.threshold
    if threshold is None:
        raise RequestError(f"{what}: probe {probe.name} has no threshold of its own; give one")
    if spec.release is not None and spec.release > threshold:
        raise RequestError(
            f"{what}: release is {spec.release} and the threshold {threshold}; "
            "release must not be above it"
        )
    direction_D = probe.direction_D
    return PlanGate(
        probe=probe.name,
        row=PlanRow(str(probe.point), digest_row(direction_D), direction_D.tobytes()),
        bias=probe.bias,
        activation=probe.activation,
        threshold=threshold,
        sharpness=spec.sharpness,
        release=spec.release,
        latch=spec.latch,
    )


def _check_gate_order(entry: SteerEntry, gate: Point, points: Iterable[Point]) -> None:
    earlier = next((point for point in points if path_order(point) < path_order(gate)), None)
    if earlier is not None:
        raise PointError(
            f"{entry.label}.gate reads {gate}, which comes after {earlier}, where the vector acts; "
            "use a probe of the same point or an earlier one, or steer at later `points`"
        )


def _make_plan(acting: list[tuple[ResolvedEntry, tuple[Range, ...]]]) -> SteeringPlan:
    gates = [part.gate for part, _ in acting if part.gate is not None]
    if len(acting) > MAX_ACTIONS or len(gates) > MAX_GATES:
        raise RequestError(
            f"{len(acting)} entries with {len(gates)} gates, those of global tiers included; "
            f"give at most {MAX_ACTIONS} with {MAX_GATES}"
        )
    numbers = iter(range(len(gates)))
    actions = tuple(
        msgspec.structs.replace(
            part.action, ranges=ranges, gate=None if part.gate is None else next(numbers)
        )
        for part, ranges in acting
    )
    plan = SteeringPlan(actions, tuple(gates))
    _check_ops_per_row(plan)
    return plan


def _check_ops_per_row(plan: SteeringPlan) -> None:
    """How many ops a row meets at a place, a gate's reading of it included."""
    stretches = split_segments(plan)
    if len(stretches) > MAX_SEGMENTS:
        raise RequestError(
            f"positions cut the request into {len(stretches)} stretches, each steered otherwise; "
            f"give fewer positions: at most {MAX_SEGMENTS} stretches"
        )
    places = [[*_places_of(plan, action)] for action in plan.actions]
    ops_AP = np.zeros((len(places), 1 + max(map(max, places))), np.int64)
    for index, one in enumerate(places):
        np.add.at(ops_AP[index], one, 1)
    active_SA = np.zeros((len(stretches), len(places)), np.int64)
    for index, (_, _, active) in enumerate(stretches):
        active_SA[index, list(active)] = 1
    crowded_P = (active_SA @ ops_AP).max(axis=0)
    if crowded_P.max() > MAX_OPS:
        layer, kind = divmod(int(crowded_P.argmax()), _PLACES_PER_LAYER)
        raise RequestError(
            f"{crowded_P.max()} operations act on one row at {POINT_KINDS[kind]}.{layer}, "
            f"gates and global tiers included; give at most {MAX_OPS}"
        )


def _places_of(plan: SteeringPlan, action: PlanAction) -> Iterator[int]:
    yield from (path_order(Point.parse(row.point)) for row in action.rows)
    if action.gate is not None:
        yield path_order(Point.parse(plan.gates[action.gate].row.point))


# MERGED
# Takes two courses and a position; gives the first before it, and the second from it on.
#
# A request that runs is steered otherwise from a position that has not been computed yet. What
# came
# before keeps its ranges: a request that is preempted goes over it again.


def amend_plan(
    old: SteeringPlan | None, new: SteeringPlan | None, position: int
) -> SteeringPlan | None:
    """None if nothing acts, before or after; RequestError if there is no room for both."""
    actions: list[PlanAction] = []
    gates: list[PlanGate] = []
    for plan, window in ((old, (0, position)), (new, (position, OPEN_END))):
        for action in _clip_actions(plan, window):
            gate = None
            if plan is not None and action.gate is not None:
                gate = len(gates)
                gates.append(plan.gates[action.gate])
            actions.append(msgspec.structs.replace(action, gate=gate))
    if not actions:
        return None
    made = SteeringPlan(tuple(actions), tuple(gates))
    _check_room(made)
    return made


def check_entries_act(entries: Iterable[SteerEntry], prompt_len: int, position: int) -> None:
    """RequestError for an entry that acts on nothing from this position on."""
    for entry in entries:
        if not entry.when.ranges(prompt_len, within=(position, OPEN_END)):
            raise RequestError(
                f"{entry.label}: its positions lie before {position}, where the change begins, so "
                "it would not act; steer generation, or leave the entry out"
            )


def _clip_actions(plan: SteeringPlan | None, window: Range) -> Iterator[PlanAction]:
    for action in () if plan is None else plan.actions:
        clipped = ((max(a, window[0]), min(b, window[1])) for a, b in action.ranges)
        ranges = tuple((a, b) for a, b in clipped if a < b)
        if ranges:
            yield msgspec.structs.replace(action, ranges=ranges)


def _check_room(plan: SteeringPlan) -> None:
    counts = {
        "actions": (len(plan.actions), MAX_ACTIONS),
        "gates": (len(plan.gates), MAX_GATES),
        "stretches": (len(split_segments(plan)), MAX_SEGMENTS),
    }
    for what, (count, most) in counts.items():
        if count > most:
            raise RequestError(
                f"this request has been steered otherwise before: it would have {count} {what} "
                f"in all, at most {most}; start a new request"
            )
