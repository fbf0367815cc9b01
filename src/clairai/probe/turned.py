"""Takes a bank's columns and another direction for each; gives the columns, made when asked for.

A trainer turns hundreds of probes at once, again and again, and hardly anybody looks at each.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from typing import NamedTuple, TypeAlias, overload

import numpy as np
from numpy.typing import NDArray

from clairai.probe.model import Probe, turned

Place: TypeAlias = tuple[int, int]  # site and slot


class Column(NamedTuple):
    """Where one probe sits."""

    site_index: int
    slot_index: int
    probe: Probe


class Turned(Sequence[Column]):
    """As `root`, each probe with its row of the block: those rows were checked, and stay."""

    def __init__(
        self,
        root: tuple[Column, ...],
        block_PD: NDArray[np.float32],
        names: tuple[str, ...],
        places: tuple[Place, ...],
    ) -> None:
        """`names` and `places` are the root's, in its order."""
        assert len(root) == len(block_PD)
        self.root, self.block_PD = root, block_PD
        self.names, self.places = names, places

    @cached_property
    def _all(self) -> tuple[Column, ...]:
        probes = turned([column.probe for column in self.root], self.block_PD)
        return tuple(
            Column(*place, probe) for place, probe in zip(self.places, probes, strict=True)
        )

    def __len__(self) -> int:
        return len(self.root)

    @overload
    def __getitem__(self, index: int) -> Column: ...

    @overload
    def __getitem__(self, index: slice) -> tuple[Column, ...]: ...

    def __getitem__(self, index: int | slice) -> Column | tuple[Column, ...]:
        return self._all[index]

    def __iter__(self) -> Iterator[Column]:
        return iter(self._all)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Turned | tuple):
            return NotImplemented
        return self._all == tuple(other)

    __hash__ = None  # type: ignore[assignment]  # as what holds it


class ByName(Mapping[str, Probe]):
    """The probes of some columns, as they are at this moment."""

    def __init__(self, names: tuple[str, ...], columns: Sequence[Column]) -> None:
        self._index = {name: index for index, name in enumerate(names)}
        self._columns = columns

    def __getitem__(self, name: str) -> Probe:
        return self._columns[self._index[name]].probe

    def __iter__(self) -> Iterator[str]:
        return iter(self._index)

    def __len__(self) -> int:
        return len(self._index)
