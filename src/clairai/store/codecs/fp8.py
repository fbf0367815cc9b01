"""The encoder `fp8`: each value as an 8-bit float (e4m3) times a power of two of its row.

N = rows, D = model width.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Final

import numpy as np
from numpy.typing import NDArray

from clairai.store.codecs.base import ArraySpec, EncodedArrays, Encoder, RowArray, check_stored

LARGEST: Final = 448.0
NAN: Final = 0x7F
MIN_SCALE: Final = -149  # the smallest power of two in float32
_LARGEST_FLOAT: Final = float(np.finfo(np.float32).max)


@dataclass(frozen=True)
class Fp8(Encoder):
    name: ClassVar[str] = "fp8"

    def layout(self, width: int) -> dict[str, ArraySpec]:
        return {"codes": ArraySpec("uint8", width), "scale": ArraySpec("float32", 1)}

    def _encode(self, rows_ND: RowArray) -> EncodedArrays:
        is_finite_ND = np.isfinite(rows_ND)
        scale_N1 = _row_scale(np.where(is_finite_ND, rows_ND, 0))
        codes_ND = _to_e4m3(np.where(is_finite_ND, rows_ND, 0) / scale_N1)
        codes_ND[~is_finite_ND] = NAN
        return {"codes": codes_ND, "scale": scale_N1.astype(np.float32)}

    def _decode(self, encoded: EncodedArrays, width: int) -> RowArray:  # noqa: ARG002 -- the codes have it
        scale_N1 = encoded["scale"].astype(np.float64)
        is_good = np.isfinite(scale_N1) & (np.frexp(scale_N1)[0] == 0.5)
        check_stored(bool(is_good.all()), "scale", "one is no power of two")
        values_ND = _code_values()[encoded["codes"]] * scale_N1
        # The largest float32 rounds up to 2**128, which float32 cannot hold.
        return values_ND.clip(-_LARGEST_FLOAT, _LARGEST_FLOAT).astype(np.float32)


def _row_scale(rows_ND: RowArray) -> NDArray[np.float64]:
    """The smallest power of two that scales a row to 448 or below; 1 for a row of zeros."""
    size_N1 = np.abs(rows_ND).max(axis=1, keepdims=True).astype(np.float64)
    mantissa_N1, exponent_N1 = np.frexp(size_N1)
    power_N1 = np.maximum(exponent_N1 - 9 + (mantissa_N1 > LARGEST / 512), MIN_SCALE)
    return np.ldexp(1.0, np.where(size_N1 > 0, power_N1, 0))


def _to_e4m3(values_ND: NDArray[np.float64]) -> NDArray[np.uint8]:
    """Round to the nearest e4m3, ties to even: 3 bits of mantissa, exponents from -6."""
    _, exponent_ND = np.frexp(values_ND)
    exponent_ND = np.where(values_ND == 0, -6, np.maximum(exponent_ND - 1, -6))
    steps_ND = np.rint(np.ldexp(np.abs(values_ND), 3 - exponent_ND)).astype(np.int64)
    codes_ND: NDArray[np.uint8] = ((exponent_ND + 7) * 8 + steps_ND - 8).astype(np.uint8)
    return codes_ND | (np.signbit(values_ND).astype(np.uint8) << np.uint8(7))


def _code_values() -> NDArray[np.float64]:
    """The value of each of the 256 codes."""
    code_C = np.arange(256)
    exponent_C, mantissa_C = code_C >> 3 & 15, code_C & 7
    size_C = np.where(
        exponent_C == 0,
        mantissa_C * 2.0**-9,
        np.ldexp(8.0 + mantissa_C, exponent_C - 10),
    )
    size_C[code_C & NAN == NAN] = np.nan
    return np.where(code_C >> 7, -size_C, size_C)
