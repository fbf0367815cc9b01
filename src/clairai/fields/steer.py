"""Takes the `steer` list of a request or a tier; gives checked entries, and their JSON again."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final, cast, get_args

from clairai.engine.steer.steering_plan import Op
from clairai.errors import RequestError
from clairai.fields import json_fields
from clairai.fields.packed_vector import PackedVector, pack_vector, parse_packed, parse_point
from clairai.fields.when import When, parse_when
from clairai.points import Point, quote
from clairai.vector.model import MAX_POINTS, Vector

OPS: Final[tuple[Op, ...]] = get_args(Op)
MAX_ENTRIES: Final = 32  # of a request; and of all tiers together

_ENTRY_KEYS: Final = (
    *("vector", "digest", "scale", "op", "match_norm", "low", "high", "points", "when", "gate"),
)
_GATE_KEYS: Final = ("probe", "threshold", "sharpness", "latch", "release")
_DIGEST: Final = re.compile("[0-9a-f]{64}")


@dataclass(frozen=True)
class GateSpec:
    """Which probe opens an entry; what it reads is known when the entry is resolved."""

    probe: str
    threshold: float | None = None  # None: the probe's own
    sharpness: float | None = None  # None: open or closed, nothing between
    latch: bool = False
    release: float | None = None

    def written(self) -> dict[str, Any]:
        values = {"threshold": self.threshold, "sharpness": self.sharpness, "release": self.release}
        written = {key: value for key, value in values.items() if value is not None}
        return {"probe": self.probe, **written} | ({"latch": True} if self.latch else {})


@dataclass(frozen=True)
class SteerEntry:
    """One vector and what it is to do, as it was asked for."""

    vector: str | PackedVector | Vector  # a name, or one that came with the request
    digest: str | None = None  # that the vector must have
    scale: float = 1.0
    op: Op = "add"
    is_matched: bool = False
    low: float | None = None
    high: float | None = None
    points: tuple[Point, ...] | None = None  # None: all of the vector's
    when: When = field(default_factory=When)
    gate: GateSpec | None = None
    label: str = field(default="steer", compare=False)  # what errors call it


def parse_entries(given: object, *, what: str) -> tuple[SteerEntry, ...]:
    """Decoded JSON as entries; a `vector` may be a Vector. RequestError or PointError if wrong."""
    every = json_fields.read_list(what, given, limit=MAX_ENTRIES)
    return tuple(_parse_entry(one, f"{what}[{i}]") for i, one in enumerate(every))


def entry_to_json(entry: SteerEntry) -> dict[str, Any]:
    """What parse_entries reads as an equal entry."""
    vector = pack_vector(entry.vector) if isinstance(entry.vector, Vector) else entry.vector
    return _entry_fields(entry, vector.written() if isinstance(vector, PackedVector) else vector)


def describe_entry(entry: SteerEntry) -> dict[str, Any]:
    """`to_json` for people: a vector that came along is shown by its digest and points."""
    vector = entry.vector
    if isinstance(vector, Vector):
        return _entry_fields(entry, {"digest": vector.digest, "points": [*map(str, vector.points)]})
    if isinstance(vector, PackedVector):
        return _entry_fields(entry, {"points": [str(point) for point, _ in vector.rows]})
    return _entry_fields(entry, vector)


def _entry_fields(entry: SteerEntry, vector: object) -> dict[str, Any]:
    optional = {
        "digest": entry.digest,
        "match_norm": entry.is_matched or None,
        "low": entry.low,
        "high": entry.high,
        "points": None if entry.points is None else [*map(str, entry.points)],
        "gate": None if entry.gate is None else entry.gate.written(),
    }
    always = {"vector": vector, "scale": entry.scale, "op": entry.op, "when": entry.when.written()}
    return always | {key: value for key, value in optional.items() if value is not None}


def _parse_entry(given: object, what: str) -> SteerEntry:
    asked = json_fields.read_object(what, given, _ENTRY_KEYS)
    if "vector" not in asked:
        raise RequestError(f"{what} names no vector; give a name, or a vector as base64")
    op = cast(Op, json_fields.read_choice(f"{what}.op", asked.get("op", "add"), OPS))
    points, gate = asked.get("points"), asked.get("gate")
    return SteerEntry(
        vector=_parse_vector(f"{what}.vector", asked["vector"]),
        digest=_parse_digest(f"{what}.digest", asked.get("digest")),
        scale=json_fields.read_number(f"{what}.scale", asked.get("scale", 1.0)),
        op=op,
        is_matched=_parse_match_norm(what, asked.get("match_norm", False), op),
        **_parse_clamp_bounds(what, asked, op),
        points=None if points is None else _parse_points(f"{what}.points", points),
        when=parse_when(asked.get("when", "both"), what=f"{what}.when"),
        gate=None if gate is None else _parse_gate(f"{what}.gate", gate),
        label=what,
    )


def _parse_vector(what: str, given: object) -> str | PackedVector | Vector:
    if isinstance(given, Vector):
        return given
    if isinstance(given, Mapping):
        return parse_packed(given, what=what)
    if isinstance(given, str):
        return json_fields.read_string(what, given)
    raise RequestError(
        f"{what} must be the name of a vector, or an object with its points as base64, "
        f"got {quote(given)}"
    )


def _parse_digest(what: str, given: object) -> str | None:
    if given is None or (isinstance(given, str) and _DIGEST.fullmatch(given)):
        return given
    raise RequestError(
        f"{what} must be 64 hexadecimal digits, as a list of vectors gives them, got {quote(given)}"
    )


def _parse_match_norm(what: str, given: object, op: Op) -> bool:
    is_matched = json_fields.read_boolean(f"{what}.match_norm", given)
    if is_matched and op != "add":
        raise RequestError(f"{what}: match_norm goes with add, not with {op}; leave it out")
    return is_matched


def _parse_clamp_bounds(what: str, asked: Mapping[str, Any], op: Op) -> dict[str, Any]:
    low = json_fields.read_optional_number(f"{what}.low", asked.get("low"))
    high = json_fields.read_optional_number(f"{what}.high", asked.get("high"))
    if op != "clamp" and (low, high) != (None, None):
        raise RequestError(f"{what}: low and high go with clamp, not with {op}; leave them out")
    if op == "clamp" and (low, high) == (None, None):
        raise RequestError(f"{what}: clamp needs low, high or both; give one")
    if low is not None and high is not None and low > high:
        raise RequestError(f"{what}: low is {low} and high is {high}; low must not be above high")
    return {"low": low, "high": high}


def _parse_points(what: str, given: object) -> tuple[Point, ...]:
    names = json_fields.read_list(what, given, limit=MAX_POINTS)
    found = tuple(sorted({parse_point(what, name) for name in names}))
    if not found or len(found) != len(names):
        raise RequestError(
            f"{what} must name each point once, and at least one; leave it out for all points"
        )
    return found


def _parse_gate(what: str, given: object) -> GateSpec:
    asked = json_fields.read_object(what, given, _GATE_KEYS)
    gate = GateSpec(
        probe=json_fields.read_string(f"{what}.probe", asked.get("probe")),
        threshold=json_fields.read_optional_number(f"{what}.threshold", asked.get("threshold")),
        sharpness=json_fields.read_optional_number(f"{what}.sharpness", asked.get("sharpness")),
        latch=json_fields.read_boolean(f"{what}.latch", asked.get("latch", False)),
        release=json_fields.read_optional_number(f"{what}.release", asked.get("release")),
    )
    if gate.sharpness == 0:
        raise RequestError(f"{what}: sharpness is 0, so the gate would not move; leave it out")
    if gate.release is not None and gate.sharpness is not None:
        raise RequestError(f"{what}: release goes with a hard gate; leave sharpness out")
    if gate.release is not None and gate.latch:
        raise RequestError(f"{what}: a latch never closes; leave release or latch out")
    return gate
