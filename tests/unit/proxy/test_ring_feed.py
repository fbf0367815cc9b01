"""Scores as JSON numbers."""

from __future__ import annotations

import json

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from clairai.proxy.ring_feed import to_json_numbers


@given(hnp.arrays(np.float32, (3, 4), elements=st.floats(width=32)))
@settings(max_examples=300, deadline=None, derandomize=True)
def test_a_score_that_is_read_back_is_the_same_float32(scores_RP: np.ndarray) -> None:
    made = json.loads(json.dumps(to_json_numbers(scores_RP), allow_nan=False))
    for row, wanted in zip(made, scores_RP, strict=True):
        for value, score in zip(row, wanted, strict=True):
            if np.isfinite(score):
                assert np.float32(value) == score
            else:
                assert value is None


def test_a_score_is_written_in_few_digits() -> None:
    text = json.dumps(to_json_numbers(np.array([[0.1, -12.3456789, 1e-7]], np.float32)))
    assert text == "[[0.100000001, -12.3456793, 1.00000001e-07]]"
