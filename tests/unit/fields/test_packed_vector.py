"""Vectors packed inside a request: decoded without loss, or refused before decoding."""

from __future__ import annotations

import base64
from contextlib import suppress
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from clairai.errors import ClairaiError, PointError, RequestError, VectorError, quote
from clairai.fields.packed_vector import Dtype, pack_vector, parse_packed
from clairai.points import Point
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
    sent = vector("joy", values=(1e-40, -0.1, 3e14))
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


def test_points_may_use_either_name_and_are_sorted() -> None:
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


def test_an_unknown_point_is_refused() -> None:
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
def test_any_text_is_decoded_or_refused(data: str, dtype: str) -> None:
    for width in (1, 2, 3):
        with suppress(ClairaiError):
            assert unpacked(given_as(dtype, data), width).width == width
