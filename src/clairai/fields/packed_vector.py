"""Vectors that travel inside a request, packed as base64. N = points, D = model width."""

from __future__ import annotations

import base64
import binascii
import functools
import importlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final, Literal, cast

import numpy as np
from numpy.typing import NDArray

from clairai.errors import PointError, RequestError, quote
from clairai.fields import json_fields
from clairai.points import Point
from clairai.vector.model import MAX_POINTS, Vector

Dtype = Literal["f32", "f16", "bf16"]
INLINE_NAME: Final = "inline"  # the name of a vector that travels inside a request

# vLLM installs pybase64, which decodes forty times as fast as the standard library.
try:
    _b64decode = functools.partial(importlib.import_module("pybase64").b64decode, validate=True)
except ImportError:
    _b64decode = functools.partial(binascii.a2b_base64, strict_mode=True)

_NBYTES: Final[Mapping[str, int]] = {"f32": 4, "f16": 2, "bf16": 2}
_KEYS: Final = ("dtype", "points")


@dataclass(frozen=True)
class PackedVector:
    """A vector as the request carries it; decoding waits until the model's width is known."""

    dtype: Dtype
    rows: tuple[tuple[Point, str], ...]

    def unpack(self, width: int, *, what: str) -> Vector:
        # Row by row into one block: touching fresh memory costs more than decoding.
        block_ND = np.empty((len(self.rows), width), np.float32)
        for row_D, (point, text) in zip(block_ND, self.rows, strict=True):
            row_D[:] = decode_numbers(
                text, self.dtype, width, what=f"{what}.points[{str(point)!r}]"
            )
        block_ND.setflags(write=False)  # Vector takes a read-only block without a copy
        points = (point for point, _ in self.rows)
        return Vector(INLINE_NAME, dict(zip(points, block_ND, strict=True)))

    def to_json(self) -> dict[str, Any]:
        return {"dtype": self.dtype, "points": {str(point): text for point, text in self.rows}}


def parse_packed(given: object, *, what: str) -> PackedVector:
    asked = json_fields.read_object(what, given, _KEYS)
    dtype = json_fields.read_choice(f"{what}.dtype", asked.get("dtype", "f32"), tuple(_NBYTES))
    rows = asked.get("points")
    if not isinstance(rows, Mapping) or not 1 <= len(rows) <= MAX_POINTS:
        raise RequestError(
            f"{what}.points must be an object of 1 to {MAX_POINTS} points, such as "
            f'{{"post_block.15": "<base64>"}}, got {quote(rows)}'
        )
    found: dict[Point, str] = {}
    for name, text in rows.items():
        point = parse_point(f"{what}.points", name)
        if not isinstance(text, str):
            raise RequestError(
                f"{what}.points[{str(point)!r}] must be base64 text, got {quote(text)}"
            )
        if point in found:
            raise RequestError(f"{what}.points names {point} twice; keep one of them")
        found[point] = text
    return PackedVector(cast(Dtype, dtype), tuple(sorted(found.items())))


def parse_point(what: str, name: object) -> Point:
    try:
        return Point.parse(cast(str, name))
    except PointError as error:
        raise PointError(f"{what}: {error.reason}") from None


def pack_vector(vector: Vector) -> PackedVector:
    """Lossless: the vector's own float32 numbers."""
    rows = [(point, base64.b64encode(row_D.tobytes())) for point, row_D in vector.rows.items()]
    return PackedVector("f32", tuple((point, text.decode()) for point, text in rows))


def decode_numbers(text: str, dtype: Dtype, count: int, *, what: str) -> NDArray[np.float32]:
    """Decode `count` little-endian numbers; the length is checked before anything is decoded."""
    nbytes = count * _NBYTES[dtype]
    expected = (nbytes + 2) // 3 * 4
    if len(text) != expected:
        raise RequestError(
            f"{what} has {len(text)} characters of base64; {count} numbers of {dtype}, "
            f"as many as belong here, have {expected}"
        )
    try:
        data = _b64decode(text)
    except (binascii.Error, ValueError):  # ValueError: not ASCII
        raise RequestError(f"{what} is not base64; use the standard alphabet, padded") from None
    if len(data) != nbytes:
        raise RequestError(f"{what} holds {len(data)} bytes, and {count} {dtype} are {nbytes}")
    return _to_float32(data, dtype)


def _to_float32(data: bytes, dtype: Dtype) -> NDArray[np.float32]:
    if dtype == "f32":
        return np.frombuffer(data, "<f4").astype(np.float32, copy=False)
    if dtype == "f16":
        with np.errstate(invalid="ignore"):  # Vector refuses NaN with a message
            return np.frombuffer(data, "<f2").astype(np.float32)
    return (np.frombuffer(data, "<u2").astype(np.uint32) << 16).view(np.float32)
