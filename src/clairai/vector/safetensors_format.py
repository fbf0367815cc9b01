"""Vectors as safetensors, clairai's own format; reads untrusted bytes.

The file holds one tensor [D] for each point, named after it, such as `post_block.15`, and string
metadata: clairai="vector/1", name, and where set scale, description, model and method.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Final

import numpy as np
import safetensors

from clairai.errors import PointError, ProbeError, VectorError, printable, quote
from clairai.points import Point
from clairai.probe.file_format import (
    METADATA,
    FileFormat,
    pack_file,
    parse_number,
    read_metadata,
    to_float32,
    unpack_file,
)
from clairai.probe.model import MAX_WIDTH
from clairai.vector.model import MAX_NUMBERS, MAX_POINTS, Row, Vector

FORMAT: Final = "vector/1"
MAX_HEADER: Final = 256 << 10
MAX_NBYTES: Final = 4 * MAX_NUMBERS + MAX_HEADER

_ITEMSIZE: Final = {"F32": 4, "F16": 2, "BF16": 2}
_SAVE_AGAIN: Final = "save it again with clairai.vector.files.save"
KIND: Final = FileFormat(
    noun="vector",
    format=FORMAT,
    max_nbytes=MAX_NBYTES,
    max_header=MAX_HEADER,
    other="this is no vector in safetensors, GGUF or JSON: give one of those",
    again=_SAVE_AGAIN,
)


@contextmanager
def naming_source(source: str) -> Iterator[None]:
    """Turn every error of a parser into a VectorError that names the file."""
    try:
        yield
    except (VectorError, ProbeError, PointError) as error:
        raise VectorError(f"{quote(source, limit=200)}: {error.reason}") from None
    except RecursionError:
        raise VectorError(
            f"{quote(source, limit=200)}: nested too deep; a vector's file has three levels"
        ) from None


def dumps(vector: Vector) -> bytes:
    """The file's bytes; equal vectors give equal bytes."""
    header: dict[str, object] = {METADATA: _to_metadata(vector)}
    nbytes = 4 * vector.width
    for index, point in enumerate(vector.points):
        extent = [index * nbytes, (index + 1) * nbytes]
        header[str(point)] = {"dtype": "F32", "shape": [vector.width], "data_offsets": extent}
    return pack_file(
        header, b"".join(row_D.astype("<f4").tobytes() for row_D in vector.rows.values())
    )


def loads(data: bytes, *, source: str) -> Vector:
    """The vector in `data`; VectorError, naming `source`, if it holds none."""
    with naming_source(source):
        header, nbytes = unpack_file(data, KIND)
        said = read_metadata(header.pop(METADATA, None), KIND)
        points = _points(header)
        _check_extents(header, nbytes)
        return _vector(said, _rows(data, points))


def _to_metadata(vector: Vector) -> dict[str, str]:
    said = {"clairai": FORMAT, "name": vector.name, "scale": repr(vector.scale)}
    optional = {
        "description": vector.description,
        "model": vector.model,
        "method": vector.method,
    }
    return said | {key: value for key, value in optional.items() if value is not None}


def _points(header: Mapping[str, object]) -> dict[str, Point]:
    """The point of each tensor; two names of one point are refused."""
    if not 1 <= len(header) <= MAX_POINTS:
        raise VectorError(
            f"holds {len(header)} tensors; give 1 to {MAX_POINTS}, one for each point"
        )
    points = {name: Point.parse(name) for name in header}
    if len(set(points.values())) < len(points):
        raise VectorError(
            "two tensors are of one point (post_block.4 and resid_post.4, say); keep one of them"
        )
    return points


def _check_extents(header: Mapping[str, object], nbytes: int) -> None:
    # Stricter than safetensors, and before it: the library never sees a header we would refuse.
    extents = sorted(_extent(name, tensor) for name, tensor in header.items())
    ends = [0, *(end for _, end in extents)]
    if [start for start, _ in extents] != ends[:-1] or ends[-1] != nbytes:
        raise VectorError(
            f"its tensors do not fill its {nbytes} bytes one after the other; copy the file again"
        )


def _extent(name: str, tensor: object) -> tuple[int, int]:
    if not isinstance(tensor, dict) or len(tensor) != 3:
        raise VectorError(f"{name} is {quote(tensor)}; give dtype, shape and data_offsets")
    dtype, shape, extent = (tensor.get(key) for key in ("dtype", "shape", "data_offsets"))
    if not isinstance(dtype, str) or dtype not in _ITEMSIZE:
        raise VectorError(f"{name} has dtype {quote(dtype)}; use F32, F16 or BF16")
    if not isinstance(shape, list) or len(shape) != 1 or type(shape[0]) is not int:
        raise VectorError(f"{name} has shape {quote(shape)}; give one dimension, [width]")
    if not 1 <= shape[0] <= MAX_WIDTH:
        raise VectorError(f"{name} has width {quote(shape[0])}; give 1 to {MAX_WIDTH}")
    if not isinstance(extent, list) or [type(end) for end in extent] != [int, int]:
        raise VectorError(f"{name} has data_offsets {quote(extent)}; give two whole numbers")
    if extent[1] - extent[0] != shape[0] * _ITEMSIZE[dtype]:
        raise VectorError(
            f"{name} of width {shape[0]} needs {shape[0] * _ITEMSIZE[dtype]} bytes and its offsets "
            "say otherwise; copy the file again"
        )
    return extent[0], extent[1]


def _rows(data: bytes, points: Mapping[str, Point]) -> dict[Point, Row]:
    try:
        tensors = safetensors.deserialize(data)  # type: ignore[no-untyped-call]
    except safetensors.SafetensorError as error:
        raise VectorError(f"safetensors refuses it ({printable(error)}); {_SAVE_AGAIN}") from None
    with np.errstate(all="ignore"):  # Vector refuses NaN with a message
        return {points[name]: to_float32(t["dtype"], bytes(t["data"])) for name, t in tensors}


def _vector(said: Mapping[str, str], rows: Mapping[Point, Row]) -> Vector:
    if "name" not in said:
        raise VectorError(f"metadata has no name; {_SAVE_AGAIN}")
    return Vector(
        name=said["name"],
        rows=rows,
        description=said.get("description"),
        model=said.get("model"),
        method=said.get("method"),
        scale=parse_number(said.get("scale", "1.0")),
    )
