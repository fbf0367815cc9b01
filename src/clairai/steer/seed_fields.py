"""Takes `steering_vectors` and its two sisters, as requests of the seeds carry them; gives entries.

Each is {hook: {layer: row}}: a row is a list of numbers, or {"vector": numbers, "scale": s}, with
numbers as a list or packed. Or {hook: packed rows of many layers}, as the seeds send over HTTP.
"""

# L = layers in one pack, D = model width

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Final

import numpy as np

from clairai.errors import PointError, RequestError, VectorError
from clairai.points import Point, quote
from clairai.probe.model import MAX_WIDTH
from clairai.steer import fields
from clairai.steer.packed import INLINE, Dtype, decode
from clairai.steer.seed import row
from clairai.steer.spec import Entry
from clairai.steer.vector import MAX_POINTS, Row, Vector
from clairai.steer.when import Phase, When

PHASES: Final[Mapping[str, Phase]] = {
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
_LAYERS: Final = ("dtype", "shape", "layer_indices", "data", "scales")
_ROW: Final = ("dtype", "data")
_SHAPE: Final = 'write {"post_block": {"15": {"vector": [0.1, ...], "scale": 2.0}}}'


def parse_seed(given: object, *, what: str) -> tuple[Entry, ...]:
    """The entry that one of the fields is; none where all of its scales are 0."""
    if not isinstance(given, Mapping):
        raise RequestError(f"{what} must be an object, got {quote(given)}; {_SHAPE}")
    try:
        rows = _rows(given, what)
        if not rows:
            return ()
        return (Entry(Vector(INLINE, rows), when=When(PHASES[what]), label=what),)
    except (VectorError, PointError) as error:
        raise type(error)(f"{what}: {error.reason}") from None


def _rows(given: Mapping[str, Any], what: str) -> dict[Point, Row]:
    rows: dict[Point, Row] = {}
    for count, (point, scale, row_D) in enumerate(_scaled(given, what)):
        if count >= MAX_POINTS:
            raise RequestError(f"{what} has over {MAX_POINTS} points; give fewer")
        if point in rows:
            raise RequestError(f"{what} names {point} twice; keep one of them")
        if scale != 0:  # adds nothing, whatever the row holds
            rows[point] = row_D
    return rows


def _scaled(given: Mapping[str, Any], what: str) -> Iterator[tuple[Point, float, Row]]:
    for hook, layers in given.items():
        if not isinstance(layers, Mapping):
            raise RequestError(f"{what}.{quote(hook)} holds {quote(layers)}; {_SHAPE}")
        if "data" in layers:
            yield from _packed_layers(hook, layers, f"{what}.{quote(hook)}")
            continue
        for layer, one in layers.items():
            point = _point(hook, layer)
            yield point, *_row(point, one, f"{what}.{point}")


def _point(hook: object, layer: object) -> Point:
    """JSON writes a layer as text, Python as a number."""
    name = str(layer) if type(layer) is int and abs(layer) < 10**6 else layer
    if not isinstance(hook, str) or not isinstance(name, str):
        raise PointError(f"{quote(hook)} with layer {quote(layer)} is no tap point; {_SHAPE}")
    return Point.parse(f"{hook[:32]}.{name[:32]}")


def _row(point: Point, given: object, what: str) -> tuple[float, Row]:
    scale = 1.0
    if isinstance(given, Mapping):
        asked = fields.fields(what, given, ("vector", "scale"))
        given, scale = asked.get("vector"), fields.number(f"{what}.scale", asked.get("scale", 1.0))
    if isinstance(given, Mapping):
        given = _packed_row(given, what)
        return scale, _times(given, scale)
    return scale, row(str(point), {"vector": given, "scale": scale})


def _packed_row(given: Mapping[str, Any], what: str) -> Row:
    asked = fields.fields(what, given, _ROW)
    dtype, text = _dtype(asked, what), asked.get("data")
    if not isinstance(text, str):
        raise RequestError(f"{what}.data must be base64 text, got {quote(text)}")
    size = 4 if dtype == "f32" else 2
    return decode(text, dtype, (len(text) // 4 * 3 - text[-2:].count("=")) // size, what=what)


def _packed_layers(
    hook: object, given: Mapping[str, Any], what: str
) -> Iterator[tuple[Point, float, Row]]:
    asked = fields.fields(what, given, _LAYERS)
    layers = fields.listed(f"{what}.layer_indices", asked.get("layer_indices"), limit=MAX_POINTS)
    shape = fields.listed(f"{what}.shape", asked.get("shape"), limit=2)
    if len(shape) != 2 or type(shape[0]) is not int or shape[0] != len(layers):
        raise RequestError(f"{what}.shape must be [layers, width] of its layer_indices")
    width = fields.whole(f"{what}.shape[1]", shape[1], low=1, high=MAX_WIDTH)
    if not isinstance(asked["data"], str):
        raise RequestError(f"{what}.data must be base64 text, got {quote(asked['data'])}")
    numbers = decode(asked["data"], _dtype(asked, what), len(layers) * width, what=f"{what}.data")
    scales = _scales(asked.get("scales"), len(layers), what)
    for layer, scale, row_D in zip(layers, scales, numbers.reshape(-1, width), strict=True):
        yield _point(hook, layer), scale, _times(row_D, scale)


def _scales(given: object, count: int, what: str) -> list[float]:
    if given is None:
        return [1.0] * count
    scales = fields.listed(f"{what}.scales", given, limit=MAX_POINTS)
    if len(scales) != count:
        raise RequestError(f"{what}.scales has {len(scales)} numbers for {count} layers")
    return [fields.number(f"{what}.scales", scale) for scale in scales]


def _dtype(asked: Mapping[str, Any], what: str) -> Dtype:
    given = fields.choice(f"{what}.dtype", asked.get("dtype", "float32"), tuple(_DTYPES))
    return _DTYPES[given]


def _times(row_D: Row, scale: float) -> Row:
    with np.errstate(all="ignore"):  # what overflows is refused by Vector as infinity
        return (row_D.astype(np.float64) * scale).astype(np.float32)
