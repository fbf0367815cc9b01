"""Takes a course; gives what a user is told was applied, as JSON and in the request's language."""

from __future__ import annotations

from typing import Any

from clairai.steer.course import OPEN_END, Action, Course, Gate


def describe(course: Course) -> list[dict[str, Any]]:
    """One object for each action, in the order in which they act.

    Positions are counted from the first token of the prompt. A vector that came with the request
    has no name: its digest says which it was.
    """
    return [_described(course, action) for action in course.actions]


def _described(course: Course, action: Action) -> dict[str, Any]:
    told: dict[str, Any] = {
        "vector": action.vector or None,
        "digest": action.digest,
        "scale": action.scale,
        "op": action.op,
        "points": [row.point for row in action.rows],
        "when": _when(action),
    }
    optional = {
        "match_norm": action.is_matched or None,
        "low": action.low,
        "high": action.high,
        "gate": None if action.gate is None else _gate(course.gates[action.gate]),
    }
    return told | {key: value for key, value in optional.items() if value is not None}


def _when(action: Action) -> dict[str, Any]:
    positions = [[start, None if end == OPEN_END else end] for start, end in action.ranges]
    when: dict[str, Any] = {"phase": "both", "positions": positions}
    return when | ({"skip_special": True} if action.skips_special else {})


def _gate(gate: Gate) -> dict[str, Any]:
    told: dict[str, Any] = {"probe": gate.probe, "threshold": gate.threshold}
    optional = {"sharpness": gate.sharpness, "release": gate.release, "latch": gate.latch or None}
    return told | {key: value for key, value in optional.items() if value is not None}
