"""No operation makes a row longer than its growth says. D = model width."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from clairai.errors import RequestError
from clairai.fields.row_growth import FLOAT16_ROWS, WIDE_ROWS, Operation, RowGrowth, row_limits

numbers = st.floats(-1e3, 1e3)
operations = (
    st.builds(Operation, st.just("add"), numbers, st.booleans())
    | st.builds(Operation, st.sampled_from(["ablate", "replace"]), numbers)
    | st.builds(Operation, st.just("clamp"), numbers, low=st.none() | numbers, high=numbers)
)
rows = st.lists(st.floats(-10, 10), min_size=3, max_size=3).filter(lambda one: np.linalg.norm(one))


def apply(operation: Operation, stream_D: np.ndarray, vector_D: np.ndarray) -> np.ndarray:
    length = float(np.linalg.norm(vector_D))
    unit_D = vector_D / length
    along = float(stream_D @ unit_D)
    if operation.op == "add":
        size = np.linalg.norm(stream_D) if operation.is_matched else length
        return np.asarray(stream_D + operation.scale * size * unit_D)
    if operation.op == "replace":
        return np.asarray((1 - operation.scale) * stream_D + operation.scale * vector_D)
    low = -np.inf if operation.low is None else operation.low
    high = np.inf if operation.high is None else operation.high
    kept = 0.0 if operation.op == "ablate" else min(max(along, low), high)
    return np.asarray(stream_D + operation.scale * (kept - along) * unit_D)


@settings(derandomize=True, deadline=None)
@given(st.lists(st.tuples(operations, rows), min_size=1, max_size=5), rows)
def test_a_row_becomes_no_longer_than_the_growth_of_all_operations_says(
    steps: list[tuple[Operation, list[float]]], start: list[float]
) -> None:
    stream_D, growth = np.array(start), RowGrowth()
    for operation, vector in steps:
        stream_D = apply(operation, stream_D, np.array(vector))
        growth = growth.then(operation.growth(float(np.linalg.norm(vector))))
    bound = growth.gain * (float(np.linalg.norm(start)) + growth.push)
    assert np.linalg.norm(stream_D) <= bound * (1 + 1e-9)


def test_growth_beyond_float64_is_refused_and_no_error_of_python() -> None:
    growth = RowGrowth()
    for _ in range(1024):
        growth = growth.then(RowGrowth(gain=1e30, push=1e30))
    with pytest.raises(RequestError, match="could become inf long"):
        growth.check(WIDE_ROWS, what="steer[0]")


def test_the_limits_are_those_of_the_models_dtype() -> None:
    assert row_limits("float16") is FLOAT16_ROWS
    assert row_limits("bfloat16") is row_limits("float32") is WIDE_ROWS
    assert FLOAT16_ROWS.longest == np.finfo(np.float16).max
