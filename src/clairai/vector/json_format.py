"""Vectors as JSON, in the shape of the request field `steering_vectors`; reads untrusted bytes.

`{"post_block": {"15": [0.1, 0.2]}, "pre_attn": {"3": {"vector": [0.5, 0.6], "scale": 2.0}}}`:
a row for each hook and layer. A scale is multiplied into its row, since a Vector has one scale.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Final

import numpy as np

from clairai.errors import VectorError, quote
from clairai.points import Point
from clairai.probe.file_format import parse_json_object
from clairai.probe.model import MAX_WIDTH
from clairai.vector.model import MAX_POINTS, Row, Vector
from clairai.vector.safetensors_format import naming_source

MAX_NBYTES: Final = 16 << 20  # as Python objects it may take twenty times that
METHOD: Final = "JSON of steering_vectors"
_EXAMPLE: Final = 'write {"post_block": {"15": [0.1, 0.2, ...]}}'


def loads(data: bytes, *, source: str, name: str) -> Vector:
    """The vector in `data`, called `name`; VectorError, naming `source`, if it holds none."""
    with naming_source(source):
        if len(data) > MAX_NBYTES:
            raise VectorError(f"{len(data)} bytes, and a vector's JSON has at most {MAX_NBYTES}")
        rows: dict[Point, Row] = {}
        for point, given in _rows_by_point(parse_json_object(data)):
            if point in rows:
                raise VectorError(f"{point} is there twice, under two names; keep one of them")
            if len(rows) == MAX_POINTS:
                raise VectorError(f"over {MAX_POINTS} points; give fewer")
            rows[point] = parse_row(str(point), given)
        if not rows:
            raise VectorError(f"holds no point; {_EXAMPLE}")
        return Vector(name, rows, method=METHOD)


def _rows_by_point(hooks: Mapping[str, object]) -> Iterator[tuple[Point, object]]:
    for hook, layers in hooks.items():
        if not isinstance(layers, dict):
            raise VectorError(f"{quote(hook)} holds {quote(layers)}; {_EXAMPLE}")
        for layer, given in layers.items():
            yield Point.parse(f"{hook}.{layer}"), given


def parse_row(place: str, given: object) -> Row:
    """Read a list of numbers, or `{"vector": [...], "scale": s}` with the scale multiplied in."""
    scale: object = 1.0
    if isinstance(given, dict):
        if not {"vector"} <= given.keys() <= {"vector", "scale"}:
            raise VectorError(f"{place} holds {quote(given)}; give vector, and scale if need be")
        scale, given = given.get("scale", 1.0), given["vector"]
    if not isinstance(scale, int | float) or isinstance(scale, bool):
        raise VectorError(f"{place} has scale {quote(scale)}; give a number")
    if not isinstance(given, list) or not 1 <= len(given) <= MAX_WIDTH:
        raise VectorError(f"{place} holds {quote(given)}; give a list of 1 to {MAX_WIDTH} numbers")
    # type() and not isinstance(): true and false are ints to isinstance.
    if any(type(item) not in (int, float) for item in given):
        raise VectorError(f"{place} holds something other than numbers; give numbers only")
    try:
        with np.errstate(all="ignore"):  # Vector refuses infinity with a message
            return (np.array(given, np.float64) * np.float64(scale)).astype(np.float32)
    except OverflowError:
        raise VectorError(f"{place} holds a number beyond float64; use finite numbers") from None
