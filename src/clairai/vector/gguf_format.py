"""Vectors as GGUF control vectors, the format of repeng and llama.cpp; reads untrusted bytes.

A tensor `direction.N` is added to the output of block N, counted from 0: our point `post_block.N`.
Several tensors of one layer are summed, as llama.cpp does.

The reader is our own: that of the `gguf` package trusts every count in the file, and an array that
claims 2**60 items makes it run, and its memory grow, without end.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Final

import numpy as np

from clairai.errors import VectorError, quote
from clairai.points import Point
from clairai.probe.model import MAX_DESCRIPTION, MAX_WIDTH
from clairai.vector.model import MAX_NUMBERS, Row, Vector
from clairai.vector.safetensors_format import naming_source

MAGIC: Final = b"GGUF"
ARCHITECTURE: Final = "controlvector"
METHOD: Final = "GGUF control vector"
VERSIONS: Final = (2, 3)
MAX_HEADER: Final = 1 << 20
MAX_NBYTES: Final = 4 * MAX_NUMBERS + MAX_HEADER
MAX_TENSORS: Final = 4096
MAX_KEYS: Final = 1024
ALIGNMENT: Final = 32

_UINT32, _STRING, _ARRAY = 4, 8, 9  # value types
_SIZES: Final = {0: 1, 1: 1, 2: 2, 3: 2, 4: 4, 5: 4, 6: 4, 7: 1, 10: 8, 11: 8, 12: 8}
_F32, _F16 = 0, 1  # tensor types
_DTYPES: Final = {_F32: "<f4", _F16: "<f2"}
_DIRECTION: Final = re.compile(r"direction\.([0-9]{1,5})(?:[^0-9].*)?", re.DOTALL)


@dataclass(frozen=True)
class _Tensor:
    name: str
    width: int
    kind: int
    offset: int


class _Cursor:
    """Reads forward, never past the data or the bound of the header."""

    def __init__(self, data: bytes) -> None:
        self._data = memoryview(data)[:MAX_HEADER]
        self.at = 0

    def take(self, nbytes: int) -> memoryview:
        if nbytes > len(self._data) - self.at:
            raise VectorError(
                f"ends, or is over {MAX_HEADER} bytes, before its header does; copy the file again"
            )
        self.at += nbytes
        return self._data[self.at - nbytes : self.at]

    def number(self, code: str) -> int:
        (value,) = struct.unpack(f"<{code}", self.take(struct.calcsize(f"<{code}")))
        return int(value)

    def text(self) -> str:
        length = self.number("Q")
        raw = bytes(self.take(min(length, MAX_HEADER + 1)))
        try:
            return raw.decode()
        except UnicodeDecodeError:
            raise VectorError("holds a text that is not UTF-8; export it again") from None


def dumps(vector: Vector) -> bytes:
    """A file for llama.cpp's --control-vector and repeng, which take the scale separately."""
    _check_exportable(vector)
    keys = {"general.architecture": ARCHITECTURE, "general.name": vector.name}
    if vector.model is not None:
        keys["controlvector.model_hint"] = vector.model
    if vector.description is not None:
        keys["general.description"] = vector.description
    parts = [MAGIC, struct.pack("<IQQ", VERSIONS[-1], len(vector.points), len(keys) + 1)]
    parts += [_pack_text(key) + struct.pack("<I", _STRING) + _pack_text(keys[key]) for key in keys]
    parts += [
        _pack_text("controlvector.layer_count"),
        struct.pack("<II", _UINT32, len(vector.points)),
    ]
    stride = 4 * vector.width + -4 * vector.width % ALIGNMENT
    for index, point in enumerate(vector.points):
        parts += [_pack_text(f"direction.{point.layer}")]
        parts += [struct.pack("<IQIQ", 1, vector.width, _F32, index * stride)]
    header = b"".join(parts)
    rows = [row_D.astype("<f4").tobytes().ljust(stride, b"\0") for row_D in vector.rows.values()]
    return header.ljust(len(header) + -len(header) % ALIGNMENT, b"\0") + b"".join(rows)


def loads(data: bytes, *, source: str, name: str) -> Vector:
    """The vector in `data`, called `name`; VectorError, naming `source`, if it holds none."""
    with naming_source(source):
        if len(data) > MAX_NBYTES:
            raise VectorError(f"{len(data)} bytes, and a control vector has at most {MAX_NBYTES}")
        cursor = _Cursor(data)
        if bytes(cursor.take(len(MAGIC))) != MAGIC:
            raise VectorError("not GGUF; give a control vector as repeng or llama.cpp writes it")
        version = cursor.number("I")
        if version not in VERSIONS:
            raise VectorError(f"GGUF version {version}; versions 2 and 3, little-endian, are read")
        num_tensors, num_keys = cursor.number("Q"), cursor.number("Q")
        if num_keys > MAX_KEYS or not 1 <= num_tensors <= MAX_TENSORS:
            raise VectorError(
                f"{num_keys} keys and {num_tensors} tensors; a control vector has at most "
                f"{MAX_KEYS} and 1 to {MAX_TENSORS}"
            )
        keys = dict(_read_keys(cursor, num_keys))
        tensors = [_read_tensor(cursor) for _ in range(num_tensors)]
        rows = _sum_rows(data, tensors, _align(cursor.at, keys))
        return Vector(name, rows, description=_description(keys), method=METHOD)


def _check_exportable(vector: Vector) -> None:
    others = [point for point in vector.points if point.kind != "post_block" or point.layer == 0]
    if others:
        raise VectorError(
            f"vector {vector.name} has {others[0]}, and a control vector has no place for it: "
            "llama.cpp steers the outputs of blocks, and not that of block 0; "
            "export other points with --points"
        )


def _pack_text(text: str) -> bytes:
    raw = text.encode()
    return struct.pack("<Q", len(raw)) + raw


def _read_keys(cursor: _Cursor, count: int) -> Iterator[tuple[str, object]]:
    """The keys with a string or a uint32; other values are skipped."""
    for _ in range(count):
        key, kind = cursor.text(), cursor.number("I")
        if kind == _STRING:
            yield key, cursor.text()
        elif kind == _UINT32:
            yield key, cursor.number("I")
        else:
            _skip_value(cursor, kind)


def _skip_value(cursor: _Cursor, kind: int) -> None:
    if kind in _SIZES:
        cursor.take(_SIZES[kind])
        return
    if kind != _ARRAY:
        raise VectorError(f"holds a value of type {kind}, which GGUF has not; export it again")
    item, count = cursor.number("I"), cursor.number("Q")
    if item in _SIZES:
        cursor.take(_SIZES[item] * count)
    elif item == _STRING:
        for _ in range(count):  # each takes at least 8 bytes, so the bound of the header ends it
            cursor.text()
    else:
        raise VectorError(f"holds an array of type {item}; export it again, with plain metadata")


def _read_tensor(cursor: _Cursor) -> _Tensor:
    name, num_dimensions = cursor.text(), cursor.number("I")
    if num_dimensions != 1:
        raise VectorError(
            f"tensor {quote(name)} has {num_dimensions} dimensions; a direction has one"
        )
    width, kind, offset = cursor.number("Q"), cursor.number("I"), cursor.number("Q")
    if not 1 <= width <= MAX_WIDTH:
        raise VectorError(f"tensor {quote(name)} has width {width}; give 1 to {MAX_WIDTH}")
    if kind not in _DTYPES:
        raise VectorError(f"tensor {quote(name)} has type {kind}; give F32 or F16")
    return _Tensor(name, width, kind, offset)


def _align(at: int, keys: Mapping[str, object]) -> int:
    """The offset of the tensor data."""
    alignment = keys.get("general.alignment", ALIGNMENT)
    if not isinstance(alignment, int) or not 1 <= alignment <= MAX_HEADER:
        raise VectorError(f"general.alignment is {quote(alignment)}; give 1 to {MAX_HEADER}")
    return at + -at % alignment


def _sum_rows(data: bytes, tensors: list[_Tensor], start: int) -> dict[Point, Row]:
    if len({tensor.name for tensor in tensors}) < len(tensors):
        raise VectorError("two tensors have one name; export it again")
    if sum(tensor.width for tensor in tensors) > MAX_NUMBERS:  # tensors may overlap in the file
        raise VectorError(f"a vector holds at most {MAX_NUMBERS} numbers; export fewer layers")
    sums: dict[Point, Row] = {}
    for tensor in tensors:
        point, row_D = _point_of_tensor(tensor.name), _read_row(data, tensor, start)
        if point in sums and len(sums[point]) != tensor.width:
            raise VectorError(f"tensors of {point} have different widths; export it again")
        with np.errstate(all="ignore"):  # Vector refuses infinity with a message
            sums[point] = sums[point] + row_D if point in sums else row_D
    with np.errstate(invalid="ignore"):  # and NaN
        steering = {point: row_D for point, row_D in sums.items() if row_D.any()}
    if not steering:
        raise VectorError("every direction is all zeros; make it again")
    return steering  # without the layers of zeros, which steer nothing


def _point_of_tensor(name: str) -> Point:
    matched = _DIRECTION.fullmatch(name)
    if matched is None:
        raise VectorError(
            f"holds the tensor {quote(name)}; a control vector holds direction.LAYER and no other"
        )
    return Point("post_block", int(matched[1]))


def _read_row(data: bytes, tensor: _Tensor, start: int) -> Row:
    dtype = np.dtype(_DTYPES[tensor.kind])
    first = start + tensor.offset
    if first + tensor.width * dtype.itemsize > len(data):
        raise VectorError(f"tensor {quote(tensor.name)} is cut short; copy the file again")
    with np.errstate(all="ignore"):
        return np.frombuffer(data, dtype, tensor.width, first).astype(np.float32)


def _description(keys: Mapping[str, object]) -> str | None:
    """The description, if it is printable. The model hint names an architecture, not a model."""
    text = keys.get("general.description")
    is_fit = isinstance(text, str) and 1 <= len(text) <= MAX_DESCRIPTION and text.isprintable()
    return str(text) if is_fit else None
