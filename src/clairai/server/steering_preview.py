"""Tells which steering and rules will be applied to a request, before the engine core has it.

Runs in: the API server. Raises what the core would refuse, as far as it does not depend on the
prompt or on the numbers of an inline vector; the core judges those.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from clairai.errors import ClairaiError, SteeringOffError
from clairai.fields.catalog import (
    Catalog,
    KnownVector,
    find_vector,
    rule_threshold,
)
from clairai.fields.packed_vector import PackedVector
from clairai.fields.request_fields import RequestFields
from clairai.fields.rules import StopRule
from clairai.fields.steer import SteerEntry
from clairai.server.core_cache import CoreView
from clairai.vector.model import Vector


@dataclass(frozen=True)
class SteeringPreview:
    """What the response says was applied, and which content the request's names stand for."""

    applied: dict[str, Any] | None = None  # without digests of `inline`; None: nothing was asked
    pins: tuple[str | None, ...] = ()  # a digest for each entry that names a vector without one
    inline: tuple[tuple[dict[str, Any], PackedVector | Vector], ...] = ()
    width: int = 0

    def complete(self) -> dict[str, Any] | None:
        """`applied` with the digests of inline vectors. Slow; runs while the engine works."""
        with contextlib.suppress(ClairaiError):  # the core refuses it with the reason
            self.check_numbers()
        return self.applied

    def check_numbers(self) -> None:
        """Raise what the core would say of the numbers of inline vectors."""
        for entry, vector in self.inline:
            if isinstance(vector, PackedVector):
                vector = vector.unpack(self.width, what="steer.vector")
            entry["digest"] = vector.digest


def preview_steering(fields: RequestFields, view: CoreView) -> SteeringPreview:
    is_steered = bool(fields.steer) or any(rule.steer for rule in fields.stop)
    if is_steered and view.off_reason is not None:
        raise SteeringOffError(view.off_reason)
    own, pins = [], []
    for entry in fields.steer:
        vector = _find_vector(entry, view.catalog)
        threshold = view.catalog.check_entry(entry, vector)
        pins.append(vector.digest if entry.digest is None else None)
        if entry.scale != 0:
            own.append((_describe_applied(entry, vector, threshold), entry.vector))
    rules = [_describe_rule(rule, view.catalog, f"stop[{i}]") for i, rule in enumerate(fields.stop)]
    applied = [*_describe_tiers(view), *(described for described, _ in own)]
    if not (fields.steer or fields.stop or applied):
        return SteeringPreview()
    return SteeringPreview(
        {"steering": applied} | ({"stop": rules} if rules else {}),
        tuple(pins),
        tuple((described, inline) for described, inline in own if not isinstance(inline, str)),
        view.width,
    )


def _find_vector(entry: SteerEntry, catalog: Catalog) -> KnownVector:
    """Of an inline vector only the points are known here."""
    vector = entry.vector
    if isinstance(vector, str):
        return find_vector(catalog.vectors, vector, what=entry.label)
    points = vector.points if isinstance(vector, Vector) else [point for point, _ in vector.rows]
    catalog.check_tapped(f"{entry.label}.vector", points)
    return KnownVector(None, dict.fromkeys(points))


def _describe_applied(
    entry: SteerEntry, vector: KnownVector, threshold: float | None
) -> dict[str, Any]:
    """As the core describes what it applies, without positions: the prompt is not known yet."""
    described = entry.describe()
    described |= {
        "vector": entry.vector if isinstance(entry.vector, str) else None,
        "digest": vector.digest or entry.digest or "",
        "points": vector.point_names if entry.points is None else [*map(str, entry.points)],
    }
    if threshold is not None:
        described["gate"] = {**described["gate"], "threshold": threshold}
    return described


def _describe_tiers(view: CoreView) -> Iterator[dict[str, Any]]:
    for entry in view.tiers:
        if entry.get("scale") == 0:
            continue
        vector = entry["vector"]
        if not isinstance(vector, str):
            yield {**entry, **vector, "vector": None}
            continue
        known = view.catalog.vectors.get(vector)
        if known is not None:
            points = entry.get("points", known.point_names)
            entry = {**entry, "digest": known.digest, "points": points}
        yield entry


def _describe_rule(rule: StopRule, catalog: Catalog, what: str) -> dict[str, Any]:
    threshold = rule_threshold(rule, catalog.probes, what=what)
    for entry in rule.steer:
        catalog.check_entry(entry, _find_vector(entry, catalog))
    described = {**replace(rule, steer=()).to_json(), "threshold": threshold}
    # Without digests: a name stands for what it means when the rule applies.
    return described | ({"steer": [one.describe() for one in rule.steer]} if rule.steer else {})
