"""Every number of the spec is a number in float32, and so is what is computed of it."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from clairai.probe import numeric_bounds as bounds
from clairai.probe.model import are_usable


def test_the_lengths_of_rows_can_be_squared_and_divided_by_in_float32() -> None:
    tiny, largest = float(np.finfo(np.float32).tiny), float(np.finfo(np.float32).max)
    for length in (bounds.MIN_ROW_LENGTH, bounds.MAX_ROW_LENGTH):
        for number in (length, length**2, 1 / length, 1 / length**2):
            assert tiny < number < largest
    longest = bounds.MAX_STREAM_LENGTH
    assert longest**2 < largest
    assert longest * bounds.MAX_ROW_LENGTH + bounds.MAX_NUMBER < largest


@pytest.mark.parametrize("value", [float("nan"), float("inf"), 1.01e30, -1e31, 10**400])
def test_what_is_no_number_of_the_spec_is_neither_number_nor_factor(value: float) -> None:
    assert not bounds.is_number(value)
    assert not bounds.is_factor(value)


@pytest.mark.parametrize("value", [True, "1", None, [1.0]])
def test_only_numbers_are_numbers(value: object) -> None:
    assert not bounds.is_number(value)


def test_a_factor_is_0_or_large_enough_to_be_one_on_the_device() -> None:
    assert bounds.is_factor(0.0)
    assert bounds.is_factor(-1e-30)
    assert not bounds.is_factor(1e-31)
    assert np.float32(bounds.MIN_FACTOR) != 0


rows = st.lists(st.floats(width=32), min_size=1, max_size=8)


@given(rows)
def test_the_quick_looks_at_rows_never_pass_one_that_the_exact_one_refuses(
    values: list[float],
) -> None:
    block_ND = np.array([values], np.float32)
    length = bounds.row_length(block_ND[0])
    with np.errstate(all="ignore"):
        if bounds.are_row_lengths(block_ND)[0] or are_usable(block_ND)[0]:
            assert bounds.is_row_length(length)


def test_the_quick_looks_pass_an_ordinary_row() -> None:
    block_ND = np.random.default_rng(0).standard_normal((4, 4096)).astype(np.float32)
    assert bounds.are_row_lengths(block_ND).all()
    assert are_usable(block_ND).all()
