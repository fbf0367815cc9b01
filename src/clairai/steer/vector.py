"""Takes the parts of a steering vector; gives a checked, frozen `Vector` and content digests."""

# D = model width

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

from clairai import wire_steer
from clairai.errors import ProbeError, VectorError
from clairai.points import Point, quote
from clairai.probe import checks
from clairai.probe.checks import MAX_DESCRIPTION, MAX_MODEL
from clairai.probe.model import MAX_NAME, NAME

MAX_POINTS: Final = 1024
MAX_NUMBERS: Final = 16 << 20  # of all points together: 64 MiB as float32
MAX_METHOD: Final = 100

_SCHEMA: Final = b"clairai vector/2\0"
_ROW_SCHEMA: Final = b"clairai vector row/1\0"
_WIDTH: Final = struct.Struct("<Q")
_LARGEST: Final = float(np.finfo(np.float32).max)

Row = NDArray[np.float32]


@dataclass(frozen=True, eq=False)
class Vector:
    """A row of numbers for each of its points; two vectors are equal by content."""

    name: str
    rows: Mapping[Point, Row]  # in path order, whichever order was given
    # For people: what follows changes nothing that the vector does.
    description: str | None = None
    model: str | None = None  # the model it was made for
    method: str | None = None  # how it was made
    scale: float = 1.0  # suggested

    def __post_init__(self) -> None:
        _check_name(self.name)
        for field, limit in _TEXTS:
            _check_text(self.name, field, getattr(self, field), limit=limit)
        object.__setattr__(self, "scale", _scale(self.name, self.scale))
        object.__setattr__(self, "rows", _rows(self.name, self.rows))

    @property
    def width(self) -> int:
        return len(next(iter(self.rows.values())))

    @property
    def points(self) -> tuple[Point, ...]:
        return tuple(self.rows)

    @cached_property
    def row_digests(self) -> Mapping[Point, str]:
        """Of the numbers at each point: see digest_of."""
        return MappingProxyType({point: digest_of(row_D) for point, row_D in self.rows.items()})

    @cached_property
    def digest(self) -> str:
        """SHA-256 of all that decides what it does: points and numbers, and not what it is called.

        Of the rows' own digests, so that a vector in a request is read once. They have a known
        length and a point's name ends in a zero byte: no two contents hash alike.
        """
        content = hashlib.sha256(_SCHEMA + _WIDTH.pack(self.width))
        for point, row_digest in self.row_digests.items():
            content.update(f"{point}\0".encode() + bytes.fromhex(row_digest))
        return content.hexdigest()

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Vector):
            return NotImplemented
        return self.digest == other.digest and self._told() == other._told()

    def __hash__(self) -> int:
        return hash(self.digest)

    def _told(self) -> tuple[object, ...]:
        return self.name, self.description, self.model, self.method, self.scale

    def listed(self) -> wire_steer.ListedVector:
        """What people are told of it."""
        return wire_steer.ListedVector(
            name=self.name,
            points=tuple(map(str, self.rows)),
            width=self.width,
            digest=self.digest,
            norms=tuple(norm(row_D) for row_D in self.rows.values()),
            description=self.description,
            method=self.method,
            scale=self.scale,
        )


_TEXTS: Final = (
    ("description", MAX_DESCRIPTION),
    ("model", MAX_MODEL),
    ("method", MAX_METHOD),
)


def digest_of(row_D: Row) -> str:
    """SHA-256 of a row's numbers; equal for equal numbers, whichever point or vector has them."""
    content = hashlib.sha256(_ROW_SCHEMA)
    content.update(np.ascontiguousarray(row_D, "<f4").data)
    return content.hexdigest()


def norm(row_D: Row) -> float:
    """The row's length; in float64, where no float32 overflows."""
    return float(np.linalg.norm(row_D.astype(np.float64)))


def _check_name(name: object) -> None:
    # A name is shown, sent and may become a file's name: nothing that could climb a path.
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


def _scale(name: str, value: object) -> float:
    is_number = isinstance(value, int | float | np.floating) and not isinstance(value, bool)
    if is_number and -_LARGEST <= value <= _LARGEST:  # type: ignore[operator]  # false for NaN too
        return float(value)  # type: ignore[arg-type]
    raise VectorError(
        f"vector {name}: scale is {quote(value)}; give a finite number, "
        f"at most {_LARGEST:.3g} in size"
    )


def _rows(name: str, given: object) -> Mapping[Point, Row]:
    if not isinstance(given, Mapping) or not all(isinstance(point, Point) for point in given):
        raise VectorError(f"vector {name}: rows is {quote(given)}; give a row for each Point")
    if not 1 <= len(given) <= MAX_POINTS:
        raise VectorError(f"vector {name}: {len(given)} points; give 1 to {MAX_POINTS}")
    points = sorted(given)
    rows = _good_rows([given[point] for point in points])
    if rows is None:  # one of them is not: say which
        rows = [_row(f"{name} at {point}", given[point]) for point in points]
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


def _good_rows(given: Sequence[object]) -> list[Row] | None:
    """Copies of rows that `_row` would take, all at once: requests bring many. None if unsure."""
    rows = [one for one in given if isinstance(one, np.ndarray) and one.dtype == np.float32]
    shapes = {row.shape for row in rows}
    if len(rows) < len(given) or len(shapes) > 1:
        return None
    (shape,) = shapes
    if len(shape) != 1 or not 1 <= shape[0] <= checks.MAX_WIDTH:
        return None
    block_ND = np.array(rows, "<f4")
    if not (np.isfinite(block_ND).all() and block_ND.any(axis=1).all()):
        return None
    block_ND.setflags(write=False)
    return list(block_ND)


def _row(place: str, given: object) -> Row:
    try:
        return checks.direction(f"vector {place}: the row", given)
    except ProbeError as error:  # the words are the same, whosever row it is
        raise VectorError(error.reason) from None
