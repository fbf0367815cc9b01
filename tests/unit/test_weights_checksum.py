"""Takes bytes; gives the same checksum by numpy and by the definition."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from clairai.weights import checksum as host


def plainly(raw: bytes) -> str:
    """The definition, word by word."""
    total = 0
    for index in range(0, len(raw), 8):
        word = int.from_bytes(raw[index : index + 8].ljust(8, b"\0"), "little")
        x = (word + index // 8 * host.PLACE) & host.MASK
        x ^= x >> 33
        x = x * host.MIX & host.MASK
        x ^= x >> 29
        total += x
    return f"{(total + len(raw) * host.PLACE) & host.MASK:016x}"


@settings(derandomize=True, deadline=None)
@given(st.binary(max_size=300))
def test_it_is_as_defined(raw: bytes) -> None:
    assert host.checksum(raw) == plainly(raw)


@pytest.mark.parametrize("words", [1, host.CHUNK_WORDS - 1, host.CHUNK_WORDS, host.CHUNK_WORDS + 1])
def test_it_is_as_defined_where_a_chunk_ends(words: int) -> None:
    raw = np.random.default_rng(words).bytes(8 * words + 3)
    assert host.checksum(raw) == plainly(raw)


def test_every_flipped_bit_shows() -> None:
    raw = bytearray(np.random.default_rng(1).bytes(250))
    before = host.checksum(bytes(raw))
    for bit in range(8 * len(raw)):
        raw[bit // 8] ^= 1 << bit % 8
        assert host.checksum(bytes(raw)) != before
        raw[bit // 8] ^= 1 << bit % 8


def test_two_words_that_change_places_show_and_so_does_a_longer_end() -> None:
    a, b = b"\x00" * 6 + b"\x80\x3f", b"\x00" * 6 + b"\x00\x40"
    assert host.checksum(a + b) != host.checksum(b + a)
    assert host.checksum(a) != host.checksum(a + b"\0")
