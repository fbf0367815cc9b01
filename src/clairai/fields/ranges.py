"""Ranges of absolute token positions: what a plan acts on once the prompt's length is known.

Position p is the row of the (p + 1)th token; the prompt's rows come first.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

Range = tuple[int, int]  # first position, one past the last
OPEN_END: Final = 2**31 - 1  # the end of a range that lasts as long as the request
EVERYWHERE: Final[Range] = (0, OPEN_END)
MAX_RANGES: Final = 64  # of one entry, action or capture


def merge_ranges(ranges: Iterable[Range]) -> tuple[Range, ...]:
    """The same positions as sorted ranges that neither touch nor are empty."""
    merged: list[Range] = []
    for start, end in sorted(one for one in ranges if one[0] < one[1]):
        if merged and start <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(end, merged[-1][1]))
        else:
            merged.append((start, end))
    return tuple(merged)
