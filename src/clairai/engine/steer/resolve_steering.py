"""Takes entries and what is known; gives the course of one request, or says what cannot be done."""


# A = actions, S = segments, P = places on the residual's path

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import msgspec
import numpy as np

from clairai.engine.steer.snapshot import PreparedVector, SteeringSnapshot
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
from clairai.errors import RequestError
from clairai.fields.catalog import PLACES_PER_LAYER, find_vector, path_order
from clairai.fields.packed_vector import PackedVector
from clairai.fields.ranges import EVERYWHERE, OPEN_END, Range
from clairai.fields.steer import GateSpec, SteerEntry
from clairai.points import POINT_KINDS, Point
from clairai.probe.model import Probe
from clairai.vector.model import digest_row


@dataclass(frozen=True)
class ResolvedEntry:
    """One entry with everything looked up; its positions wait for the prompt."""

    entry: SteerEntry
    action: PlanAction  # without ranges
    gate: PlanGate | None

    @property
    def acts(self) -> bool:
        return self.action.scale != 0


def resolve_entry(entry: SteerEntry, known: SteeringSnapshot) -> ResolvedEntry:
    """Raise whatever is wrong with an entry for every prompt."""
    vector = _find_vector(entry, known)
    points, threshold = known.check_entry(entry, vector)
    gate = None
    if entry.gate is not None and threshold is not None:
        gate = _make_gate(entry.gate, known.probes[entry.gate.probe], threshold)
    action = PlanAction(
        vector=entry.vector if isinstance(entry.vector, str) else "",
        digest=vector.vector.digest,
        op=entry.op,
        rows=tuple(vector.rows[point] for point in points),
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
    if isinstance(vector, str):
        return find_vector(known.vectors, vector, what=entry.label)
    what = f"{entry.label}.vector"
    if isinstance(vector, PackedVector):
        vector = vector.unpack(known.width, what=what)
    return known.prepare(vector, what=what)


def _make_gate(spec: GateSpec, probe: Probe, threshold: float) -> PlanGate:
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
        layer, kind = divmod(int(crowded_P.argmax()), PLACES_PER_LAYER)
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
