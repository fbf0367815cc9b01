"""Takes a course; gives its segments, stretches where the same actions act, and their programs."""

from __future__ import annotations

import hashlib
from collections import defaultdict
from collections.abc import Iterable
from itertools import pairwise
from typing import Final

import msgspec

from clairai.steer.course import Action, Course, Gate

Segment = tuple[int, int, tuple[int, ...]]  # first position, one past the last, indices of actions

_ENCODER: Final = msgspec.msgpack.Encoder()


def segments(course: Course) -> tuple[Segment, ...]:
    """In order of positions, apart from each other; where nothing acts there is none."""
    edges: dict[int, set[int]] = defaultdict(set)
    for index, action in enumerate(course.actions):
        for edge in (edge for one in action.ranges for edge in one):
            edges[edge] ^= {index}  # of two ranges that touch, the edge is none
    found: list[Segment] = []
    active: set[int] = set()
    for start, end in pairwise(sorted(edge for edge, changed in edges.items() if changed)):
        active ^= edges[start]
        if active:
            found.append((start, end, tuple(sorted(active))))
    return tuple(found)


def program_key(course: Course, active: Iterable[int]) -> bytes:
    """Names what these actions do, in their order, to a row: equal for equal content.

    Neither names nor positions are in it. Whether an action skips special tokens is: only the
    device knows which token a row is for. A stateful gate's index in the course is: that is where
    its state is kept, and all programs of one request must find it there.
    """
    actions = [course.actions[index] for index in active]
    parts = [
        (content(course, action), action.skips_special, _state(course, action))
        for action in actions
    ]
    return hashlib.blake2b(_ENCODER.encode(parts), digest_size=16).digest()


def programs(course: Course) -> frozenset[bytes]:
    """Keys of every program the course needs."""
    return frozenset(program_key(course, active) for _, _, active in segments(course))


def content(course: Course, action: Action) -> tuple[object, ...]:
    """All that decides what it does to a row it acts on, for msgpack, which keeps parts apart."""
    rows = [(row.point, row.digest) for row in action.rows]
    bounds = (_real(action.low), _real(action.high))
    gate = None if action.gate is None else _gate_content(course.gates[action.gate])
    return action.op, rows, float(action.scale), action.is_matched, bounds, gate


def _state(course: Course, action: Action) -> int | None:
    if action.gate is None or not course.gates[action.gate].is_stateful:
        return None
    return action.gate


def _gate_content(gate: Gate) -> tuple[object, ...]:
    scored = (gate.row.point, gate.row.digest, float(gate.bias), gate.activation)
    opened = (float(gate.threshold), _real(gate.sharpness), _real(gate.release), gate.latch)
    return *scored, *opened


def _real(number: float | None) -> float | None:
    return None if number is None else float(number)
