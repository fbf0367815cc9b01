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
MAX_SEGMENTS: Final = 256  # of one course: the registry gives none with more

_ENCODER: Final = msgspec.msgpack.Encoder()
_KEY_BYTES: Final = 16


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
    return _joined(_program_part(course, course.actions[index]) for index in active)


def program_keys(course: Course, parts: Iterable[Segment]) -> list[bytes]:
    """The program key of each segment; each action is read once."""
    keys = [_program_part(course, action) for action in course.actions]
    return [_joined(keys[index] for index in active) for _, _, active in parts]


def programs(course: Course) -> frozenset[bytes]:
    """Keys of every program the course needs."""
    return frozenset(program_keys(course, segments(course)))


def treatments(course: Course) -> list[tuple[int, int, bytes]]:
    """What is done to which positions, in one form only: equal lists are equal treatment.

    Neighbours differ in key, whether one action or two of equal content act on them. Where a
    stateful gate keeps its state is not in a key.
    """
    parts = [_digest(content(course, action)) for action in course.actions]
    found: list[tuple[int, int, bytes]] = []
    for start, end, active in segments(course):
        key = _joined(parts[index] for index in active)
        if found and found[-1][1:] == (start, key):
            found[-1] = (found[-1][0], end, key)
        else:
            found.append((start, end, key))
    return found


def content(course: Course, action: Action) -> tuple[object, ...]:
    """All that decides what it does to a position it acts on, for msgpack, which keeps parts apart.

    The tokens decide too, but whoever compares contents compares tokens first.
    """
    rows = [(row.point, row.digest) for row in action.rows]
    bounds = (_real(action.low), _real(action.high))
    gate = None if action.gate is None else _gate_content(course.gates[action.gate])
    flags = (action.is_matched, action.skips_special)
    return action.op, rows, float(action.scale), bounds, flags, gate


def _program_part(course: Course, action: Action) -> bytes:
    is_stateful = action.gate is not None and course.gates[action.gate].is_stateful
    return _digest((content(course, action), action.gate if is_stateful else None))


def _gate_content(gate: Gate) -> tuple[object, ...]:
    scored = (gate.row.point, gate.row.digest, float(gate.bias), gate.activation)
    opened = (float(gate.threshold), _real(gate.sharpness), _real(gate.release), gate.latch)
    return *scored, *opened


def _digest(parts: object) -> bytes:
    return hashlib.blake2b(_ENCODER.encode(parts), digest_size=_KEY_BYTES).digest()


def _joined(parts: Iterable[bytes]) -> bytes:
    """Of parts that are all equally long: where one ends is no question."""
    return hashlib.blake2b(b"".join(parts), digest_size=_KEY_BYTES).digest()


def _real(number: float | None) -> float | None:
    return None if number is None else float(number)
