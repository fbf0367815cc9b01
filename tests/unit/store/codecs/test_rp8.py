"""The random projection depends on its seed alone, and keeps distances."""

from __future__ import annotations

import math
from functools import partial

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from clairai.store.codecs import base, rp8
from clairai.store.codecs.base import RowArray
from clairai.store.codecs.fidelity import measure
from clairai.store.codecs.philox import philox, random_signs
from clairai.store.codecs.rp8 import Rp8
from tests.support.encoder_oracle import like_a_model, projected

# Random123's own: counter, key, what comes out.
KNOWN = [
    ("00000000 " * 4, "00000000 " * 2, "6627e8d5 e169c58d bc57ac4c 9b00dbd8"),
    ("ffffffff " * 4, "ffffffff " * 2, "408f276d 41c83b0e a20bc7c6 6d5451fd"),
    (
        "243f6a88 85a308d3 13198a2e 03707344",
        "a4093822 299f31d0",
        "d16cfe09 94fdcceb 5001e420 24126ea1",
    ),
]


def _words(text: str) -> list[int]:
    return [int(word, 16) for word in text.split()]


@pytest.mark.parametrize(("counter", "key", "expected"), KNOWN)
def test_random_words_are_those_of_the_published_generator(
    counter: str, key: str, expected: str
) -> None:
    low, high = _words(key)
    c0, c1, c2, c3 = _words(counter)
    assert [int(word) for word in philox((c0, c1, c2, c3), high << 32 | low)] == _words(expected)


# Signs of a row's first 32 places, the first in the lowest bit, 1 for -1: seed, row, the bits.
SIGNS = [
    (0, 0, 0x6627E8D5),
    (0, 1, 0x6AD0C5EC),
    (0, 4095, 0x3B6CD0D6),
    (1234567890123456789, 7, 0x95039D51),
]


@pytest.mark.parametrize(("seed", "row", "expected"), SIGNS)
def test_the_signs_of_a_seed_never_change(seed: int, row: int, expected: int) -> None:
    signs_K = random_signs(seed, row + 1, 32)[row]
    assert sum(1 << place for place in range(32) if signs_K[place] < 0) == expected


def test_the_signs_are_where_the_documentation_says() -> None:
    """As documented: row d and value j are bit j % 32 of word j // 32 % 4 of a counter."""
    signs_DK = random_signs(99, 5, 300)
    for row, place in ((0, 0), (3, 31), (3, 32), (4, 127), (4, 128), (2, 299)):
        words = philox((place // 128, row, 0, 0), 99)
        bit = int(words[place // 32 % 4]) >> place % 32 & 1
        assert signs_DK[row, place] == 1 - 2 * bit


def test_a_smaller_projection_is_a_part_of_a_larger_one() -> None:
    assert (random_signs(5, 300, 700)[:200, :130] == random_signs(5, 200, 130)).all()
    assert (random_signs(5, 300, 700) != random_signs(6, 300, 700)).mean() == pytest.approx(
        0.5, abs=0.01
    )


def test_signs_are_even_and_columns_unrelated() -> None:
    signs_DK = random_signs(0, 4096, 512).astype(np.float64)
    gram_KK = signs_DK.T @ signs_DK / 4096
    assert abs(signs_DK.mean()) < 0.003
    assert np.abs(gram_KK - np.eye(512)).max() < 6.5 / math.sqrt(4096)


@settings(derandomize=True, deadline=None, max_examples=20)
@given(st.integers(0, 2**32))
def test_the_order_of_summation_does_not_change_a_bit(seed: int) -> None:
    """So that no machine or library can change one either."""
    rng = np.random.default_rng(seed)
    row_D = (rng.standard_normal(200) * rng.lognormal(0, 8, 200)).astype(np.float32)
    encoder = Rp8(k=16, seed=seed)
    expected_K = encoder.project(row_D[None])[0]
    wide_D = np.zeros(3000, np.float32)
    wide_D[:200] = row_D
    assert (encoder.project(wide_D[None])[0] == expected_K).all()
    assert (encoder.project(np.tile(row_D, (57, 1))) == expected_K).all()
    exact_K = np.array(projected(encoder, row_D.tolist()), np.float32)
    slack = 2**-36 * np.abs(row_D).sum() / 4 + np.abs(exact_K) * 2**-23
    assert (np.abs(expected_K - exact_K) <= slack).all()


def test_sums_whose_terms_cancel_are_exact() -> None:
    """The remainder is far below the last bit of a double, so the order of addition would show."""
    assert base.MAX_WIDTH << rp8.FIXED_BITS <= 1 << 53
    sizes = np.exp2(np.random.default_rng(0).uniform(-28, 0, 2000))
    terms_D = np.concatenate([sizes, -sizes, [2.0**-30]]).astype(np.float32)
    row_D = terms_D * random_signs(0, 4001, 1)[:, 0]
    assert Rp8(k=1).project(row_D[None]).tolist() == [[2.0**-30]]


def _gaussian(num_rows: int, width: int) -> RowArray:
    return np.random.default_rng(1).standard_normal((num_rows, width)).astype(np.float32)


def _cauchy(num_rows: int, width: int) -> RowArray:
    return np.random.default_rng(2).standard_cauchy((num_rows, width)).astype(np.float32)


@pytest.mark.parametrize(
    "rows",
    [_gaussian, _cauchy, like_a_model, partial(like_a_model, seed=1)],
    ids=["gaussian", "cauchy", "like a model", "like another model"],
)
@pytest.mark.parametrize("width", [576, 4096])
def test_rp8_to_512_keeps_distances_to_15_percent_at_p95(rows: object, width: int) -> None:
    assert callable(rows)
    found = measure(Rp8(k=512), rows(100, width))
    assert found.distortion_p95 is not None
    assert found.distortion_p95 <= 0.15


@pytest.mark.parametrize(("apart", "is_kept"), [(0.05, True), (0.005, False)])
def test_distances_are_kept_down_to_a_few_percent_of_the_norms_and_the_measure_shows_it(
    apart: float, is_kept: bool
) -> None:
    rows_ND = _gaussian(1, 2048) + np.float32(apart) * _gaussian(61, 2048)[1:]
    found = measure(Rp8(k=512), rows_ND)
    assert found.distortion_p95 is not None
    assert (found.distortion_p95 <= 0.15) == is_kept


def test_rp8_to_16_does_not_keep_distances_so_the_measure_can_fail() -> None:
    found = measure(Rp8(k=16), _gaussian(100, 576))
    assert found.distortion_p95 is not None
    assert found.distortion_p95 > 0.15


def test_a_row_is_reconstructed_by_the_transpose_as_well_as_expected() -> None:
    encoder, rows_ND = Rp8(k=512, seed=4), _gaussian(50, 1024)
    back_ND = encoder.reconstruct(encoder.decode(encoder.encode(rows_ND), width=1024), width=1024)
    norms_N = np.linalg.norm(rows_ND, axis=1) * np.linalg.norm(back_ND, axis=1)
    cosines_N = (rows_ND * back_ND).sum(axis=1) / norms_N
    assert cosines_N.mean() == pytest.approx(math.sqrt(512 / 1536), abs=0.01)
    slopes_N = (rows_ND * back_ND).sum(axis=1) / (rows_ND**2).sum(axis=1)
    assert slopes_N.mean() == pytest.approx(1, abs=0.02)
