"""Groups of values as one byte each, between the exact minimum and maximum of the group.

N = rows, G = groups of a row, C = values in a group. The bytes 0 to 252 are steps between the two
ends; the other three stand for values that are not finite. Every step is one operation of IEEE
doubles, so that any language on any machine computes the same bits.
"""

from __future__ import annotations

from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from clairai.store.codecs.base import RowArray, check_stored

TOP: Final = 252  # the byte of the upper end
NAN: Final = 253
MINUS_INFINITY: Final = 254
PLUS_INFINITY: Final = 255

Bytes = NDArray[np.uint8]


def split_groups(array_ND: NDArray[Any], size: int) -> NDArray[Any]:
    """Reshape to [N, G, C]; the last group is padded with its last value, which moves no end."""
    num_rows, width = array_ND.shape
    missing = -width % size
    padded = np.pad(array_ND, ((0, 0), (0, missing)), mode="edge") if missing else array_ND
    return padded.reshape(num_rows, (width + missing) // size, size)


def to_bytes(values_NGC: RowArray) -> tuple[Bytes, RowArray, RowArray]:
    """Return the bytes, the lower ends and the upper ends."""
    is_finite = np.isfinite(values_NGC)
    low_NG = np.where(is_finite, values_NGC, np.float32(np.inf)).min(axis=2)
    high_NG = np.where(is_finite, values_NGC, np.float32(-np.inf)).max(axis=2)
    is_empty_NG = low_NG > high_NG  # no finite value in the group
    # Adding 0 turns -0 into 0: which of the two is the minimum is not defined.
    low_NG = np.where(is_empty_NG, np.float32(0), low_NG) + np.float32(0)
    high_NG = np.where(is_empty_NG, np.float32(0), high_NG) + np.float32(0)
    low = low_NG[:, :, None].astype(np.float64)
    span = high_NG[:, :, None].astype(np.float64) - low
    place = (np.where(is_finite, values_NGC, low) - low) * TOP / np.where(span > 0, span, 1)
    codes = np.rint(place).astype(np.uint8)
    codes[np.isnan(values_NGC)] = NAN
    codes[values_NGC == -np.inf] = MINUS_INFINITY
    codes[values_NGC == np.inf] = PLUS_INFINITY
    return codes, low_NG, high_NG


def from_bytes(codes_NGC: Bytes, low_NG: RowArray, high_NG: RowArray) -> RowArray:
    is_good = np.isfinite(low_NG) & np.isfinite(high_NG) & (low_NG <= high_NG)
    check_stored(bool(is_good.all()), "low and high", "an end is no number or above the other")
    place = np.minimum(codes_NGC, TOP).astype(np.float64)
    low, high = low_NG[:, :, None].astype(np.float64), high_NG[:, :, None].astype(np.float64)
    # Both products are exact, so the ends are exact, and a fused multiply-add changes nothing.
    values = ((low * (TOP - place) + high * place) / TOP).astype(np.float32)
    values[codes_NGC == NAN] = np.nan
    values[codes_NGC == MINUS_INFINITY] = -np.inf
    values[codes_NGC == PLUS_INFINITY] = np.inf
    return values
