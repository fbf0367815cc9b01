"""Takes what a request asks and the engine as it was last seen; gives what will be applied to it.

Raises what the engine core would refuse, as far as it can be known before the prompt is.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from clairai.errors import RequestError, SteeringOffError
from clairai.serve.mirror import View
from clairai.steer.known import Known
from clairai.steer.resolve import Part, look_up
from clairai.steer.rules import Rule
from clairai.steer.spec import describe
from clairai.wanted import Wanted


@dataclass(frozen=True)
class Ruling:
    """`pins` has, for each entry that names a vector, the digest that the name stands for."""

    echo: dict[str, Any] | None  # what the answer says was applied; None: nothing was asked
    pins: tuple[str | None, ...] = ()


def judge(wanted: Wanted, view: View) -> Ruling:
    if wanted.steer and view.off is not None:
        raise SteeringOffError(view.off)
    parts = [look_up(entry, view.known) for entry in wanted.steer]
    rules = [_rule(rule, view.known, f"stop[{at}]") for at, rule in enumerate(wanted.stop)]
    applied = [*_tiers(view), *(_applied(part) for part in parts if part.acts)]
    pins = tuple(_pin(part) for part in parts)
    if not (wanted.steer or wanted.stop or applied):
        return Ruling(None)
    return Ruling({"steering": applied} | ({"stop": rules} if rules else {}), pins)


def _pin(part: Part) -> str | None:
    is_free = isinstance(part.entry.vector, str) and part.entry.digest is None
    return part.action.digest if is_free else None


def _applied(part: Part) -> dict[str, Any]:
    """As the core describes what it applies, but for positions: the prompt is not known yet."""
    entry, action = part.entry, part.action
    told: dict[str, Any] = {
        "vector": action.vector or None,
        "digest": action.digest,
        "points": [row.point for row in action.rows],
    }
    gate = describe(entry).get("gate")
    if gate is not None and part.gate is not None:
        told["gate"] = {**gate, "threshold": part.gate.threshold}
    return {**describe(entry), **told}


def _tiers(view: View) -> Iterator[dict[str, Any]]:
    for entry in view.tiers:
        if entry.get("scale") == 0:
            continue
        vector = entry["vector"]
        if not isinstance(vector, str):
            yield {**entry, **vector, "vector": None}
            continue
        held = view.known.vectors.get(vector)
        yield entry if held is None else {**entry, "digest": held.vector.digest}


def _rule(rule: Rule, known: Known, what: str) -> dict[str, Any]:
    probe = known.probe(rule.probe, what=what)
    threshold = probe.threshold if rule.threshold is None else rule.threshold
    if threshold is None:
        raise RequestError(f"{what}: probe {probe.name} has no threshold of its own; give one")
    return {**rule.written(), "threshold": threshold}
