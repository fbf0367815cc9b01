"""The `steering_vectors` fields of a request become entries, or are refused."""

from __future__ import annotations

import base64
from contextlib import suppress
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from clairai.errors import ClairaiError, PointError, RequestError, VectorError, quote
from clairai.fields.steering_vectors import parse_steering_vectors
from clairai.fields.when import When
from clairai.vector.model import Vector


def text(values: Any, dtype: str = "<f4") -> str:
    return base64.b64encode(np.asarray(values).astype(dtype).tobytes()).decode()


def rows_of(given: object, what: str = "steering_vectors") -> dict[str, list[float]]:
    (entry,) = parse_steering_vectors(given, what=what)
    assert isinstance(entry.vector, Vector)
    return {str(point): row_D.tolist() for point, row_D in entry.vector.rows.items()}


FIELD = {"post_block": {"15": {"vector": [0.5, 0.25], "scale": 2.0}}, "pre_attn": {3: [1, 2]}}


def test_the_scale_of_a_row_is_multiplied_in() -> None:
    assert rows_of(FIELD) == {"pre_attn.3": [1, 2], "post_block.15": [1, 0.5]}


def test_rows_can_be_packed_one_by_one_or_by_hook() -> None:
    one = {"vector": {"dtype": "float16", "data": text([0.5, 0.25], "<f2")}, "scale": 2.0}
    layers = {
        "dtype": "float32",
        "shape": [2, 2],
        "layer_indices": [3, 4],
        "data": text([[1, 2], [3, 4]]),
        "scales": [1.0, -1.0],
    }
    expected = {"pre_attn.3": [1, 2], "pre_attn.4": [-3, -4], "post_block.15": [1, 0.5]}
    assert rows_of({"post_block": {"15": one}, "pre_attn": layers}) == expected


@pytest.mark.parametrize(
    ("what", "phase"),
    [
        ("steering_vectors", "both"),
        ("prefill_steering_vectors", "prompt"),
        ("decode_steering_vectors", "generation"),
    ],
)
def test_each_field_adds_in_its_phase(what: str, phase: Any) -> None:
    (entry,) = parse_steering_vectors(FIELD, what=what)
    assert (entry.op, entry.scale, entry.when, entry.label) == ("add", 1.0, When(phase), what)


def test_rows_of_scale_0_add_nothing_and_are_left_out() -> None:
    silent = {"vector": [1.0, 2.0], "scale": 0}
    assert parse_steering_vectors({"post_block": {"1": silent}}, what="steering_vectors") == ()
    assert rows_of({"post_block": {"1": silent, "2": [1, 2]}}) == {"post_block.2": [1, 2]}


PACK = {"dtype": "float32", "shape": [1, 2], "layer_indices": [3], "data": text([1, 2])}


@pytest.mark.parametrize(
    ("given", "kind", "reason"),
    [
        ([], RequestError, "must be an object"),
        ({"post_block": [1.0]}, RequestError, "holds a list of 1"),
        ({"nowhere": {"1": [1.0]}}, PointError, "is not a kind of tap point"),
        ({"post_block": {"-1": [1.0]}}, PointError, "is not a tap point"),
        ({"post_block": {True: [1.0]}}, PointError, "is no tap point"),
        ({3: {"1": [1.0]}}, PointError, "is no tap point"),
        ({"x" * 10**6: {"1": [1.0]}}, PointError, "is not a tap point"),
        ({"post_block": {"1": [1.0, True]}}, VectorError, "other than numbers"),
        ({"post_block": {"1": [10**400]}}, VectorError, "beyond float64"),
        ({"post_block": {"1": [1e300]}}, VectorError, "NaN or infinity"),
        ({"post_block": {"1": [float("nan")]}}, VectorError, "NaN or infinity"),
        ({"post_block": {"1": [0.0, 0.0]}}, VectorError, "all zeros"),
        ({"post_block": {"1": []}}, VectorError, "a list of 1 to"),
        ({"post_block": {"1": [1.0], "2": [1.0, 2.0]}}, VectorError, "of width 1 and of 2"),
        ({"post_block": {"1": "AAAA"}}, VectorError, "give a list of 1 to"),
        ({"post_block": {"1": {"vector": [1.0], "s": 1}}}, RequestError, "unknown key 's'"),
        ({"post_block": {"1": {"vector": [1.0], "scale": "2"}}}, RequestError, "finite number"),
        ({"post_block": {"1": {"scale": 2}}}, VectorError, "give a list of 1 to"),
        ({"post_block": {"1": [1.0], 1: [2.0]}}, RequestError, "names post_block.1 twice"),
        ({"post_block": {"1": {"vector": {"data": 3}}}}, RequestError, "must be base64 text"),
        ({"post_block": {"1": {"vector": {"data": "AAA"}}}}, RequestError, "not base64|base64;"),
        ({"post_block": PACK | {"dtype": "int8"}}, RequestError, "one of float32"),
        ({"post_block": PACK | {"shape": [2, 2]}}, RequestError, r"must be \[layers, width\]"),
        ({"post_block": PACK | {"shape": [True, 2]}}, RequestError, r"must be \[layers, width\]"),
        ({"post_block": PACK | {"shape": [1, 3]}}, RequestError, "3 numbers of f32"),
        ({"post_block": PACK | {"shape": [1, 0]}}, RequestError, "whole number of 1 to"),
        ({"post_block": PACK | {"data": 3}}, RequestError, "must be base64 text"),
        ({"post_block": PACK | {"scales": [1, 2]}}, RequestError, "2 numbers for 1 layers"),
        ({"post_block": PACK | {"scales": [None]}}, RequestError, "finite number"),
        ({"post_block": PACK | {"layer_indices": ["x"]}}, PointError, "is not a tap point"),
        ({"post_block": PACK | {"more": 1}}, RequestError, "unknown key 'more'"),
    ],
    ids=quote,
)
def test_a_wrong_field_is_refused(given: object, kind: type[ClairaiError], reason: str) -> None:
    with pytest.raises(kind, match=reason) as caught:
        parse_steering_vectors(given, what="steering_vectors")
    assert "steering_vectors" in str(caught.value)
    assert len(str(caught.value)) < 400


junk = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text("A=1", max_size=4),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from([*PACK, "vector", "scale", "post_block", "1", "scales"]),
            inner,
            max_size=4,
        )
    ),
    max_leaves=10,
)


@settings(derandomize=True, deadline=None, max_examples=200)
@given(junk)
def test_any_field_is_read_or_refused(value: object) -> None:
    for field in (value, {"post_block": value}, {"post_block": {"1": value}}):
        with suppress(ClairaiError):
            parse_steering_vectors(field, what="steering_vectors")
