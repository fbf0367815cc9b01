"""Resolves the entries of a request to its steering plan, and changes the plan of a running one.

Runs in: the engine core. A = actions, S = segments, P = places on the residual's path.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import msgspec
import numpy as np

from clairai.engine.steer.snapshot import PreparedVector, SteeringSnapshot, SteeringTiers
from clairai.engine.steer.steering_plan import (
    MAX_ACTIONS,
    MAX_GATES,
    MAX_OPS,
    MAX_SEGMENTS,
    PlanAction,
    PlanGate,
    PlanRow,
    Segment,
    SteeringPlan,
    split_segments,
)
from clairai.errors import RequestError
from clairai.fields.catalog import (
    PLACES_PER_LAYER,
    choose_lengths,
    entry_growth,
    find_vector,
    path_order,
)
from clairai.fields.packed_vector import PackedVector
from clairai.fields.ranges import EVERYWHERE, OPEN_END, Range
from clairai.fields.row_growth import RowGrowth, RowLimits
from clairai.fields.steer import GateSpec, SteerEntry
from clairai.points import POINT_KINDS, Point
from clairai.probe.model import Probe
from clairai.vector.model import digest_row


@dataclass(frozen=True)
class ResolvedEntry:
    """The action of an entry, still without ranges, and its gate."""

    action: PlanAction
    gate: PlanGate | None
    growth: RowGrowth


def resolve_entry(entry: SteerEntry, snapshot: SteeringSnapshot) -> ResolvedEntry:
    """Raises whatever is wrong with the entry for every prompt."""
    vector = _find_vector(entry, snapshot)
    threshold = snapshot.check_entry(entry, vector)
    gate = None
    if entry.gate is not None and threshold is not None:
        gate = _make_gate(entry.gate, snapshot.probes[entry.gate.probe], threshold)
    action = PlanAction(
        vector=entry.vector if isinstance(entry.vector, str) else "",
        digest=vector.vector.digest,
        op=entry.op,
        rows=tuple(
            vector.rows.values()
            if entry.points is None
            else (vector.rows[point] for point in entry.points)
        ),
        scale=entry.scale,
        ranges=(),
        is_matched=entry.match_norm,
        low=entry.low,
        high=entry.high,
        skips_special=entry.when.skip_special,
    )
    return ResolvedEntry(action, gate, entry_growth(entry, choose_lengths(entry, vector)))


def resolve_plan(
    entries: Iterable[SteerEntry], snapshot: SteeringSnapshot, prompt_len: int
) -> SteeringPlan | None:
    """The global tiers, then the request's own entries; None if nothing acts."""
    own = [*entries]
    if not own and not snapshot.tiers.entries():
        return None
    if prompt_len < 1:
        raise RequestError("a prompt without token ids cannot be steered; give it as text or ids")
    resolved = [
        (resolve_entry(entry, snapshot), ranges)
        for entry, ranges in _tier_ranges(snapshot.tiers, prompt_len)
    ]
    resolved += [(resolve_entry(entry, snapshot), _own_ranges(entry, prompt_len)) for entry in own]
    return _make_plan(resolved, snapshot.row_limits)


def _tier_ranges(
    tiers: SteeringTiers, prompt_len: int
) -> Iterator[tuple[SteerEntry, tuple[Range, ...]]]:
    """The entries of all tiers, each with its positions inside the tier; they may be none."""
    bounds = {"base": EVERYWHERE, "prefill": (0, prompt_len), "decode": (prompt_len, OPEN_END)}
    for tier, within in bounds.items():
        for entry in getattr(tiers, tier):
            yield entry, entry.when.ranges(prompt_len, within=within)


def _own_ranges(entry: SteerEntry, prompt_len: int) -> tuple[Range, ...]:
    ranges = entry.when.ranges(prompt_len)
    if not ranges:
        raise RequestError(
            f"{entry.label}: its positions hold none of this prompt's {prompt_len} tokens, so "
            "it would not act; change them, or leave the entry out"
        )
    return ranges


def _find_vector(entry: SteerEntry, snapshot: SteeringSnapshot) -> PreparedVector:
    vector = entry.vector
    if isinstance(vector, str):
        return find_vector(snapshot.vectors, vector, what=entry.label)
    what = f"{entry.label}.vector"
    if isinstance(vector, PackedVector):
        vector = vector.unpack(snapshot.width, what=what)
    return snapshot.prepare(vector, what=what)


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


def _make_plan(
    resolved: Iterable[tuple[ResolvedEntry, tuple[Range, ...]]], limits: RowLimits
) -> SteeringPlan | None:
    """A plan of the actions that act; None if there are none."""
    actions: list[PlanAction] = []
    gates: list[PlanGate] = []
    growths: list[RowGrowth] = []
    for entry, ranges in resolved:
        if entry.action.scale == 0 or not ranges:
            continue
        index = None
        if entry.gate is not None:
            index = len(gates)
            gates.append(entry.gate)
        actions.append(msgspec.structs.replace(entry.action, ranges=ranges, gate=index))
        growths.append(entry.growth)
    if not actions:
        return None
    if len(actions) > MAX_ACTIONS or len(gates) > MAX_GATES:
        raise RequestError(
            f"{len(actions)} entries with {len(gates)} gates, those of global tiers included; "
            f"give at most {MAX_ACTIONS} with {MAX_GATES}"
        )
    plan = SteeringPlan(tuple(actions), tuple(gates))
    segments = split_segments(plan)
    if len(segments) > MAX_SEGMENTS:
        raise RequestError(
            f"positions cut the request into {len(segments)} stretches, each steered differently; "
            f"give fewer positions: at most {MAX_SEGMENTS} stretches"
        )
    _check_ops_per_row(plan, segments)
    _check_growth(segments, growths, limits)
    return plan


def _check_growth(
    segments: Iterable[Segment], growths: Sequence[RowGrowth], limits: RowLimits
) -> None:
    """Limit how long the actions on one row can make it together."""
    for _, _, active in segments:
        growth = RowGrowth()
        for index in active:
            growth = growth.then(growths[index])
        growth.check(limits, what=f"{len(active)} entries act on one row, global tiers included")


def _check_ops_per_row(plan: SteeringPlan, segments: Sequence[Segment]) -> None:
    """Limit the ops on one row at one place, reads of gates included."""
    places = [[*_places_of(plan, action)] for action in plan.actions]
    ops_AP = np.zeros((len(places), 1 + max(map(max, places))), np.int64)
    for index, one in enumerate(places):
        np.add.at(ops_AP[index], one, 1)
    active_SA = np.zeros((len(segments), len(places)), np.int64)
    for index, (_, _, active) in enumerate(segments):
        active_SA[index, list(active)] = 1
    most_P = (active_SA @ ops_AP).max(axis=0)
    if most_P.max() > MAX_OPS:
        layer, kind = divmod(int(most_P.argmax()), PLACES_PER_LAYER)
        raise RequestError(
            f"{most_P.max()} operations act on one row at {POINT_KINDS[kind]}.{layer}, "
            f"gates and global tiers included; give at most {MAX_OPS}"
        )


def _places_of(plan: SteeringPlan, action: PlanAction) -> Iterator[int]:
    yield from (path_order(Point.parse(row.point)) for row in action.rows)
    if action.gate is not None:
        yield path_order(Point.parse(plan.gates[action.gate].row.point))


def amend_plan(
    old: SteeringPlan | None, new: SteeringPlan | None, position: int
) -> SteeringPlan | None:
    """The old plan before a position that no step has computed yet, the new one from it on.

    The old ranges stay: a preempted request computes those positions again. None if nothing acts
    before or after; RequestError if there is no room for both.
    """
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
    amended = SteeringPlan(tuple(actions), tuple(gates))
    _check_room(amended)
    return amended


def check_entries_act(entries: Iterable[SteerEntry], prompt_len: int, position: int) -> None:
    """RequestError for an entry that does not act from this position on."""
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
                f"the steering of this request was changed before: it would have {count} {what} "
                f"in all, at most {most}; start a new request"
            )
