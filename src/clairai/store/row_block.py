"""The captured rows that a consumer is offered: one block of encoded rows at one point, checked.

N = rows of a block. A row is the ring's row type, `ROW`: stream, choice, position, token id, phase.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, Final

import msgspec
import numpy as np
from numpy.typing import NDArray

from clairai.errors import ConfigError, StoreError, quote
from clairai.points import Point
from clairai.store.codecs.base import Encoder
from clairai.store.codecs.registry import named
from clairai.wire.ring_messages import DECODE, ROW

MAX_TAGS_NBYTES: Final = 4096
MAX_STEERING_NBYTES: Final = 65_536
MAX_PARAMETERS_NBYTES: Final = 4096
MAX_TEXT: Final = 512
MAX_WIDTH: Final = 1 << 17
MAX_ARRAYS: Final = 16
MAX_MEASURES: Final = 32
MAX_ROW_NBYTES: Final = 1 << 24
_ARRAY_NAME: Final = re.compile(r"[a-z][a-z0-9_]{0,31}", re.ASCII)
# The types that may be stored, by safetensors' names; a bfloat16 is stored as its 16 bits.
DTYPES: Final[Mapping[np.dtype[Any], str]] = {
    np.dtype(np.uint8): "U8",
    np.dtype(np.int8): "I8",
    np.dtype("<u2"): "U16",
    np.dtype("<i2"): "I16",
    np.dtype("<u4"): "U32",
    np.dtype("<i4"): "I32",
    np.dtype("<u8"): "U64",
    np.dtype("<i8"): "I64",
    np.dtype("<f2"): "F16",
    np.dtype("<f4"): "F32",
    np.dtype("<f8"): "F64",
}


class Origin(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What all rows of a shard share: the model, its weights and the encoder."""

    model: str
    weights: str  # version of the weights
    dtype: str  # of the residual stream
    width: int  # of the residual stream
    encoder: str
    parameters: str  # of the encoder, its seed among them: a JSON object

    def __post_init__(self) -> None:
        for name in ("model", "weights", "dtype", "encoder"):
            check_text(getattr(self, name), name)
        if not 1 <= self.width <= MAX_WIDTH:
            raise StoreError(f"width {quote(self.width)} must be a whole number of 1..{MAX_WIDTH}")
        _check_json_object(self.parameters, MAX_PARAMETERS_NBYTES, "parameters of the encoder")

    @classmethod
    def of(
        cls,
        *,
        model: str,
        weights: str,
        dtype: str,
        width: int,
        encoder: str,
        parameters: Mapping[str, Any],
    ) -> Origin:
        text = dump_json_object(parameters, MAX_PARAMETERS_NBYTES, "parameters of the encoder")
        return cls(model, weights, dtype, width, encoder, text)

    def make_encoder(self) -> Encoder:
        """StoreError if no encoder of this version has made the rows."""
        try:
            return named(self.encoder, msgspec.json.decode(self.parameters))
        except ConfigError as error:
            raise StoreError(f"rows of encoder {quote(self.encoder)}: {error.reason}") from None


class RequestNote(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A request's tags and the steering applied to it, each as the text of a JSON object.

    `owner` is the name of the API key that made the request; left out where there are no keys.
    """

    tags: str = "{}"
    steering: str = "{}"
    owner: str | msgspec.UnsetType = msgspec.UNSET

    def __post_init__(self) -> None:
        _check_json_object(self.tags, MAX_TAGS_NBYTES, "tags")
        _check_json_object(self.steering, MAX_STEERING_NBYTES, "steering")
        if self.owner is not msgspec.UNSET:
            check_text(self.owner, "owner")

    @classmethod
    def of(
        cls,
        tags: Mapping[str, Any] | None = None,
        steering: Mapping[str, Any] | None = None,
        owner: str | None = None,
    ) -> RequestNote:
        return cls(
            dump_json_object(tags or {}, MAX_TAGS_NBYTES, "tags"),
            dump_json_object(steering or {}, MAX_STEERING_NBYTES, "steering"),
            msgspec.UNSET if owner is None else owner,
        )

    @property
    def known_owner(self) -> str | None:
        return None if self.owner is msgspec.UNSET else self.owner

    @property
    def nbytes(self) -> int:
        return len(self.tags) + len(self.steering) + len(self.known_owner or "")


@dataclass(frozen=True)
class RowBlock:
    """Encoded rows at one point. Whoever offers a block must not change its arrays afterwards."""

    origin: Origin
    point: str
    rows_N: NDArray[np.void]
    arrays: Mapping[str, NDArray[Any]]
    fidelity: Mapping[str, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        _parse_point(self.point)
        _check_rows(self.rows_N)
        if not 1 <= len(self.arrays) <= MAX_ARRAYS:
            raise StoreError(f"{len(self.arrays)} arrays in a block; give 1 to {MAX_ARRAYS}")
        for name, array in self.arrays.items():
            _check_array(name, array, len(self.rows_N))
        _check_fidelity(self.fidelity)

    @property
    def num_rows(self) -> int:
        return len(self.rows_N)

    @property
    def nbytes(self) -> int:
        return int(self.rows_N.nbytes + sum(array.nbytes for array in self.arrays.values()))

    @property
    def kind(self) -> tuple[object, ...]:
        """Blocks of the same kind can share a shard."""
        shapes = ((n, a.dtype.str, a.shape[1:]) for n, a in sorted(self.arrays.items()))
        return (self.origin, *shapes)

    def select(self, indices: NDArray[np.intp]) -> RowBlock:
        """A block of the rows at these indices."""
        arrays = {name: array[indices] for name, array in self.arrays.items()}
        return RowBlock(self.origin, self.point, self.rows_N[indices], arrays, self.fidelity)


def count_rows(block: RowBlock) -> dict[int, int]:
    """The number of rows of each stream in a block."""
    streams, counts = np.unique(block.rows_N["stream"], return_counts=True)
    return dict(zip(streams.tolist(), counts.tolist(), strict=True))


def check_text(value: object, name: str) -> str:
    if type(value) is not str or not 1 <= len(value) <= MAX_TEXT or not value.isprintable():
        raise StoreError(f"{name} {quote(value)} must be 1 to {MAX_TEXT} printable characters")
    return value


def dump_json_object(value: Mapping[str, Any], limit: int, name: str) -> str:
    """The text of a JSON object, on one line and without NaN or infinity."""
    try:
        text = json.dumps(value, allow_nan=False, separators=(",", ":"))
    except (TypeError, ValueError, RecursionError):
        raise StoreError(f"{name} {quote(value)} cannot be written as a JSON object") from None
    _check_json_object(text, limit, name)
    return text


def _check_json_object(text: str, limit: int, name: str) -> None:
    if len(text.encode(errors="replace")) > limit:
        raise StoreError(f"{name} take {len(text)} bytes as JSON, may take {limit}; shorten it")
    try:
        is_object = isinstance(msgspec.json.decode(text), dict)
    except (msgspec.DecodeError, RecursionError, UnicodeError):
        is_object = False
    if not is_object:
        raise StoreError(f"{name} must be a JSON object, not {quote(text)}")


@lru_cache(maxsize=1024)
def _parse_point(point: str) -> Point:
    return Point.parse(point)


def _check_rows(rows_N: NDArray[np.void]) -> None:
    if rows_N.dtype != ROW or rows_N.ndim != 1:
        raise StoreError("rows of a block must be one array of the ring's row type")
    if (rows_N["phase"] > DECODE).any():
        raise StoreError("a row of a block is neither prefill nor decode; only those have values")


def _check_fidelity(fidelity: Mapping[str, float]) -> None:
    if len(fidelity) > MAX_MEASURES:
        raise StoreError(f"{len(fidelity)} measures of fidelity; give at most {MAX_MEASURES}")
    for name, value in fidelity.items():
        if not _ARRAY_NAME.fullmatch(name) or not math.isfinite(value):
            raise StoreError(f"fidelity {quote(name)} is {quote(value)}, must be a finite number")


def _check_array(name: str, array: NDArray[Any], num_rows: int) -> None:
    if not _ARRAY_NAME.fullmatch(name):
        raise StoreError(f"array name {quote(name)} must be a small letter, then letters or digits")
    if array.dtype not in DTYPES:
        raise StoreError(f"array {name} has type {array.dtype}, which cannot be stored")
    if array.ndim < 1 or len(array) != num_rows:
        raise StoreError(f"array {name} has shape {array.shape}, must have {num_rows} rows")
    if not array.flags.c_contiguous:
        raise StoreError(f"array {name} is not contiguous; copy it first")
    if num_rows and array.nbytes // num_rows > MAX_ROW_NBYTES:
        raise StoreError(f"a row of array {name} may take {MAX_ROW_NBYTES} bytes")
