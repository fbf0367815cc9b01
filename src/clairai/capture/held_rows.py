"""Takes rows of requests that wait for a rule; gives them back when it is met. Bounded, counted."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, field

import numpy as np

from clairai.store.row_block import RowBlock

AnswerId = tuple[int, int]  # stream and choice
HeldBlock = tuple[RowBlock, tuple[str, ...]]  # and for which consumers


@dataclass
class _HeldAnswer:
    waiting: list[HeldBlock] = field(default_factory=list)
    rows: int = 0
    nbytes: int = 0


class HeldRows:
    """Rows of answers of which it is not known whether they are wanted."""

    def __init__(self, limit_nbytes: int) -> None:
        self._limit = limit_nbytes
        self._piles: OrderedDict[AnswerId, _HeldAnswer] = OrderedDict()
        self.nbytes = 0

    def open(self, seat: AnswerId) -> None:
        self._piles[seat] = _HeldAnswer()

    def __contains__(self, seat: AnswerId) -> bool:
        return seat in self._piles

    def __len__(self) -> int:
        return len(self._piles)

    def put(self, seat: AnswerId, block: RowBlock, to: tuple[str, ...]) -> int:
        """How many rows had no room: the last of these, never others that are held already."""
        room = (self._limit - self.nbytes) * block.num_rows // block.nbytes
        lost = max(block.num_rows - room, 0)
        if lost:
            block = block.select(np.arange(block.num_rows - lost))
        pile = self._piles[seat]
        pile.waiting.append((block, to))
        pile.rows += block.num_rows
        pile.nbytes += block.nbytes
        self.nbytes += block.nbytes
        return lost

    def take(self, seat: AnswerId) -> list[HeldBlock]:
        """All that is held of it; it is held no more."""
        pile = self._piles.pop(seat)
        self.nbytes -= pile.nbytes
        return pile.waiting

    def rows(self, seat: AnswerId) -> int:
        return self._piles[seat].rows
