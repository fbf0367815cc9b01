"""The encoder `int4`: half a byte for each value, and a float32 for each group of values.

N = rows, D = model width, G = groups of a row, C = values in a group.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, Final

import numpy as np
from numpy.typing import NDArray

from clairai.errors import ConfigError
from clairai.store.codecs.base import (
    MAX_WIDTH,
    ArraySpec,
    EncodedArrays,
    Encoder,
    RowArray,
    check_number,
    check_stored,
)

TOP: Final = 7
NOT_FINITE: Final = -8


@dataclass(frozen=True)
class Int4(Encoder):
    name: ClassVar[str] = "int4"
    group: int = 64

    def __post_init__(self) -> None:
        check_number(self.name, "group", self.group, low=2, high=MAX_WIDTH)
        if self.group % 2:
            raise ConfigError(f"int4: group is {self.group}; give an even number")

    def layout(self, width: int) -> dict[str, ArraySpec]:
        tops = ArraySpec("float32", -(-width // self.group))
        return {"codes": ArraySpec("uint8", -(-width // 2)), "top": tops}

    def _encode(self, rows_ND: RowArray) -> EncodedArrays:
        values_NGC = _split_groups(rows_ND, self._size(rows_ND.shape[1]))
        is_finite = np.isfinite(values_NGC)
        finite_NGC = np.where(is_finite, values_NGC, 0).astype(np.float64)
        top_NG1 = np.abs(finite_NGC).max(axis=2, keepdims=True)
        steps = np.rint(finite_NGC * TOP / np.where(top_NG1 > 0, top_NG1, 1)).astype(np.int8)
        steps[~is_finite] = NOT_FINITE
        steps_ND = steps.reshape(len(rows_ND), -1)[:, : rows_ND.shape[1]]
        return {"codes": _pack(steps_ND), "top": top_NG1[:, :, 0].astype(np.float32)}

    def _decode(self, encoded: EncodedArrays, width: int) -> RowArray:
        top_NG1 = encoded["top"][:, :, None].astype(np.float64)
        is_good = np.isfinite(top_NG1) & (top_NG1 >= 0)
        check_stored(bool(is_good.all()), "top", "one is negative or no number")
        steps_NGC = _split_groups(_unpack(encoded["codes"])[:, :width], self._size(width))
        is_finite = steps_NGC != NOT_FINITE
        exact_NGC = top_NG1 * np.where(is_finite, steps_NGC, 0)
        values_NGC: RowArray = (exact_NGC / TOP).astype(np.float32)
        values_NGC[~is_finite] = np.nan
        return values_NGC.reshape(len(steps_NGC), -1)[:, :width]

    def _size(self, width: int) -> int:
        return min(self.group, width + width % 2)


def _split_groups(array_ND: NDArray[Any], size: int) -> NDArray[Any]:
    missing = -array_ND.shape[1] % size
    return np.pad(array_ND, ((0, 0), (0, missing))).reshape(len(array_ND), -1, size)


def _pack(steps_ND: NDArray[np.int8]) -> NDArray[np.uint8]:
    """Pack two values per byte, the first in the lower half; an odd width is padded with 0."""
    halves = np.pad(steps_ND, ((0, 0), (0, steps_ND.shape[1] % 2))).view(np.uint8) & np.uint8(15)
    return halves[:, ::2] | halves[:, 1::2] << np.uint8(4)


def _unpack(codes: NDArray[np.uint8]) -> NDArray[np.int8]:
    halves = np.stack((codes & np.uint8(15), codes >> np.uint8(4)), axis=2)
    steps = halves.reshape(len(codes), -1).astype(np.int8)
    return np.where(steps > TOP, steps - 16, steps).astype(np.int8)
