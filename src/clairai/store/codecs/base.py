"""What every encoder does: rows of float32 become arrays of a fixed size per row, and back.

N = rows, D = model width.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import Any, ClassVar, Final, TypeAlias

import numpy as np
from numpy.typing import NDArray

from clairai.errors import ConfigError, EncodingError, quote

MAX_WIDTH: Final = 1 << 17

RowArray: TypeAlias = NDArray[np.float32]
EncodedArrays: TypeAlias = dict[str, NDArray[Any]]


@dataclass(frozen=True)
class ArraySpec:
    """One stored array: numpy's name of its type, and the number of values per row."""

    dtype: str
    size: int

    @property
    def nbytes(self) -> int:
        return np.dtype(self.dtype).itemsize * self.size


@dataclass(frozen=True)
class Encoder(ABC):
    """An encoder has no state but its parameters: equal name and parameters, equal bytes."""

    name: ClassVar[str]
    # Values per block: arithmetic is in float64, and its arrays should stay in the cache.
    block: ClassVar[int] = 1 << 18

    @property
    def parameters(self) -> dict[str, int | str]:
        return asdict(self)

    @abstractmethod
    def layout(self, width: int) -> dict[str, ArraySpec]:
        """Return the arrays that rows of this width become."""

    @abstractmethod
    def _encode(self, rows_ND: RowArray) -> EncodedArrays: ...

    @abstractmethod
    def _decode(self, encoded: EncodedArrays, width: int) -> RowArray: ...

    def encode(self, rows_ND: RowArray) -> EncodedArrays:
        num_rows, width = _check_rows(rows_ND)
        encoded: EncodedArrays = {
            name: np.empty((num_rows, column.size), column.dtype)
            for name, column in self.layout(width).items()
        }
        for part in self._blocks(num_rows, width):
            for name, array in self._encode(rows_ND[part]).items():
                np.copyto(encoded[name][part], array, casting="no")
        return encoded

    def decode(self, encoded: Mapping[str, NDArray[Any]], *, width: int) -> RowArray:
        """Decode arrays; refuse those that this encoder cannot have made."""
        num_rows = self._num_rows(encoded, width)
        rows_ND = np.empty((num_rows, self.decoded_width(width)), np.float32)
        for part in self._blocks(num_rows, max(rows_ND.shape[1], width)):
            with np.errstate(invalid="ignore"):  # a signalling NaN, which is refused or made quiet
                rows_ND[part] = self._decode({name: encoded[name][part] for name in encoded}, width)
        return rows_ND

    def decoded_width(self, width: int) -> int:
        return width

    def reference(self, rows_ND: RowArray) -> RowArray:
        """Return what `decode` would give if the encoder were lossless after its reduction."""
        return rows_ND

    def nbytes_per_row(self, width: int) -> int:
        check_width(width)
        return sum(column.nbytes for column in self.layout(width).values())

    def _blocks(self, num_rows: int, width: int) -> Iterator[slice]:
        step = max(1, self.block // width)
        for start in range(0, num_rows, step):
            yield slice(start, start + step)

    def _num_rows(self, encoded: Mapping[str, NDArray[Any]], width: int) -> int:
        check_width(width)
        layout = self.layout(width)
        if set(encoded) != set(layout):
            raise EncodingError(
                f"{self.name} stores {', '.join(sorted(layout))} and was given "
                f"{quote(', '.join(sorted(encoded)))}; give the arrays that encode gave"
            )
        num_rows = len(encoded[next(iter(layout))])
        for name, column in layout.items():
            array, shape = encoded[name], (num_rows, column.size)
            if array.dtype != column.dtype or array.shape != shape:
                raise EncodingError(
                    f"{self.name}: {name} is {array.dtype} {array.shape}, and rows of width "
                    f"{width} have {column.dtype} {shape}; name the width they had"
                )
        return num_rows


def _check_rows(rows_ND: RowArray) -> tuple[int, int]:
    if rows_ND.ndim != 2 or rows_ND.dtype != np.float32:
        raise EncodingError(
            f"rows are {rows_ND.dtype} {rows_ND.shape}; give float32 of two dimensions, "
            "rows and the model's width"
        )
    check_width(rows_ND.shape[1])
    return rows_ND.shape[0], rows_ND.shape[1]


def check_width(width: int) -> None:
    if not 1 <= width <= MAX_WIDTH:
        raise EncodingError(f"rows of width {width}; encoders take 1 to {MAX_WIDTH}")


def check_number(name: str, parameter: str, value: object, *, low: int, high: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
        raise ConfigError(
            f"{name}: {parameter} is {quote(value)}; give a whole number from {low} to {high}"
        )


def check_stored(is_good: bool, name: str, reason: str) -> None:
    """Refuse arrays that were changed in a file and would decode to something else."""
    if not is_good:
        raise EncodingError(f"{name}: {reason}; these arrays were changed after encoding")
