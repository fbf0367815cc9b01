"""The extra key that a steered block of tokens has in vLLM's prefix cache.

Runs in: the engine core. The KV cache of a block [start, end) depends on its tokens, on those
before it, and on the steering of positions below `end`. vLLM's own hash covers the tokens; the key
covers the steering. Two plans give a block the same key exactly if they treat every position below
its end alike.
"""

from __future__ import annotations

import hashlib
import struct
from bisect import bisect_left
from typing import Final

from clairai.engine.steer.steering_plan import SteeringPlan, treatments

_ENDS: Final = struct.Struct("<II")


class BlockKeys:
    """The keys of one plan's blocks: made once for a request, read for each of its blocks."""

    def __init__(self, plan: SteeringPlan) -> None:
        self._treatments = treatments(plan)
        self._starts = [start for start, _, _ in self._treatments]
        self._before = [b""]  # digest of all treatments before this index
        for start, end, key in self._treatments:
            self._before.append(_chain(self._before[-1], start, end, key))

    @property
    def first(self) -> int | None:
        """The first position that is steered."""
        return self._starts[0] if self._starts else None

    def key(self, end: int) -> str | None:
        """The key of the block that ends before position `end`; None if nothing acts below it."""
        last = bisect_left(self._starts, end) - 1
        if last < 0:
            return None
        start, stop, key = self._treatments[last]
        return _chain(self._before[last], start, min(stop, end), key).hex()


def block_key(plan: SteeringPlan, start: int, end: int) -> str | None:
    """The key of one block; for many blocks of a plan keep its BlockKeys."""
    assert 0 <= start < end
    return BlockKeys(plan).key(end)


def _chain(before: bytes, start: int, end: int, key: bytes) -> bytes:
    return hashlib.blake2b(before + _ENDS.pack(start, end) + key, digest_size=16).digest()
