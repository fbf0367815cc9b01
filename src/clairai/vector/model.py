"""The steering vector: checked, immutable, and identified by a digest of its content.

N = points of a vector, D = model width.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from types import MappingProxyType
from typing import Final

import numpy as np
from numpy.typing import NDArray

from clairai.errors import ProbeError, VectorError, quote
from clairai.points import Point
from clairai.probe import model
from clairai.probe.model import MAX_DESCRIPTION, MAX_MODEL, MAX_NAME, NAME
from clairai.probe.numeric_bounds import MAX_NUMBER, are_row_lengths, is_number, row_length
from clairai.wire import steering_messages

MAX_POINTS: Final = 1024
MAX_NUMBERS: Final = 16 << 20  # at all points together: 64 MiB as float32
MAX_METHOD: Final = 100

_SCHEMA: Final = b"clairai vector/2\0"
_ROW_SCHEMA: Final = b"clairai vector row/1\0"
_WIDTH: Final = struct.Struct("<Q")

Row = NDArray[np.float32]


@dataclass(frozen=True, eq=False)
class Vector:
    """One row of numbers for each of its points; vectors are compared by content."""

    name: str
    rows: Mapping[Point, Row]  # in the order of the forward pass
    # The rest is for people: it does not change what the vector does.
    description: str | None = None
    model: str | None = None  # the model it was made for
    method: str | None = None  # how it was made
    scale: float = 1.0  # the suggested scale

    def __post_init__(self) -> None:
        _check_name(self.name)
        for field, limit in _TEXT_LIMITS:
            _check_text(self.name, field, getattr(self, field), limit=limit)
        object.__setattr__(self, "scale", _check_scale(self.name, self.scale))
        object.__setattr__(self, "rows", _check_rows(self.name, self.rows))

    @property
    def width(self) -> int:
        return len(next(iter(self.rows.values())))

    @property
    def points(self) -> tuple[Point, ...]:
        return tuple(self.rows)

    @cached_property
    def block_ND(self) -> NDArray[np.float32]:
        """All rows in order; not copied if they are contiguous already."""
        return _as_block([*self.rows.values()])

    @cached_property
    def row_digests(self) -> Mapping[Point, str]:
        """The digest of the numbers at each point: see `digest_row`."""
        return MappingProxyType({point: digest_row(row_D) for point, row_D in self.rows.items()})

    @cached_property
    def digest(self) -> str:
        """SHA-256 of points and numbers: all that decides what the vector does.

        It hashes the rows' own digests, so that a vector in a request is read once. They have a
        fixed length and a point's name ends in a zero byte, so the encoding is unambiguous.
        """
        content = hashlib.sha256(_SCHEMA + _WIDTH.pack(self.width))
        for point, row_digest in self.row_digests.items():
            content.update(f"{point}\0".encode() + bytes.fromhex(row_digest))
        return content.hexdigest()

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Vector):
            return NotImplemented
        return self.digest == other.digest and self._metadata() == other._metadata()

    def __hash__(self) -> int:
        return hash(self.digest)

    def _metadata(self) -> tuple[object, ...]:
        return self.name, self.description, self.model, self.method, self.scale

    def listed(self) -> steering_messages.ListedVector:
        """Its entry in a list of vectors."""
        return steering_messages.ListedVector(
            name=self.name,
            points=tuple(map(str, self.rows)),
            width=self.width,
            digest=self.digest,
            norms=tuple(map(row_length, self.rows.values())),
            description=self.description,
            method=self.method,
            scale=self.scale,
        )


_TEXT_LIMITS: Final = (
    ("description", MAX_DESCRIPTION),
    ("model", MAX_MODEL),
    ("method", MAX_METHOD),
)


def _is_same_memory(row_D: Row, other_D: Row) -> bool:
    """True if both are views of the same memory."""
    mine, theirs = row_D.__array_interface__, other_D.__array_interface__
    return bool(mine["data"] == theirs["data"] and mine["strides"] == theirs["strides"])


def digest_row(row_D: Row) -> str:
    """SHA-256 of a row's numbers, independent of its point and vector."""
    content = hashlib.sha256(_ROW_SCHEMA)
    content.update(np.ascontiguousarray(row_D, "<f4").data)
    return content.hexdigest()


def _check_name(name: object) -> None:
    # A name may become a file name: nothing in it may leave a folder.
    if not isinstance(name, str) or NAME.fullmatch(name) is None or ".." in name:
        raise VectorError(
            f"{quote(name)} cannot name a vector; use 1 to {MAX_NAME} of "
            "A-Z a-z 0-9 . _ : / @ + -, not starting with . or / and without .."
        )


def _check_text(name: str, field: str, value: object, *, limit: int) -> None:
    if value is None:
        return
    if not isinstance(value, str) or not 1 <= len(value) <= limit or not value.isprintable():
        raise VectorError(
            f"vector {name}: {field} is {quote(value)}; give 1 to {limit} printable characters, "
            "or leave it out"
        )


def _check_scale(name: str, value: object) -> float:
    if is_number(value):
        return float(value)
    raise VectorError(
        f"vector {name}: scale is {quote(value)}; give a finite number, "
        f"at most {MAX_NUMBER:g} in size"
    )


def _check_rows(name: str, given: object) -> Mapping[Point, Row]:
    if not isinstance(given, Mapping) or not all(isinstance(point, Point) for point in given):
        raise VectorError(f"vector {name}: rows is {quote(given)}; give a row for each Point")
    if not 1 <= len(given) <= MAX_POINTS:
        raise VectorError(f"vector {name}: {len(given)} points; give 1 to {MAX_POINTS}")
    points = sorted(given)
    rows = _check_rows_at_once([given[point] for point in points])
    if rows is None:  # check one by one, to name the row that is wrong
        rows = [_check_row(f"{name} at {point}", given[point]) for point in points]
    widths = sorted({len(row_D) for row_D in rows})
    if len(widths) > 1:
        raise VectorError(
            f"vector {name}: rows of width {widths[0]} and of {widths[-1]}; "
            "all rows of a vector are as wide as the model"
        )
    if widths[0] * len(rows) > MAX_NUMBERS:
        raise VectorError(
            f"vector {name}: {len(rows)} rows of width {widths[0]}, and a vector holds at most "
            f"{MAX_NUMBERS} numbers; give fewer points"
        )
    return MappingProxyType(dict(zip(points, rows, strict=True)))


def _check_rows_at_once(given: Sequence[object]) -> list[Row] | None:
    """Check and copy rows all at once, since requests carry many; None if any may be wrong."""
    rows = [one for one in given if isinstance(one, np.ndarray) and one.dtype == np.float32]
    shapes = {row.shape for row in rows}
    if len(rows) < len(given) or len(shapes) > 1:
        return None
    (shape,) = shapes
    if len(shape) != 1 or not 1 <= shape[0] <= model.MAX_WIDTH:
        return None
    block_ND = _as_block(rows)
    if not are_row_lengths(block_ND).all():
        return None
    return list(block_ND)  # each has the block as its base: see Vector.block_ND


def _as_block(rows: Sequence[Row]) -> NDArray[np.float32]:
    """Rows of one width as one array; a copy unless they are a read-only block already."""
    found_ND = _shared_block(rows)
    if found_ND is not None and not found_ND.flags.writeable and found_ND.flags.owndata:
        return found_ND
    block_ND = np.empty((len(rows), len(rows[0])), "<f4")
    np.concatenate(rows, out=block_ND.reshape(-1))
    block_ND.setflags(write=False)
    return block_ND


def _shared_block(rows: Sequence[Row]) -> NDArray[np.float32] | None:
    """The array of which these are exactly the rows, if there is one."""
    block_ND = rows[0].base
    if not isinstance(block_ND, np.ndarray) or block_ND.shape != (len(rows), len(rows[0])):
        return None
    return block_ND if all(map(_is_same_memory, rows, block_ND)) else None


def _check_row(place: str, given: object) -> Row:
    try:
        return model.check_direction(f"vector {place}: the row", given)
    except ProbeError as error:  # the check and its message are those of a probe's direction
        raise VectorError(error.reason) from None
