"""Takes a course; gives each block of tokens the extra key it has in vLLM's prefix cache.

Keys and values of a block [start, end) depend on its tokens, on those before, and on what was done
to positions below `end`. The tokens are in vLLM's own hash; the rest is the key: two courses give a
block the same key exactly if they treat every position below its end alike.
"""

from __future__ import annotations

import hashlib
import struct
from bisect import bisect_left
from typing import Final

from clairai.engine.steer.steering_plan import SteeringPlan, treatments

_ENDS: Final = struct.Struct("<II")


class BlockKeys:
    """The keys of one course: made once for a request, asked for every block of it."""

    def __init__(self, plan: SteeringPlan) -> None:
        self._treated = treatments(plan)
        self._starts = [start for start, _, _ in self._treated]
        self._before = [b""]  # digest of all treatment before the one of this index
        for start, end, key in self._treated:
            self._before.append(_chain(self._before[-1], start, end, key))

    def key(self, end: int) -> str | None:
        """Of the block that ends before position `end`; None where nothing was done."""
        last = bisect_left(self._starts, end) - 1
        if last < 0:
            return None
        start, stop, key = self._treated[last]
        return _chain(self._before[last], start, min(stop, end), key).hex()


def block_key(plan: SteeringPlan, start: int, end: int) -> str | None:
    """The key of the block [start, end); for many blocks of a course keep its BlockKeys."""
    assert 0 <= start < end
    return BlockKeys(plan).key(end)


def _chain(before: bytes, start: int, end: int, key: bytes) -> bytes:
    return hashlib.blake2b(before + _ENDS.pack(start, end) + key, digest_size=16).digest()
