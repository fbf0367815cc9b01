"""Takes entries and what is known; gives the course of one request, or says what cannot be done."""

# A = actions, S = segments, P = places on the residual's path

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Final

import msgspec
import numpy as np

from clairai.errors import PointError, RequestError
from clairai.points import KINDS, Point
from clairai.steer.course import (
    MAX_ACTIONS,
    MAX_GATES,
    MAX_OPS,
    OPEN_END,
    Action,
    Course,
    Gate,
    Range,
    Row,
)
from clairai.steer.fields import LARGEST
from clairai.steer.known import Held, HeldRow, Known
from clairai.steer.packed import Packed
from clairai.steer.segments import MAX_SEGMENTS, segments
from clairai.steer.spec import Entry, GateSpec
from clairai.steer.vector import Vector, digest_of
from clairai.steer.when import EVERYWHERE

SHORTEST: Final = 1e-15  # of a row whose length is divided by, in float32
LONGEST: Final = 1e15

_COUNTED_ONCE: Final = len(KINDS) - 1  # places of a block that are not the next block's first


@dataclass(frozen=True)
class Part:
    """One entry with everything looked up; its positions wait for the prompt."""

    entry: Entry
    action: Action  # without ranges
    gate: Gate | None

    @property
    def acts(self) -> bool:
        return self.action.scale != 0


def place(point: Point) -> int:
    """Its order on the path; post_block of one layer is the place of the next one's pre_attn."""
    return point.layer * _COUNTED_ONCE + KINDS.index(point.kind)


def look_up(entry: Entry, known: Known) -> Part:
    """Everything that can be wrong with an entry, whatever the prompt, is raised here."""
    held = _held(entry, known)
    rows = _rows(entry, held)
    _check_rows(entry, rows)
    if entry.when.skip_special and not known.engine.can_skip_special:
        raise RequestError(
            f"{entry.label}: skip_special needs a tokenizer, and this engine has none; leave it out"
        )
    gate = None if entry.gate is None else _gate(entry, entry.gate, known)
    if gate is not None:
        _check_order(entry, Point.parse(gate.row.point), (Point.parse(r.row.point) for r in rows))
    action = Action(
        vector=entry.vector if isinstance(entry.vector, str) else "",
        digest=held.vector.digest,
        op=entry.op,
        rows=tuple(one.row for one in rows),
        scale=entry.scale,
        ranges=(),
        is_matched=entry.is_matched,
        low=entry.low,
        high=entry.high,
        skips_special=entry.when.skip_special,
    )
    return Part(entry, action, gate)


def resolve(entries: Iterable[Entry], known: Known, prompt_len: int) -> Course | None:
    """Tiers first, then the request's own; None where nothing acts."""
    own = [*entries]
    if not own and not known.tiers.entries():
        return None
    if prompt_len < 1:
        raise RequestError("a prompt without token ids cannot be steered; give it as text or ids")
    found = [*_of_tiers(known, prompt_len)]
    for entry in own:
        part, ranges = look_up(entry, known), entry.when.ranges(prompt_len)
        if not ranges:
            raise RequestError(
                f"{entry.label}: its positions hold none of this prompt's {prompt_len} tokens, so "
                "it would not act; mend them, or leave the entry out"
            )
        found.append((part, ranges))
    acting = [(part, ranges) for part, ranges in found if part.acts and ranges]
    return _course(acting) if acting else None


def tier_bounds(prompt_len: int) -> dict[str, Range]:
    return {"base": EVERYWHERE, "prefill": (0, prompt_len), "decode": (prompt_len, OPEN_END)}


def _of_tiers(known: Known, prompt_len: int) -> Iterator[tuple[Part, tuple[Range, ...]]]:
    for tier, bounds in tier_bounds(prompt_len).items():
        for entry in getattr(known.tiers, tier):
            yield look_up(entry, known), entry.when.ranges(prompt_len, within=bounds)


def _held(entry: Entry, known: Known) -> Held:
    vector = entry.vector
    if isinstance(vector, Packed):
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


def _rows(entry: Entry, held: Held) -> list[HeldRow]:
    if entry.points is None:
        return [*held.rows.values()]
    missing = [str(point) for point in entry.points if point not in held.rows]
    if missing:
        raise PointError(
            f"{entry.label}.points: the vector has no row for {missing[0]}; "
            f"it has {', '.join(map(str, [*held.rows][:8]))}{' ...' if len(held.rows) > 8 else ''}"
        )
    return [held.rows[point] for point in entry.points]


def _check_rows(entry: Entry, rows: Iterable[HeldRow]) -> None:
    is_divided = entry.is_matched or entry.op in ("ablate", "clamp")
    for one in rows:
        if is_divided and not SHORTEST <= one.length <= LONGEST:
            raise RequestError(
                f"{entry.label}: the row at {one.row.point} has length {one.length:.3g}, which "
                f"{'match_norm' if entry.is_matched else entry.op} divides by; "
                f"scale the vector to a length of {SHORTEST:g} to {LONGEST:g}"
            )
        if not is_divided and abs(entry.scale) * one.peak > LARGEST:
            raise RequestError(
                f"{entry.label}: scale {entry.scale:.3g} times the row at {one.row.point} is "
                "beyond float32; use a smaller scale"
            )


def _gate(entry: Entry, spec: GateSpec, known: Known) -> Gate:
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
    return Gate(
        probe=probe.name,
        row=Row(str(probe.point), digest_of(direction_D), direction_D.tobytes()),
        bias=probe.bias,
        activation=probe.activation,
        threshold=threshold,
        sharpness=spec.sharpness,
        release=spec.release,
        latch=spec.latch,
    )


def _check_order(entry: Entry, gate: Point, points: Iterable[Point]) -> None:
    earlier = next((point for point in points if place(point) < place(gate)), None)
    if earlier is not None:
        raise PointError(
            f"{entry.label}.gate reads {gate}, which comes after {earlier}, where the vector acts; "
            "use a probe of the same point or an earlier one, or steer at later `points`"
        )


def _course(acting: list[tuple[Part, tuple[Range, ...]]]) -> Course:
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
    course = Course(actions, tuple(gates))
    _check_crowding(course)
    return course


def _check_crowding(course: Course) -> None:
    """How many ops a row meets at a place, a gate's reading of it included."""
    stretches = segments(course)
    if len(stretches) > MAX_SEGMENTS:
        raise RequestError(
            f"positions cut the request into {len(stretches)} stretches, each steered otherwise; "
            f"give fewer positions: at most {MAX_SEGMENTS} stretches"
        )
    places = [[*_places(course, action)] for action in course.actions]
    ops_AP = np.zeros((len(places), 1 + max(map(max, places))), np.int64)
    for index, one in enumerate(places):
        np.add.at(ops_AP[index], one, 1)
    active_SA = np.zeros((len(stretches), len(places)), np.int64)
    for index, (_, _, active) in enumerate(stretches):
        active_SA[index, list(active)] = 1
    crowded_P = (active_SA @ ops_AP).max(axis=0)
    if crowded_P.max() > MAX_OPS:
        layer, kind = divmod(int(crowded_P.argmax()), _COUNTED_ONCE)
        raise RequestError(
            f"{crowded_P.max()} operations act on one row at {KINDS[kind]}.{layer}, gates and "
            f"global tiers included; give at most {MAX_OPS}"
        )


def _places(course: Course, action: Action) -> Iterator[int]:
    yield from (place(Point.parse(row.point)) for row in action.rows)
    if action.gate is not None:
        yield place(Point.parse(course.gates[action.gate].row.point))
