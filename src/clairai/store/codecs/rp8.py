"""The encoder `rp8`: K random sums of a row, a byte each, which keep distances between rows.

N = rows, D = model width, K = projected.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar, Final

import numpy as np
from numpy.typing import NDArray

from clairai.errors import EncodingError
from clairai.store.codecs import minmax8
from clairai.store.codecs.base import ArraySpec, EncodedArrays, Encoder, RowArray, check_number
from clairai.store.codecs.philox import random_signs

MAX_K: Final = 8192
MAX_SIGNS: Final = 1 << 28
MAX_SEED: Final = (1 << 64) - 1
# Rows become integers of 35 bits: sums of 2**17 of them are exact in float64, so the order of
# summation, which no matrix product guarantees, does not matter.
FIXED_BITS: Final = 35
_COLUMNS: Final = 512


@dataclass(frozen=True)
class Rp8(Encoder):
    name: ClassVar[str] = "rp8"
    block: ClassVar[int] = 1 << 20  # larger: each block converts the signs to float64 again
    k: int = 512
    seed: int = 0

    def __post_init__(self) -> None:
        check_number(self.name, "k", self.k, low=1, high=MAX_K)
        check_number(self.name, "seed", self.seed, low=0, high=MAX_SEED)

    def layout(self, width: int) -> dict[str, ArraySpec]:
        if width * self.k > MAX_SIGNS:
            raise EncodingError(
                f"rp8: k = {self.k} of width {width} makes {width * self.k} signs, and at most "
                f"{MAX_SIGNS} are made; give a smaller k"
            )
        end = ArraySpec("float32", 1)
        return {"codes": ArraySpec("uint8", self.k), "low": end, "high": end}

    def decoded_width(self, width: int) -> int:  # noqa: ARG002 -- always k
        return self.k

    def reference(self, rows_ND: RowArray) -> RowArray:
        return self.project(rows_ND)

    def project(self, rows_ND: RowArray) -> RowArray:
        """Multiply each row by the signs over sqrt(k), correctly rounded to 35 bits."""
        whole_ND, unit_N1 = _to_fixed_point(rows_ND)
        signs_DK = random_signs(self.seed, rows_ND.shape[1], self.k)
        with np.errstate(invalid="ignore", over="ignore"):  # infinities, and sums beyond float32
            sums_NK = _product(whole_ND, signs_DK)
            return (sums_NK * unit_N1 * (1 / math.sqrt(self.k))).astype(np.float32)

    def reconstruct(self, projected_NK: RowArray, *, width: int) -> RowArray:
        """Return to the model's width by the transpose: right on average over seeds, but noisy.

        The expected cosine with the row is sqrt(k / (k + width)).
        """
        self.layout(width)
        signs_KD = random_signs(self.seed, width, self.k).T
        with np.errstate(invalid="ignore", over="ignore"):
            sums_ND = _product(projected_NK.astype(np.float64), signs_KD)
            return (sums_ND * (1 / math.sqrt(self.k))).astype(np.float32)

    def _encode(self, rows_ND: RowArray) -> EncodedArrays:
        codes_N1K, low_N1, high_N1 = minmax8.to_bytes(self.project(rows_ND)[:, None])
        return {"codes": codes_N1K[:, 0], "low": low_N1, "high": high_N1}

    def _decode(self, encoded: EncodedArrays, width: int) -> RowArray:  # noqa: ARG002 -- as above
        codes_N1K = encoded["codes"][:, None]
        return minmax8.from_bytes(codes_N1K, encoded["low"], encoded["high"])[:, 0]


def _to_fixed_point(rows_ND: RowArray) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Return integers below 2**35, and the power of two that scales each row back."""
    finite_ND = np.where(np.isfinite(rows_ND), rows_ND, 0)
    _, exponent_N1 = np.frexp(np.abs(finite_ND).max(axis=1, keepdims=True).astype(np.float64))
    shift_N1 = FIXED_BITS - exponent_N1
    whole_ND = np.rint(rows_ND.astype(np.float64) * np.ldexp(1.0, shift_N1))
    return whole_ND, np.ldexp(1.0, -shift_N1)


def _product(left: NDArray[np.float64], right: NDArray[np.int8]) -> NDArray[np.float64]:
    """Multiply by parts: all signs in float64 would take eight times their size."""
    starts = range(0, right.shape[1], _COLUMNS)
    parts = [left @ right[:, start : start + _COLUMNS].astype(np.float64) for start in starts]
    return np.concatenate(parts, axis=1)
