"""Takes the `steer` list of a request or a tier; gives checked entries, and their JSON again."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final, cast, get_args

from clairai.errors import RequestError
from clairai.points import Point, quote
from clairai.steer import fields
from clairai.steer.course import Op
from clairai.steer.packed import Packed, pack, parse_packed, point_of
from clairai.steer.vector import MAX_POINTS, Vector
from clairai.steer.when import When, parse_when

OPS: Final[tuple[Op, ...]] = get_args(Op)
MAX_ENTRIES: Final = 32  # of a request; and of all tiers together

_KNOWN: Final = (
    *("vector", "digest", "scale", "op", "match_norm", "low", "high", "points", "when", "gate"),
)
_GATE: Final = ("probe", "threshold", "sharpness", "latch", "release")
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
class Entry:
    """One vector and what it is to do, as it was asked for."""

    vector: str | Packed | Vector  # a name, or one that came with the request
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


def parse_entries(given: object, *, what: str) -> tuple[Entry, ...]:
    """Decoded JSON as entries; a `vector` may be a Vector. RequestError or PointError if wrong."""
    every = fields.listed(what, given, limit=MAX_ENTRIES)
    return tuple(_entry(one, f"{what}[{i}]") for i, one in enumerate(every))


def to_json(entry: Entry) -> dict[str, Any]:
    """What parse_entries reads as an equal entry."""
    vector = pack(entry.vector) if isinstance(entry.vector, Vector) else entry.vector
    return _written(entry, vector.written() if isinstance(vector, Packed) else vector)


def describe(entry: Entry) -> dict[str, Any]:
    """`to_json` for people: a vector that came along is shown by its digest and points."""
    vector = entry.vector
    if isinstance(vector, Vector):
        return _written(entry, {"digest": vector.digest, "points": [*map(str, vector.points)]})
    if isinstance(vector, Packed):
        return _written(entry, {"points": [str(point) for point, _ in vector.rows]})
    return _written(entry, vector)


def _written(entry: Entry, vector: object) -> dict[str, Any]:
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


def _entry(given: object, what: str) -> Entry:
    asked = fields.fields(what, given, _KNOWN)
    if "vector" not in asked:
        raise RequestError(f"{what} names no vector; give a name, or a vector as base64")
    op = cast(Op, fields.choice(f"{what}.op", asked.get("op", "add"), OPS))
    points, gate = asked.get("points"), asked.get("gate")
    return Entry(
        vector=_vector(f"{what}.vector", asked["vector"]),
        digest=_digest(f"{what}.digest", asked.get("digest")),
        scale=fields.number(f"{what}.scale", asked.get("scale", 1.0)),
        op=op,
        is_matched=_matched(what, asked.get("match_norm", False), op),
        **_bounds(what, asked, op),
        points=None if points is None else _points(f"{what}.points", points),
        when=parse_when(asked.get("when", "both"), what=f"{what}.when"),
        gate=None if gate is None else _gate(f"{what}.gate", gate),
        label=what,
    )


def _vector(what: str, given: object) -> str | Packed | Vector:
    if isinstance(given, Vector):
        return given
    if isinstance(given, Mapping):
        return parse_packed(given, what=what)
    if isinstance(given, str):
        return fields.text(what, given)
    raise RequestError(
        f"{what} must be the name of a vector, or an object with its points as base64, "
        f"got {quote(given)}"
    )


def _digest(what: str, given: object) -> str | None:
    if given is None or (isinstance(given, str) and _DIGEST.fullmatch(given)):
        return given
    raise RequestError(
        f"{what} must be 64 hexadecimal digits, as a list of vectors gives them, got {quote(given)}"
    )


def _matched(what: str, given: object, op: Op) -> bool:
    is_matched = fields.boolean(f"{what}.match_norm", given)
    if is_matched and op != "add":
        raise RequestError(f"{what}: match_norm goes with add, not with {op}; leave it out")
    return is_matched


def _bounds(what: str, asked: Mapping[str, Any], op: Op) -> dict[str, Any]:
    low = fields.optional_number(f"{what}.low", asked.get("low"))
    high = fields.optional_number(f"{what}.high", asked.get("high"))
    if op != "clamp" and (low, high) != (None, None):
        raise RequestError(f"{what}: low and high go with clamp, not with {op}; leave them out")
    if op == "clamp" and (low, high) == (None, None):
        raise RequestError(f"{what}: clamp needs low, high or both; give one")
    if low is not None and high is not None and low > high:
        raise RequestError(f"{what}: low is {low} and high is {high}; low must not be above high")
    return {"low": low, "high": high}


def _points(what: str, given: object) -> tuple[Point, ...]:
    names = fields.listed(what, given, limit=MAX_POINTS)
    found = tuple(sorted({point_of(what, name) for name in names}))
    if not found or len(found) != len(names):
        raise RequestError(
            f"{what} must name each point once, and at least one; leave it out for all points"
        )
    return found


def _gate(what: str, given: object) -> GateSpec:
    asked = fields.fields(what, given, _GATE)
    gate = GateSpec(
        probe=fields.text(f"{what}.probe", asked.get("probe")),
        threshold=fields.optional_number(f"{what}.threshold", asked.get("threshold")),
        sharpness=fields.optional_number(f"{what}.sharpness", asked.get("sharpness")),
        latch=fields.boolean(f"{what}.latch", asked.get("latch", False)),
        release=fields.optional_number(f"{what}.release", asked.get("release")),
    )
    if gate.sharpness == 0:
        raise RequestError(f"{what}: sharpness is 0, so the gate would not move; leave it out")
    if gate.release is not None and gate.sharpness is not None:
        raise RequestError(f"{what}: release goes with a hard gate; leave sharpness out")
    if gate.release is not None and gate.latch:
        raise RequestError(f"{what}: a latch never closes; leave release or latch out")
    return gate
