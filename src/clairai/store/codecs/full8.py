"""The encoder `full8`: one byte for each value, and two float32 for each group of values.

N = rows, D = model width, G = groups of a row.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Final

from clairai.store.codecs import minmax8
from clairai.store.codecs.base import (
    MAX_WIDTH,
    ArraySpec,
    EncodedArrays,
    Encoder,
    RowArray,
    check_number,
)

# Any finite row keeps a cosine of 0.9995: with both ends exact and the other 126 values half a step
# off, the error is at most sqrt(126) / 504 * sqrt(2) of the group's norm (docs/encoders.md).
DEFAULT_GROUP: Final = 128


@dataclass(frozen=True)
class Full8(Encoder):
    name: ClassVar[str] = "full8"
    group: int = DEFAULT_GROUP

    def __post_init__(self) -> None:
        check_number(self.name, "group", self.group, low=2, high=MAX_WIDTH)

    def layout(self, width: int) -> dict[str, ArraySpec]:
        groups = -(-width // self.group)
        ends = ArraySpec("float32", groups)
        return {"codes": ArraySpec("uint8", width), "low": ends, "high": ends}

    def _encode(self, rows_ND: RowArray) -> EncodedArrays:
        num_rows, width = rows_ND.shape
        codes_NGC, low_NG, high_NG = minmax8.to_bytes(
            minmax8.split_groups(rows_ND, self._size(width))
        )
        codes_ND = codes_NGC.reshape(num_rows, -1)[:, :width]
        return {"codes": codes_ND, "low": low_NG, "high": high_NG}

    def _decode(self, encoded: EncodedArrays, width: int) -> RowArray:
        codes_NGC = minmax8.split_groups(encoded["codes"], self._size(width))
        values_NGC = minmax8.from_bytes(codes_NGC, encoded["low"], encoded["high"])
        return values_NGC.reshape(len(codes_NGC), -1)[:, :width]

    def _size(self, width: int) -> int:
        return min(self.group, width)
