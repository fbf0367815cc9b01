"""Takes what a request asks and the engine as it was last seen; gives what will be applied to it.

Raises what the engine core would refuse, as far as it can be known before the prompt is.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, Final

from clairai.engine.steer.resolve_steering import ResolvedEntry, resolve_entry
from clairai.engine.steer.snapshot import SteeringSnapshot
from clairai.errors import ClairaiError, RequestError, SteeringOffError
from clairai.fields.packed_vector import PackedVector
from clairai.fields.request_fields import RequestFields
from clairai.fields.rules import StopRule
from clairai.fields.steer import SteerEntry
from clairai.server.core_cache import CoreView, outline_vector
from clairai.vector.model import Vector

_INLINE: Final = ""  # the name of a vector that came with its request, to the core too


@dataclass(frozen=True)
class SteeringPreview:
    """`pins` has, for each entry that names a vector, the digest that the name stands for."""

    told: dict[str, Any] | None = None  # all but the digests of `inline`; None: nothing was asked
    pins: tuple[str | None, ...] = ()
    inline: tuple[tuple[dict[str, Any], PackedVector | Vector], ...] = ()
    width: int = 0

    def echo(self) -> dict[str, Any] | None:
        """What the answer says was applied. Hashes what came with the request: the engine works on
        it meanwhile, and nothing waits for this before there is an answer."""
        with contextlib.suppress(ClairaiError):  # the core says what is wrong with it
            self.check_numbers()
        return self.told

    def check_numbers(self) -> None:
        """Raises what the core would say of vectors that came with the request."""
        for entry, vector in self.inline:
            whole = (
                vector.unpack(self.width, what="steer.vector")
                if isinstance(vector, PackedVector)
                else vector
            )
            entry["digest"] = whole.digest


def preview_steering(wanted: RequestFields, view: CoreView) -> SteeringPreview:
    is_steered = bool(wanted.steer) or any(rule.steer for rule in wanted.stop)
    if is_steered and view.off is not None:
        raise SteeringOffError(view.off)
    parts = [_look_up(entry, view.known) for entry in wanted.steer]
    rules = [_rule(rule, view.known, f"stop[{at}]") for at, rule in enumerate(wanted.stop)]
    both = zip(parts, wanted.steer, strict=True)
    own = [(_applied(part), entry) for part, entry in both if part.acts]
    applied = [*_tiers(view), *(told for told, _ in own)]
    if not (wanted.steer or wanted.stop or applied):
        return SteeringPreview()
    return SteeringPreview(
        {"steering": applied} | ({"stop": rules} if rules else {}),
        tuple(_pin(part) for part in parts),
        tuple((told, entry.vector) for told, entry in own if not isinstance(entry.vector, str)),
        view.known.engine.width,
    )


def _look_up(entry: SteerEntry, known: SteeringSnapshot) -> ResolvedEntry:
    """Of a vector that came with the request only the points are judged here; the core, which has
    to read its numbers, judges those, and its refusal is told as well."""
    vector = entry.vector
    if isinstance(vector, str):
        return resolve_entry(entry, known)
    points = vector.points if isinstance(vector, Vector) else [point for point, _ in vector.rows]
    known.engine.check_tapped(f"{entry.label}.vector", points)
    held = outline_vector(entry.digest or "", dict.fromkeys(points, 1.0))
    return resolve_entry(replace(entry, vector=_INLINE), replace(known, vectors={_INLINE: held}))


def _pin(part: ResolvedEntry) -> str | None:
    is_free = part.action.vector != _INLINE and part.entry.digest is None
    return part.action.digest if is_free else None


def _applied(part: ResolvedEntry) -> dict[str, Any]:
    """As the core describes what it applies, but for positions: the prompt is not known yet."""
    entry, action = part.entry, part.action
    told: dict[str, Any] = {
        "vector": action.vector or None,
        "digest": action.digest,
        "points": [row.point for row in action.rows],
    }
    gate = entry.describe().get("gate")
    if gate is not None and part.gate is not None:
        told["gate"] = {**gate, "threshold": part.gate.threshold}
    return {**entry.describe(), **told}


def _tiers(view: CoreView) -> Iterator[dict[str, Any]]:
    for entry in view.tiers:
        if entry.get("scale") == 0:
            continue
        vector = entry["vector"]
        if not isinstance(vector, str):
            yield {**entry, **vector, "vector": None}
            continue
        held = view.known.vectors.get(vector)
        if held is not None:
            points = entry.get("points", [*map(str, held.rows)])
            entry = {**entry, "digest": held.vector.digest, "points": points}
        yield entry


def _rule(rule: StopRule, known: SteeringSnapshot, what: str) -> dict[str, Any]:
    probe = known.probe(rule.probe, what=what)
    threshold = probe.threshold if rule.threshold is None else rule.threshold
    if threshold is None:
        raise RequestError(f"{what}: probe {probe.name} has no threshold of its own; give one")
    for entry in rule.steer:
        _look_up(entry, known)
    told = {**replace(rule, steer=()).to_json(), "threshold": threshold}
    # Without digests: a name stands for what it means when the rule goes off.
    return told | ({"steer": [one.describe() for one in rule.steer]} if rule.steer else {})
