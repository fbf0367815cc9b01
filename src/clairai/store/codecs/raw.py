"""The encoder `raw`: rows in the model's own type, bit for bit. N = rows, D = width."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, Final

import numpy as np
from numpy.typing import NDArray

from clairai.errors import ConfigError, EncodingError, quote
from clairai.store.codecs.base import ArraySpec, EncodedArrays, Encoder, RowArray

# The stored type of each type; numpy has no bfloat16, so its bits are stored.
STORED_DTYPES: Final = {"float32": "float32", "float16": "float16", "bfloat16": "uint16"}


@dataclass(frozen=True)
class Raw(Encoder):
    name: ClassVar[str] = "raw"
    dtype: str = "bfloat16"

    def __post_init__(self) -> None:
        if self.dtype not in tuple(STORED_DTYPES):  # a list, because the value may be unhashable
            raise ConfigError(
                f"raw: dtype is {quote(self.dtype)}; give one of {', '.join(STORED_DTYPES)}"
            )

    def layout(self, width: int) -> dict[str, ArraySpec]:
        return {"values": ArraySpec(STORED_DTYPES[self.dtype], width)}

    def _encode(self, rows_ND: RowArray) -> EncodedArrays:
        values_ND = narrow(rows_ND, self.dtype)
        back_ND = widen(values_ND, self.dtype)
        changed = int(((back_ND != rows_ND) & ~(np.isnan(back_ND) & np.isnan(rows_ND))).sum())
        if changed:
            raise EncodingError(
                f"raw: {changed} values are not of {self.dtype}; give the dtype of the model "
                "that made the rows, or float32"
            )
        return {"values": values_ND}

    def _decode(self, encoded: EncodedArrays, width: int) -> RowArray:  # noqa: ARG002 -- the values have it
        return widen(encoded["values"], self.dtype)


def narrow(rows_ND: RowArray, dtype: str) -> NDArray[Any]:
    """Convert rows to a stored type; bfloat16 is truncated, and NaN never becomes infinity."""
    if dtype == "float32":
        return rows_ND
    if dtype == "float16":
        with np.errstate(over="ignore"):
            return rows_ND.astype(np.float16)
    bits_ND = (np.ascontiguousarray(rows_ND).view(np.uint32) >> np.uint32(16)).astype(np.uint16)
    return np.where(np.isnan(rows_ND), bits_ND | np.uint16(0x40), bits_ND)


def widen(values_ND: NDArray[Any], dtype: str) -> RowArray:
    """Convert stored values to float32; exact for all three types."""
    if dtype == "bfloat16":
        return (values_ND.astype(np.uint32) << np.uint32(16)).view(np.float32)
    with np.errstate(invalid="ignore"):  # a signalling NaN, which only becomes a quiet one
        return values_ND.astype(np.float32)
