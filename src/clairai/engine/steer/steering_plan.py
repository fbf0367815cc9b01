"""Takes nothing of ours; gives a course: all that steers one request, as it travels to the workers.

A course is content, not names: vectors and gates are in it, positions are absolute. Whatever a name
comes to mean later, a request that was admitted keeps what it was admitted with. D = model width.
"""

from __future__ import annotations

import hashlib
from collections import defaultdict
from collections.abc import Iterable
from itertools import pairwise
from typing import Any, Final

import msgspec
import numpy as np
from numpy.typing import NDArray

from clairai.fields.ranges import OPEN_END, Range
from clairai.fields.steer import Op
from clairai.wire.ring_messages import Activation

MAX_OPS: Final = 16  # that act on one row at one point, gates included
MAX_GATES: Final = 8  # of one course
MAX_ACTIONS: Final = 64


class PlanRow(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What a vector holds for one point."""

    point: str
    digest: str  # of the values
    values: bytes  # float32, little-endian

    def read(self) -> NDArray[np.float32]:
        return np.frombuffer(self.values, "<f4")


class PlanGate(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A probe's score of the same token opens and closes an action."""

    probe: str
    row: PlanRow  # the probe's direction, at its point
    bias: float
    activation: Activation
    threshold: float
    sharpness: float | None = None  # None: open or closed, nothing between
    release: float | None = None  # closes below this; None: closes below the threshold
    latch: bool = False  # never closes again

    @property
    def is_stateful(self) -> bool:
        """Whether it depends on the request's earlier tokens."""
        return self.latch or self.release is not None


class PlanAction(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One vector's work: what it does, to which rows, how strongly."""

    vector: str  # its name; "" for one that came with the request
    digest: str  # of the whole vector
    op: Op
    rows: tuple[PlanRow, ...]  # one for each point, in path order
    scale: float
    ranges: tuple[Range, ...]  # sorted, apart from each other, none of them empty
    is_matched: bool = False  # add: the vector has the length of the row it is added to
    low: float | None = None  # clamp
    high: float | None = None
    gate: int | None = None  # of the course's gates; each is one action's own
    skips_special: bool = False


class SteeringPlan(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Actions in the order in which they act."""

    actions: tuple[PlanAction, ...]
    gates: tuple[PlanGate, ...] = ()

    @property
    def is_stateful(self) -> bool:
        return any(gate.is_stateful for gate in self.gates)


ENCODER: Final = msgspec.msgpack.Encoder()
DECODER: Final = msgspec.msgpack.Decoder(SteeringPlan)


# MERGED
# Takes a course; gives its segments, stretches where the same actions act, and their programs.


Segment = tuple[int, int, tuple[int, ...]]  # first position, one past the last, indices of actions
MAX_SEGMENTS: Final = 256  # of one course: the registry gives none with more

_KEY_ENCODER: Final = msgspec.msgpack.Encoder()
_KEY_BYTES: Final = 16


def split_segments(plan: SteeringPlan) -> tuple[Segment, ...]:
    """In order of positions, apart from each other; where nothing acts there is none."""
    edges: dict[int, set[int]] = defaultdict(set)
    for index, action in enumerate(plan.actions):
        for edge in (edge for one in action.ranges for edge in one):
            edges[edge] ^= {index}  # of two ranges that touch, the edge is none
    found: list[Segment] = []
    active: set[int] = set()
    for start, end in pairwise(sorted(edge for edge, changed in edges.items() if changed)):
        active ^= edges[start]
        if active:
            found.append((start, end, tuple(sorted(active))))
    return tuple(found)


def program_key(plan: SteeringPlan, active: Iterable[int]) -> bytes:
    """Names what these actions do, in their order, to a row: equal for equal content.

    Neither names nor positions are in it. Whether an action skips special tokens is: only the
    device knows which token a row is for. A stateful gate's index in the course is: that is where
    its state is kept, and all programs of one request must find it there.
    """
    return _hash_keys(_action_key(plan, plan.actions[index]) for index in active)


def program_keys(plan: SteeringPlan, parts: Iterable[Segment]) -> list[bytes]:
    """The program key of each segment; each action is read once."""
    keys = [_action_key(plan, action) for action in plan.actions]
    return [_hash_keys(keys[index] for index in active) for _, _, active in parts]


def all_program_keys(plan: SteeringPlan) -> frozenset[bytes]:
    """Keys of every program the course needs."""
    return frozenset(program_keys(plan, split_segments(plan)))


def treatments(plan: SteeringPlan) -> list[tuple[int, int, bytes]]:
    """What is done to which positions, in one form only: equal lists are equal treatment.

    Neighbours differ in key, whether one action or two of equal content act on them. Where a
    stateful gate keeps its state is not in a key.
    """
    parts = [_hash(action_content(plan, action)) for action in plan.actions]
    found: list[tuple[int, int, bytes]] = []
    for start, end, active in split_segments(plan):
        key = _hash_keys(parts[index] for index in active)
        if found and found[-1][1:] == (start, key):
            found[-1] = (found[-1][0], end, key)
        else:
            found.append((start, end, key))
    return found


def action_content(plan: SteeringPlan, action: PlanAction) -> tuple[object, ...]:
    """All that decides what it does to a position it acts on, for msgpack, which keeps parts apart.

    The tokens decide too, but whoever compares contents compares tokens first.
    """
    rows = [(row.point, row.digest) for row in action.rows]
    bounds = (_optional_float(action.low), _optional_float(action.high))
    gate = None if action.gate is None else _gate_content(plan.gates[action.gate])
    flags = (action.is_matched, action.skips_special)
    return action.op, rows, float(action.scale), bounds, flags, gate


def _action_key(plan: SteeringPlan, action: PlanAction) -> bytes:
    is_stateful = action.gate is not None and plan.gates[action.gate].is_stateful
    return _hash((action_content(plan, action), action.gate if is_stateful else None))


def _gate_content(gate: PlanGate) -> tuple[object, ...]:
    scored = (gate.row.point, gate.row.digest, float(gate.bias), gate.activation)
    opened = (
        float(gate.threshold),
        _optional_float(gate.sharpness),
        _optional_float(gate.release),
        gate.latch,
    )
    return *scored, *opened


def _hash(parts: object) -> bytes:
    return hashlib.blake2b(_KEY_ENCODER.encode(parts), digest_size=_KEY_BYTES).digest()


def _hash_keys(parts: Iterable[bytes]) -> bytes:
    """Of parts that are all equally long: where one ends is no question."""
    return hashlib.blake2b(b"".join(parts), digest_size=_KEY_BYTES).digest()


def _optional_float(number: float | None) -> float | None:
    return None if number is None else float(number)


# MERGED
# Takes a course; gives what a user is told was applied, as JSON and in the request's language.


def describe_plan(plan: SteeringPlan) -> list[dict[str, Any]]:
    """One object for each action, in the order in which they act.

    Positions are counted from the first token of the prompt. A vector that came with the request
    has no name: its digest says which it was.
    """
    return [_describe_action(plan, action) for action in plan.actions]


def _describe_action(plan: SteeringPlan, action: PlanAction) -> dict[str, Any]:
    told: dict[str, Any] = {
        "vector": action.vector or None,
        "digest": action.digest,
        "scale": action.scale,
        "op": action.op,
        "points": [row.point for row in action.rows],
        "when": _describe_when(action),
    }
    optional = {
        "match_norm": action.is_matched or None,
        "low": action.low,
        "high": action.high,
        "gate": None if action.gate is None else _describe_gate(plan.gates[action.gate]),
    }
    return told | {key: value for key, value in optional.items() if value is not None}


def _describe_when(action: PlanAction) -> dict[str, Any]:
    positions = [[start, None if end == OPEN_END else end] for start, end in action.ranges]
    when: dict[str, Any] = {"phase": "both", "positions": positions}
    return when | ({"skip_special": True} if action.skips_special else {})


def _describe_gate(gate: PlanGate) -> dict[str, Any]:
    told: dict[str, Any] = {"probe": gate.probe, "threshold": gate.threshold}
    optional = {"sharpness": gate.sharpness, "release": gate.release, "latch": gate.latch or None}
    return told | {key: value for key, value in optional.items() if value is not None}
