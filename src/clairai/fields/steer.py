"""The `steer` list of a request or of a global tier: which vectors act, where and how."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final, Literal, cast, get_args

from clairai.errors import RequestError, quote
from clairai.fields import json_fields
from clairai.fields.packed_vector import PackedVector, pack_vector, parse_packed, parse_point
from clairai.fields.when import When, parse_when
from clairai.points import Point
from clairai.vector.model import MAX_POINTS, Vector

Op = Literal["add", "ablate", "clamp", "replace"]
OPS: Final[tuple[Op, ...]] = get_args(Op)
MAX_ENTRIES: Final = 32  # of a request, and of all tiers together

_ENTRY_KEYS: Final = (
    *("vector", "digest", "scale", "op", "match_norm", "low", "high", "points", "when", "gate"),
)
_GATE_KEYS: Final = ("probe", "threshold", "sharpness", "latch", "release")
_DIGEST: Final = re.compile("[0-9a-f]{64}")


@dataclass(frozen=True)
class GateSpec:
    """The probe that opens and closes an entry, by name."""

    probe: str
    threshold: float | None = None  # None: the probe's own
    sharpness: float | None = None  # None: fully open or closed
    latch: bool = False  # never closes again
    release: float | None = None  # closes below this; None: below the threshold

    def to_json(self) -> dict[str, Any]:
        values = {"threshold": self.threshold, "sharpness": self.sharpness, "release": self.release}
        fields = {key: value for key, value in values.items() if value is not None}
        return {"probe": self.probe, **fields} | ({"latch": True} if self.latch else {})


@dataclass(frozen=True)
class SteerEntry:
    """One vector and what it does, as the request asks for it."""

    vector: str | PackedVector | Vector  # a name, or one that came with the request
    digest: str | None = None  # the content that the vector must have
    scale: float = 1.0
    op: Op = "add"
    match_norm: bool = False  # add: scale the vector to the length of the row
    low: float | None = None  # clamp
    high: float | None = None
    points: tuple[Point, ...] | None = None  # None: all of the vector's
    when: When = field(default_factory=When)
    gate: GateSpec | None = None
    label: str = field(default="steer", compare=False)  # its name in error messages

    def to_json(self) -> dict[str, Any]:
        """What `parse_entries` reads as an equal entry."""
        vector = pack_vector(self.vector) if isinstance(self.vector, Vector) else self.vector
        return self._fields(vector.to_json() if isinstance(vector, PackedVector) else vector)

    def describe(self) -> dict[str, Any]:
        """`to_json` for people: an inline vector is shown by its digest and points."""
        vector = self.vector
        if isinstance(vector, Vector):
            return self._fields({"digest": vector.digest, "points": [*map(str, vector.points)]})
        if isinstance(vector, PackedVector):
            return self._fields({"points": [str(point) for point, _ in vector.rows]})
        return self._fields(vector)

    def _fields(self, vector: object) -> dict[str, Any]:
        optional = {
            "digest": self.digest,
            "match_norm": self.match_norm or None,
            "low": self.low,
            "high": self.high,
            "points": None if self.points is None else [*map(str, self.points)],
            "gate": None if self.gate is None else self.gate.to_json(),
        }
        always = {"vector": vector, "scale": self.scale, "op": self.op, "when": self.when.to_json()}
        return always | {key: value for key, value in optional.items() if value is not None}


def parse_entries(given: object, *, what: str) -> tuple[SteerEntry, ...]:
    """Read decoded JSON, where a `vector` may also be a Vector.

    RequestError or PointError if it is wrong.
    """
    entries = json_fields.read_list(what, given, limit=MAX_ENTRIES)
    return tuple(_parse_entry(one, f"{what}[{i}]") for i, one in enumerate(entries))


def _parse_entry(given: object, what: str) -> SteerEntry:
    asked = json_fields.read_object(what, given, _ENTRY_KEYS)
    if "vector" not in asked:
        raise RequestError(f"{what} names no vector; give a name, or a vector as base64")
    op = cast(Op, json_fields.read_choice(f"{what}.op", asked.get("op", "add"), OPS))
    points, gate = asked.get("points"), asked.get("gate")
    return SteerEntry(
        vector=_parse_vector(f"{what}.vector", asked["vector"]),
        digest=_parse_digest(f"{what}.digest", asked.get("digest")),
        scale=json_fields.read_factor(f"{what}.scale", asked.get("scale", 1.0)),
        op=op,
        match_norm=_parse_match_norm(what, asked.get("match_norm", False), op),
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
    match_norm = json_fields.read_boolean(f"{what}.match_norm", given)
    if match_norm and op != "add":
        raise RequestError(f"{what}: match_norm goes with add, not with {op}; leave it out")
    return match_norm


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
    sharpness = asked.get("sharpness")
    gate = GateSpec(
        probe=json_fields.read_string(f"{what}.probe", asked.get("probe")),
        threshold=json_fields.read_optional_number(f"{what}.threshold", asked.get("threshold")),
        sharpness=None
        if sharpness is None
        else json_fields.read_factor(f"{what}.sharpness", sharpness),
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
