"""The kernels compute the checksum that numpy computes, and copy exactly those bytes."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from clairai.weights import checksum as host
from clairai.weights import device_checksum
from clairai.weights.checksum_kernel import PART_WORDS, TILE_W

GUARD = 256
PART = 8 * PART_WORDS
SIZES = st.lists(
    st.one_of(st.integers(0, 100), st.sampled_from([8 * TILE_W - 1, 8 * TILE_W, PART, PART + 9])),
    min_size=1,
    max_size=5,
)


def spans(sizes: list[int], seed: int = 1) -> list[torch.Tensor]:
    """Bytes at addresses aligned like torch's own allocations."""
    rng = np.random.default_rng(seed)
    raw = [torch.empty(size, dtype=torch.uint8) for size in sizes]
    for each in raw:
        each[:] = torch.from_numpy(np.frombuffer(rng.bytes(len(each)), np.uint8).copy())
    return raw


def expected(given_N: list[torch.Tensor]) -> list[str]:
    return [host.checksum(each.numpy().tobytes()) for each in given_N]


@settings(derandomize=True, deadline=None, max_examples=25)
@given(SIZES)
@example([0])
@example([3 * PART + 8 * TILE_W + 5, 1, PART])
def test_every_size_has_the_checksum_that_the_host_computes(sizes: list[int]) -> None:
    held = spans(sizes)
    assert device_checksum.checksums(held) == expected(held)


@settings(derandomize=True, deadline=None, max_examples=25)
@given(SIZES)
@example([3 * PART + 8 * TILE_W + 5, 1, PART])
def test_a_copy_is_the_bytes_that_were_summed_and_nothing_beside_them(sizes: list[int]) -> None:
    held = spans(sizes)
    room = [torch.full((len(each) + 2 * GUARD,), 0xA5, dtype=torch.uint8) for each in held]
    targets = [each[GUARD : len(each) - GUARD] for each in room]
    assert device_checksum.copy_and_checksum(held, targets) == expected(held)
    for each, target, whole in zip(held, targets, room, strict=True):
        assert torch.equal(each, target)
        assert (whole[:GUARD] == 0xA5).all()
        assert (whole[len(whole) - GUARD :] == 0xA5).all()


@pytest.mark.parametrize("offset", [1, 2, 8])
def test_a_view_of_a_tensor_may_begin_anywhere(offset: int) -> None:
    (whole,) = spans([5000])
    piece = whole[offset:]
    target = torch.zeros(len(piece), dtype=torch.uint8)
    assert device_checksum.copy_and_checksum([piece], [target]) == expected([piece])
    assert torch.equal(piece, target)


def test_every_flipped_bit_of_a_word_changes_the_checksum() -> None:
    (held,) = spans([64])
    before = device_checksum.checksums([held])
    for bit in range(8):
        held[37] ^= 1 << bit
        assert device_checksum.checksums([held]) != before
        held[37] ^= 1 << bit
