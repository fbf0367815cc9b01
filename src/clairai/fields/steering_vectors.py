"""The request fields `steering_vectors`, `prefill_steering_vectors` and `decode_steering_vectors`.

Other steering servers for vLLM use them; clairai reads them as ordinary steering entries. Each is
{hook: {layer: row}}, where a row is a list of numbers or {"vector": numbers, "scale": s}, with the
numbers as a list or packed as base64; or {hook: rows of many layers, packed together}.
D = model width.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Final

import numpy as np

from clairai.errors import PointError, RequestError, VectorError, quote
from clairai.fields import json_fields
from clairai.fields.packed_vector import INLINE_NAME, Dtype, decode_numbers
from clairai.fields.steer import SteerEntry
from clairai.fields.when import Phase, When
from clairai.points import Point
from clairai.probe.model import MAX_WIDTH
from clairai.vector.json_format import parse_row
from clairai.vector.model import MAX_POINTS, Row, Vector

FIELD_PHASES: Final[Mapping[str, Phase]] = {
    "steering_vectors": "both",
    "prefill_steering_vectors": "prompt",
    "decode_steering_vectors": "generation",
}
_DTYPES: Final[Mapping[str, Dtype]] = {
    "float32": "f32",
    "float16": "f16",
    "bfloat16": "bf16",
    "f32": "f32",
    "f16": "f16",
    "bf16": "bf16",
}
_PACKED_LAYERS_KEYS: Final = ("dtype", "shape", "layer_indices", "data", "scales")
_PACKED_ROW_KEYS: Final = ("dtype", "data")
_EXAMPLE: Final = 'write {"post_block": {"15": {"vector": [0.1, ...], "scale": 2.0}}}'


def parse_steering_vectors(given: object, *, what: str) -> tuple[SteerEntry, ...]:
    """The one entry that the field `what` stands for; none if all of its scales are 0."""
    if not isinstance(given, Mapping):
        raise RequestError(f"{what} must be an object, got {quote(given)}; {_EXAMPLE}")
    try:
        rows = _parse_rows(given, what)
        if not rows:
            return ()
        return (SteerEntry(Vector(INLINE_NAME, rows), when=When(FIELD_PHASES[what]), label=what),)
    except (VectorError, PointError) as error:
        raise type(error)(f"{what}: {error.reason}") from None


def _parse_rows(given: Mapping[str, Any], what: str) -> dict[Point, Row]:
    rows: dict[Point, Row] = {}
    for count, (point, scale, row_D) in enumerate(_iterate_rows(given, what)):
        if count >= MAX_POINTS:
            raise RequestError(f"{what} has over {MAX_POINTS} points; give fewer")
        if point in rows:
            raise RequestError(f"{what} names {point} twice; keep one of them")
        if scale != 0:  # a row of scale 0 adds nothing
            rows[point] = row_D
    return rows


def _iterate_rows(given: Mapping[str, Any], what: str) -> Iterator[tuple[Point, float, Row]]:
    for hook, layers in given.items():
        if not isinstance(layers, Mapping):
            raise RequestError(f"{what}.{quote(hook)} holds {quote(layers)}; {_EXAMPLE}")
        if "data" in layers:
            yield from _decode_layers(hook, layers, f"{what}.{quote(hook)}")
            continue
        for layer, one in layers.items():
            point = _parse_point(hook, layer)
            yield point, *_parse_row(point, one, f"{what}.{point}")


def _parse_point(hook: object, layer: object) -> Point:
    """JSON writes a layer as text, Python as a number."""
    name = str(layer) if type(layer) is int and abs(layer) < 10**6 else layer
    if not isinstance(hook, str) or not isinstance(name, str):
        raise PointError(f"{quote(hook)} with layer {quote(layer)} is no tap point; {_EXAMPLE}")
    return Point.parse(f"{hook[:32]}.{name[:32]}")


def _parse_row(point: Point, given: object, what: str) -> tuple[float, Row]:
    scale = 1.0
    if isinstance(given, Mapping):
        asked = json_fields.read_object(what, given, ("vector", "scale"))
        given, scale = (
            asked.get("vector"),
            json_fields.read_factor(f"{what}.scale", asked.get("scale", 1.0)),
        )
    if isinstance(given, Mapping):
        given = _decode_row(given, what)
        return scale, _scale_row(given, scale)
    return scale, parse_row(str(point), {"vector": given, "scale": scale})


def _decode_row(given: Mapping[str, Any], what: str) -> Row:
    asked = json_fields.read_object(what, given, _PACKED_ROW_KEYS)
    dtype, text = _parse_dtype(asked, what), asked.get("data")
    if not isinstance(text, str):
        raise RequestError(f"{what}.data must be base64 text, got {quote(text)}")
    size = 4 if dtype == "f32" else 2
    return decode_numbers(
        text, dtype, (len(text) // 4 * 3 - text[-2:].count("=")) // size, what=what
    )


def _decode_layers(
    hook: object, given: Mapping[str, Any], what: str
) -> Iterator[tuple[Point, float, Row]]:
    asked = json_fields.read_object(what, given, _PACKED_LAYERS_KEYS)
    layers = json_fields.read_list(
        f"{what}.layer_indices", asked.get("layer_indices"), limit=MAX_POINTS
    )
    shape = json_fields.read_list(f"{what}.shape", asked.get("shape"), limit=2)
    if len(shape) != 2 or type(shape[0]) is not int or shape[0] != len(layers):
        raise RequestError(f"{what}.shape must be [layers, width] of its layer_indices")
    width = json_fields.read_integer(f"{what}.shape[1]", shape[1], low=1, high=MAX_WIDTH)
    if not isinstance(asked["data"], str):
        raise RequestError(f"{what}.data must be base64 text, got {quote(asked['data'])}")
    numbers = decode_numbers(
        asked["data"], _parse_dtype(asked, what), len(layers) * width, what=f"{what}.data"
    )
    scales = _parse_scales(asked.get("scales"), len(layers), what)
    for layer, scale, row_D in zip(layers, scales, numbers.reshape(-1, width), strict=True):
        yield _parse_point(hook, layer), scale, _scale_row(row_D, scale)


def _parse_scales(given: object, count: int, what: str) -> list[float]:
    if given is None:
        return [1.0] * count
    scales = json_fields.read_list(f"{what}.scales", given, limit=MAX_POINTS)
    if len(scales) != count:
        raise RequestError(f"{what}.scales has {len(scales)} numbers for {count} layers")
    return [json_fields.read_factor(f"{what}.scales", scale) for scale in scales]


def _parse_dtype(asked: Mapping[str, Any], what: str) -> Dtype:
    given = json_fields.read_choice(f"{what}.dtype", asked.get("dtype", "float32"), tuple(_DTYPES))
    return _DTYPES[given]


def _scale_row(row_D: Row, scale: float) -> Row:
    with np.errstate(all="ignore"):  # what overflows is refused by Vector as infinity
        return (row_D.astype(np.float64) * scale).astype(np.float32)
