"""The steering plan of one request, as the engine core sends it to the workers.

A plan holds content, not names: it includes the vectors and gates, and its positions are absolute.
A later change of a named vector or probe does not change requests that were admitted before.
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

MAX_OPS: Final = 16  # on one row at one point, reads of gates included
MAX_GATES: Final = 8  # of one plan
MAX_ACTIONS: Final = 64  # of one plan
MAX_SEGMENTS: Final = 256  # of one plan

# First position, one past the last, indices of the actions that act there.
Segment = tuple[int, int, tuple[int, ...]]

_KEY_BYTES: Final = 16


class PlanRow(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The numbers of a vector, or of a probe's direction, at one point."""

    point: str
    digest: str  # of the values
    values: bytes  # float32, little-endian

    def read(self) -> NDArray[np.float32]:
        return np.frombuffer(self.values, "<f4")


class PlanGate(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Opens and closes an action by a probe's score of the same token."""

    probe: str
    row: PlanRow  # the probe's direction, at its point
    bias: float
    activation: Activation
    threshold: float
    sharpness: float | None = None  # None: fully open or closed
    release: float | None = None  # closes below this; None: below the threshold
    latch: bool = False  # never closes again

    @property
    def is_stateful(self) -> bool:
        """True if it depends on earlier tokens of the request."""
        return self.latch or self.release is not None


class PlanAction(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What one vector does, at which points and positions, and how strongly."""

    vector: str  # its name; "" for one that the request carried
    digest: str  # of the whole vector
    op: Op
    rows: tuple[PlanRow, ...]  # one for each point, in path order
    scale: float
    ranges: tuple[Range, ...]  # sorted, merged, none empty
    is_matched: bool = False  # add: scale the vector to the length of the row
    low: float | None = None  # clamp
    high: float | None = None
    gate: int | None = None  # index into the plan's gates; no two actions share one
    skips_special: bool = False


class SteeringPlan(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Actions in the order in which they act."""

    actions: tuple[PlanAction, ...]
    gates: tuple[PlanGate, ...] = ()

    @property
    def is_stateful(self) -> bool:
        return any(gate.is_stateful for gate in self.gates)


_ENCODER: Final = msgspec.msgpack.Encoder()
_DECODER: Final = msgspec.msgpack.Decoder(SteeringPlan)


def encode_plan(plan: SteeringPlan) -> bytes:
    return _ENCODER.encode(plan)


def decode_plan(data: bytes) -> SteeringPlan:
    return _DECODER.decode(data)


def split_segments(plan: SteeringPlan) -> tuple[Segment, ...]:
    """The stretches of positions where the same actions act, in order; gaps have none."""
    edges: dict[int, set[int]] = defaultdict(set)
    for index, action in enumerate(plan.actions):
        for edge in (edge for one in action.ranges for edge in one):
            edges[edge] ^= {index}  # two ranges of one action that touch have no edge between them
    found: list[Segment] = []
    active: set[int] = set()
    for start, end in pairwise(sorted(edge for edge, changed in edges.items() if changed)):
        active ^= edges[start]
        if active:
            found.append((start, end, tuple(sorted(active))))
    return tuple(found)


def program_key(plan: SteeringPlan, active: Iterable[int]) -> bytes:
    """The key of what these actions do to a row, in their order: equal for equal content.

    It covers neither names nor positions. It covers whether an action skips special tokens, since
    only the device knows a row's token, and the index of a stateful gate, since all programs of a
    request must find the gate's state under the same index.
    """
    return _hash_keys(_action_key(plan, plan.actions[index]) for index in active)


def program_keys(plan: SteeringPlan, segments: Iterable[Segment]) -> list[bytes]:
    """The program key of each segment; each action is hashed once."""
    keys = [_action_key(plan, action) for action in plan.actions]
    return [_hash_keys(keys[index] for index in active) for _, _, active in segments]


def all_program_keys(plan: SteeringPlan) -> frozenset[bytes]:
    """The keys of all programs that the plan needs."""
    return frozenset(program_keys(plan, split_segments(plan)))


def treatments(plan: SteeringPlan) -> list[tuple[int, int, bytes]]:
    """What is done to which positions, in canonical form: equal lists mean equal treatment.

    Neighbours with equal content are joined. Unlike a program key, a key here does not cover the
    index of a stateful gate.
    """
    keys = [_hash(action_content(plan, action)) for action in plan.actions]
    found: list[tuple[int, int, bytes]] = []
    for start, end, active in split_segments(plan):
        key = _hash_keys(keys[index] for index in active)
        if found and found[-1][1:] == (start, key):
            found[-1] = (found[-1][0], end, key)
        else:
            found.append((start, end, key))
    return found


def action_content(plan: SteeringPlan, action: PlanAction) -> tuple[object, ...]:
    """All that decides what an action does to a position, besides the tokens.

    vLLM's block hash covers the tokens.
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


def _hash(content: object) -> bytes:
    return hashlib.blake2b(_ENCODER.encode(content), digest_size=_KEY_BYTES).digest()


def _hash_keys(keys: Iterable[bytes]) -> bytes:
    """Unambiguous without separators, since all keys have the same length."""
    return hashlib.blake2b(b"".join(keys), digest_size=_KEY_BYTES).digest()


def _optional_float(number: float | None) -> float | None:
    return None if number is None else float(number)


def describe_plan(plan: SteeringPlan) -> list[dict[str, Any]]:
    """What is applied, as JSON in the language of a request: one object for each action.

    Positions count from the first token of the prompt. A vector that the request carried has no
    name; its digest identifies it.
    """
    return [_describe_action(plan, action) for action in plan.actions]


def _describe_action(plan: SteeringPlan, action: PlanAction) -> dict[str, Any]:
    fields: dict[str, Any] = {
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
    return fields | {key: value for key, value in optional.items() if value is not None}


def _describe_when(action: PlanAction) -> dict[str, Any]:
    positions = [[start, None if end == OPEN_END else end] for start, end in action.ranges]
    when: dict[str, Any] = {"phase": "both", "positions": positions}
    return when | ({"skip_special": True} if action.skips_special else {})


def _describe_gate(gate: PlanGate) -> dict[str, Any]:
    fields: dict[str, Any] = {"probe": gate.probe, "threshold": gate.threshold}
    optional = {"sharpness": gate.sharpness, "release": gate.release, "latch": gate.latch or None}
    return fields | {key: value for key, value in optional.items() if value is not None}
