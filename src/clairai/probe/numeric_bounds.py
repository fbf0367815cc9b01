"""The numbers that may reach the device: one bound for each kind, for files, requests and workers.

The device computes in float32. A finite number can still overflow there when it is divided by,
multiplied or cast, and infinity times 0 is NaN. Within these bounds no operation of steering or
scoring does, for rows of the residual stream of up to MAX_STREAM_LENGTH. D = model width.
"""

from __future__ import annotations

import math
from typing import Final, TypeGuard

import numpy as np
from numpy.typing import NDArray

# Of a vector's row or a probe's direction. Its square and its inverse squared are in float32.
MIN_ROW_LENGTH: Final = 1e-15
MAX_ROW_LENGTH: Final = 1e15
# Of any single number: a bias, a threshold, an end of a clamp, a scale.
MAX_NUMBER: Final = 1e30
# Of a factor. A smaller one is 0 in float32, or makes 0 of what it multiplies.
MIN_FACTOR: Final = 1e-30
# Of a row of the residual stream: its square is in float32, and so is its product with the longest
# direction. Only steering makes a row that long: see fields/row_growth.py.
MAX_STREAM_LENGTH: Final = 1e18

ROW_LENGTHS: Final = f"{MIN_ROW_LENGTH:g} to {MAX_ROW_LENGTH:g}"
FACTORS: Final = f"0 or of {MIN_FACTOR:g} to {MAX_NUMBER:g} in size"


def row_length(row_D: NDArray[np.float32]) -> float:
    """In float64, where the squares of float32 neither overflow nor vanish."""
    wide_D = row_D.astype(np.float64)
    return math.sqrt(wide_D @ wide_D)


def is_row_length(length: float) -> bool:
    """False for NaN too."""
    return MIN_ROW_LENGTH <= length <= MAX_ROW_LENGTH


def is_number(value: object) -> TypeGuard[float]:
    """False for NaN too, and for everything that is no number."""
    if isinstance(value, bool) or not isinstance(value, int | float | np.floating):
        return False
    return bool(-MAX_NUMBER <= value <= MAX_NUMBER)


def is_factor(value: float) -> bool:
    """True for 0, which switches off what it multiplies."""
    return value == 0 or MIN_FACTOR <= abs(value) <= MAX_NUMBER


def are_row_lengths(block_ND: NDArray[np.float32]) -> NDArray[np.bool_]:
    """Whether each row is certainly finite and of a usable length; look closer at the others.

    The length lies between the largest number of a row and that times the root of its width.
    """
    with np.errstate(invalid="ignore"):  # a signalling NaN would warn
        high_N, low_N = block_ND.max(axis=1), block_ND.min(axis=1)  # NaN in a row with NaN
        peak_N = np.maximum(high_N, -low_N).astype(np.float64)
    longest_N = peak_N * math.sqrt(block_ND.shape[1])
    usable_N: NDArray[np.bool_] = (peak_N >= MIN_ROW_LENGTH) & (longest_N <= MAX_ROW_LENGTH)
    return usable_N
