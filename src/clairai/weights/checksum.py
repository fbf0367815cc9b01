"""The 64-bit checksum of a tensor in host memory; checksum_kernel.py computes the same on a GPU.

Each 8-byte word is mixed with its position by an invertible function, and the results are added:
a single changed word always shows, and a GPU may add in any order. It detects damage; it does not
stop a forger, who would already be a process of the same user.

checksum.c does the work where there is a C compiler: several times as fast, without Python's lock.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from clairai.local import c_extension

WORD_BYTES: Final = 8
PLACE: Final = 0x9E3779B97F4A7C15
MIX: Final = 0xFF51AFD7ED558CCD
SHIFTS: Final = (33, 29)
MASK: Final = (1 << 64) - 1
CHUNK_WORDS: Final = 1 << 15  # stays in the processor's cache between the passes
_PLACES: Final = np.arange(CHUNK_WORDS, dtype=np.uint64) * np.uint64(PLACE)


def checksum(raw: memoryview | bytes) -> str:
    """16 hex digits. A last partial word is padded with zeros, and the length is mixed in."""
    module = load_native()
    return finish_checksum(_sum_bytes(raw) if module is None else module.checksum(raw), len(raw))


def copy_and_checksum(target: memoryview, source: memoryview | bytes) -> str:
    """Copy all bytes; return the checksum of the copy, whoever writes to the source meanwhile."""
    module = load_native()
    if module is not None:
        return finish_checksum(module.copy_and_checksum(target, source), len(target))
    target[:] = source
    return checksum(target)


@cache
def load_native() -> Any:
    """The module of checksum.c, compiled once; None without a compiler."""
    source = Path(__file__).with_name("checksum.c")
    return c_extension.load_or_warn(source, "checksums of weights take longer without it")


def _sum_bytes(raw: memoryview | bytes) -> int:
    """The same as `checksum` in checksum.c."""
    whole = len(raw) // WORD_BYTES * WORD_BYTES
    words = np.frombuffer(raw, np.uint8, count=whole).view("<u8")
    return (_sum_words(words, 0) + tail_sum(bytes(raw[whole:]), len(words))) & MASK


def tail_sum(rest: bytes, first: int) -> int:
    """What a partial word at position `first` adds; 0 for no bytes."""
    if not rest:
        return 0
    return _sum_words(np.frombuffer(rest.ljust(WORD_BYTES, b"\0"), "<u8"), first)


def finish_checksum(total: int, nbytes: int) -> str:
    return f"{(total + nbytes * PLACE) & MASK:016x}"


def _sum_words(words: NDArray[np.uint64], first: int) -> int:
    mixed, shifted = np.empty((2, min(len(words), CHUNK_WORDS)), np.uint64)
    total = 0
    for start in range(0, len(words), CHUNK_WORDS):
        part = words[start : start + CHUNK_WORDS]
        x, y = mixed[: len(part)], shifted[: len(part)]
        np.add(part, _PLACES[: len(part)], out=x)
        np.add(x, np.uint64((first + start) * PLACE & MASK), out=x)
        np.bitwise_xor(x, np.right_shift(x, np.uint64(SHIFTS[0]), out=y), out=x)
        np.multiply(x, np.uint64(MIX), out=x)
        np.bitwise_xor(x, np.right_shift(x, np.uint64(SHIFTS[1]), out=y), out=x)
        total += int(np.add.reduce(x))
    return total & MASK
