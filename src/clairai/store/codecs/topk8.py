"""The encoder `topk8`: indices, signs and magnitudes of the K largest values; the rest is 0.

N = rows, D = model width, K = kept.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Final

import numpy as np
from numpy.typing import NDArray

from clairai.store.codecs import minmax8
from clairai.store.codecs.base import (
    MAX_WIDTH,
    ArraySpec,
    EncodedArrays,
    Encoder,
    RowArray,
    check_number,
    check_stored,
)

MAX_SHORT: Final = 1 << 16
NAN_SIZE: Final = 0x7FC00000  # above infinity; the same for every NaN, so that indices decide


@dataclass(frozen=True)
class TopK8(Encoder):
    name: ClassVar[str] = "topk8"
    k: int = 64

    def __post_init__(self) -> None:
        check_number(self.name, "k", self.k, low=1, high=MAX_WIDTH)

    def kept(self, width: int) -> int:
        return min(self.k, width)

    def layout(self, width: int) -> dict[str, ArraySpec]:
        kept, end = self.kept(width), ArraySpec("float32", 1)
        return {
            "indices": ArraySpec("uint16" if width <= MAX_SHORT else "uint32", kept),
            "codes": ArraySpec("uint8", kept),
            "signs": ArraySpec("uint8", -(-kept // 8)),
            "low": end,
            "high": end,
        }

    def _encode(self, rows_ND: RowArray) -> EncodedArrays:
        width = rows_ND.shape[1]
        indices_NK = _largest_indices(rows_ND, self.kept(width))
        values_NK = np.take_along_axis(rows_ND, indices_NK, axis=1)
        codes_N1K, low_N1, high_N1 = minmax8.to_bytes(np.abs(values_NK)[:, None])
        is_negative_NK = np.signbit(values_NK) & ~np.isnan(values_NK)
        return {
            "indices": indices_NK.astype(self.layout(width)["indices"].dtype),
            "codes": codes_N1K[:, 0],
            "signs": np.packbits(is_negative_NK, axis=1, bitorder="little"),
            "low": low_N1,
            "high": high_N1,
        }

    def _decode(self, encoded: EncodedArrays, width: int) -> RowArray:
        indices_NK = encoded["indices"].astype(np.int64)
        _check(indices_NK, encoded["codes"], encoded["low"], width)
        codes_N1K = encoded["codes"][:, None]
        sizes_NK = minmax8.from_bytes(codes_N1K, encoded["low"], encoded["high"])[:, 0]
        kept = self.kept(width)
        is_negative_NK = np.unpackbits(encoded["signs"], axis=1, count=kept, bitorder="little")
        rows_ND = np.zeros((len(indices_NK), width), np.float32)
        values_NK = np.where(is_negative_NK, -sizes_NK, sizes_NK)
        np.put_along_axis(rows_ND, indices_NK, values_NK, axis=1)
        return rows_ND


def _largest_indices(rows_ND: RowArray, kept: int) -> NDArray[np.int64]:
    """Return the indices of the largest magnitudes, rising; ties to the first, NaN is largest."""
    sizes_ND = np.abs(rows_ND).view(np.int32)
    sizes_ND = np.where(np.isnan(rows_ND), np.int32(NAN_SIZE), sizes_ND).astype(np.int64)
    # With the index in the lower bits no two are equal, so any partition gives the same set.
    rank_ND = np.arange(rows_ND.shape[1]) - sizes_ND * MAX_WIDTH
    return np.sort(np.argpartition(rank_ND, kept - 1, axis=1)[:, :kept], axis=1)


def _check(
    indices_NK: NDArray[np.int64], codes_NK: minmax8.Bytes, low_N1: RowArray, width: int
) -> None:
    is_rising = bool((np.diff(indices_NK, axis=1) > 0).all())
    check_stored(is_rising, "indices", "they do not rise")
    check_stored(bool((indices_NK < width).all()), "indices", "one is beyond the width")
    is_size = bool((codes_NK != minmax8.MINUS_INFINITY).all() and (low_N1 >= 0).all())
    check_stored(is_size, "codes and low", "a size is negative")
