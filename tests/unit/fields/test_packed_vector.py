"""Vectors that come with a request: every bit arrives, and what is wrong is refused unread."""

from __future__ import annotations

import base64
from contextlib import suppress
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from clairai.errors import ClairaiError, PointError, RequestError, VectorError
from clairai.fields.packed_vector import Dtype, pack_vector, parse_packed
from clairai.fields.steering_vectors import parse_steering_vectors
from clairai.fields.when import When
from clairai.points import Point, quote
from clairai.vector.model import Vector
from tests.support.steering_plans import vector

VALUES = np.array([1.0, -2.5, 0.1], np.float32)
POINT = Point("post_block", 3)


def text(values: Any, dtype: str = "<f4") -> str:
    return base64.b64encode(np.asarray(values).astype(dtype).tobytes()).decode()


def given_as(dtype: str, data: object) -> dict[str, Any]:
    return {"dtype": dtype, "points": {"post_block.3": data}}


def unpacked(packed: object, width: int = 3) -> Vector:
    return parse_packed(packed, what="vector").unpack(width, what="vector")


def test_a_packed_vector_arrives_bit_for_bit() -> None:
    sent = vector("joy", values=(1e-40, -0.1, 3e38))
    again = unpacked(pack_vector(sent).to_json())
    assert again.digest == sent.digest


@pytest.mark.parametrize(
    ("dtype", "data"),
    [
        ("f32", VALUES.astype("<f4").tobytes()),
        ("f16", VALUES.astype("<f2").tobytes()),
        ("bf16", (VALUES.view(np.uint32) >> 16).astype("<u2").tobytes()),
    ],
)
def test_each_dtype_is_read_as_little_endian(dtype: Dtype, data: bytes) -> None:
    read = unpacked(given_as(dtype, base64.b64encode(data).decode())).rows[POINT]
    assert np.allclose(read, VALUES, rtol={"f32": 0, "f16": 1e-3, "bf16": 1e-2}[dtype])
    assert read[0] == 1.0
    assert read[1] == -2.5


def test_points_may_have_their_other_name_and_come_in_path_order() -> None:
    packed = {"points": {"resid_post.3": text(VALUES), "pre_attn.0": text(VALUES)}}
    assert unpacked(packed).points == (Point("pre_attn", 0), POINT)


def shortened(data: str) -> str:
    return data[:-1] + "*"


@pytest.mark.parametrize(
    ("packed", "reason"),
    [
        (given_as("f64", "AAAA"), "one of f32, f16, bf16"),
        ({"dtype": "f32"}, "points must be an object of 1 to 1024 points"),
        ({"points": {}}, "points must be an object"),
        ({"points": [1.0]}, "points must be an object"),
        ({"points": {"post_block.3": text(VALUES)}, "name": "x"}, "unknown key 'name'"),
        (given_as("f32", [1.0, 2.0, 3.0]), "must be base64 text"),
        (given_as("f32", None), "must be base64 text"),
        (given_as("f32", text(VALUES[:2])), "has 12 characters of base64; 3 numbers of f32"),
        (given_as("f16", text(VALUES)), "has 16 characters of base64; 3 numbers of f16"),
        (given_as("f32", "A" * 10**6), "has 1000000 characters of base64"),
        (given_as("f32", shortened(text(VALUES))), "is not base64"),
        (given_as("f32", "é" * 16), "is not base64"),
        (given_as("f32", "AAAA****AAAAAAAA"), "is not base64"),
        (given_as("f32", "AAAAAAAAAAAAAAA\n"), "is not base64"),
        (given_as("f16", "AAAAAAA="), "holds 5 bytes, and 3 f16 are 6"),
    ],
    ids=quote,
)
def test_a_packed_vector_that_is_wrong_is_refused(packed: object, reason: str) -> None:
    with pytest.raises(RequestError, match=reason) as caught:
        unpacked(packed)
    assert len(str(caught.value)) < 300


def test_one_point_under_both_of_its_names_is_refused() -> None:
    packed = {"points": {"resid_post.3": text(VALUES), "post_block.3": text(VALUES)}}
    with pytest.raises(RequestError, match=r"names post_block.3 twice"):
        unpacked(packed)


def test_a_point_that_is_none_is_refused() -> None:
    with pytest.raises(PointError, match="is not a tap point"):
        unpacked({"points": {"layer 3": text(VALUES)}})


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("dtype", ["<f4", "<f2"])
def test_numbers_that_are_not_finite_are_refused(value: float, dtype: str) -> None:
    packed = given_as("f32" if dtype == "<f4" else "f16", text([1, value, 2], dtype))
    with pytest.raises(VectorError, match="NaN or infinity"):
        unpacked(packed)


def test_a_row_of_zeros_is_refused() -> None:
    with pytest.raises(VectorError, match="all zeros"):
        unpacked(given_as("f32", text([0, 0, 0])))


@settings(derandomize=True, deadline=None, max_examples=100)
@given(st.text("AQg=+/ \n*", max_size=20), st.sampled_from(["f32", "f16", "bf16"]))
def test_any_text_is_decoded_or_refused_and_nothing_else(data: str, dtype: str) -> None:
    for width in (1, 2, 3):
        with suppress(ClairaiError):
            assert unpacked(given_as(dtype, data), width).width == width


# What requests of the seeds carry.


def rows_of(given: object, what: str = "steering_vectors") -> dict[str, list[float]]:
    (entry,) = parse_steering_vectors(given, what=what)
    assert isinstance(entry.vector, Vector)
    return {str(point): row_D.tolist() for point, row_D in entry.vector.rows.items()}


SEED = {"post_block": {"15": {"vector": [0.5, 0.25], "scale": 2.0}}, "pre_attn": {3: [1, 2]}}


def test_a_row_of_the_seeds_is_numbers_with_a_scale_folded_in() -> None:
    assert rows_of(SEED) == {"pre_attn.3": [1, 2], "post_block.15": [1, 0.5]}


def test_rows_of_the_seeds_come_packed_one_by_one_or_by_hook() -> None:
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
def test_each_field_of_the_seeds_adds_in_its_phase(what: str, phase: Any) -> None:
    (entry,) = parse_steering_vectors(SEED, what=what)
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
def test_fields_of_the_seeds_that_are_wrong_are_refused(
    given: object, kind: type[ClairaiError], reason: str
) -> None:
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
def test_whatever_the_seeds_fields_hold_is_read_or_refused(value: object) -> None:
    for field in (value, {"post_block": value}, {"post_block": {"1": value}}):
        with suppress(ClairaiError):
            parse_steering_vectors(field, what="steering_vectors")
