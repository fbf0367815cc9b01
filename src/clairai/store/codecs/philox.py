"""Random signs from a seed, the same on every machine and in every language: Philox4x32-10.

Philox4x32-10 (Salmon, Moraes, Dror, Shaw: Parallel random numbers: as easy as 1, 2, 3; 2011), which
Triton, cuRAND and JAX know too. Written out in docs/encoders.md. D = model width, K = projected.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

ROUNDS: Final = 10
MULTIPLIERS: Final = (0xD2511F53, 0xCD9E8D57)
WEYL: Final = (0x9E3779B9, 0xBB67AE85)
MASK: Final = 0xFFFFFFFF
BITS: Final = 128  # of one counter

Words = NDArray[np.uint64]


def philox(counter: tuple[Any, Any, Any, Any], seed: int) -> tuple[Words, Words, Words, Words]:
    """Return four 32-bit words for each counter, held in 64 bits."""
    c0, c1, c2, c3 = (np.asarray(word, np.uint64) for word in counter)
    keys = [seed & MASK, seed >> 32]
    shift, mask = np.uint64(32), np.uint64(MASK)
    for _ in range(ROUNDS):
        first, second = c0 * np.uint64(MULTIPLIERS[0]), c2 * np.uint64(MULTIPLIERS[1])
        c0, c1, c2, c3 = (
            second >> shift ^ c1 ^ np.uint64(keys[0]),
            second & mask,
            first >> shift ^ c3 ^ np.uint64(keys[1]),
            first & mask,
        )
        keys = [(key + step) & MASK for key, step in zip(keys, WEYL, strict=True)]
    return c0, c1, c2, c3


@lru_cache(maxsize=4)
def random_signs(seed: int, width: int, k: int) -> NDArray[np.int8]:
    """Return +1 and -1 as [D, K]; a smaller D or K gives a part of the same matrix."""
    row_D1 = np.arange(width, dtype=np.uint64)[:, None]
    block_1B = np.arange(-(-k // BITS), dtype=np.uint64)[None]
    words = np.broadcast_arrays(*philox((block_1B, row_D1, 0, 0), seed))
    words_DBW = np.stack(words, axis=2).astype("<u4")
    bits_DK = np.unpackbits(words_DBW.view(np.uint8), axis=2, bitorder="little")
    signs_DK = 1 - 2 * bits_DK.reshape(width, -1)[:, :k].astype(np.int8)
    signs_DK.flags.writeable = False
    return signs_DK
