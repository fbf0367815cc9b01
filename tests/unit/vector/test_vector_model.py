"""A vector is checked when made, immutable afterwards, and identified by its content."""

from __future__ import annotations

from dataclasses import FrozenInstanceError, replace
from typing import Any

import msgspec
import numpy as np
import pytest

from clairai.errors import VectorError, quote
from clairai.points import Point
from clairai.probe.model import MAX_NAME, MAX_WIDTH
from clairai.vector.model import MAX_NUMBERS, MAX_POINTS, Vector, digest_row
from clairai.wire import steering_messages
from tests.support.probes import numbers
from tests.support.vectors import vector

FIRST, SECOND = Point("pre_attn", 1), Point("post_block", 1)


@pytest.mark.parametrize("name", ["a", "A.b_c:d/e@f+g-h", "x" * MAX_NAME, "-", "0"])
def test_a_valid_name_is_accepted(name: str) -> None:
    assert vector(name=name).name == name


@pytest.mark.parametrize(
    "name",
    ["", ".a", "a..b", "/etc/x", "a b", "a\n", "é", "x" * (MAX_NAME + 1), 1, None],
    ids=quote,
)
def test_an_invalid_name_is_refused_in_a_short_sentence(name: object) -> None:
    with pytest.raises(VectorError, match="1 to 128") as caught:
        vector(name=name)
    assert len(str(caught.value)) < 300


@pytest.mark.parametrize(
    ("row", "bound"),
    [
        ([1.0, 2.0, 3.0], "float32 array"),
        (np.ones(3), "float32 array"),
        (np.ones(3, ">f4"), "float32 array"),
        (np.ones((3, 1), np.float32), "one dimension"),
        (np.float32(1), "one dimension"),
        (numbers(), "1 to 1000000"),
        (np.ones(MAX_WIDTH + 1, np.float32), "1 to 1000000"),
        (numbers(1, np.nan, 0), "NaN or infinity"),
        (numbers(1, 0, -np.inf), "NaN or infinity"),
        (numbers(0, -0.0, 0), "all zeros"),
        (numbers(1, 2), "of width 2 and of 3"),
    ],
)
def test_a_row_that_cannot_steer_is_refused(row: object, bound: str) -> None:
    with pytest.raises(VectorError, match=bound):
        vector(rows={FIRST: numbers(1, 2, 3), SECOND: row})


def test_an_error_in_a_row_names_its_point() -> None:
    with pytest.raises(VectorError, match=r"vector v at post_block\.1: the row holds NaN"):
        vector(rows={FIRST: numbers(1), SECOND: numbers(np.nan)})


@pytest.mark.parametrize("rows", [{}, None, [numbers(1)], {"post_block.1": numbers(1)}])
def test_rows_without_points_are_refused(rows: object) -> None:
    with pytest.raises(VectorError, match=r"give a row for each Point|give 1 to 1024"):
        vector(rows=rows)


def test_more_points_or_numbers_than_the_bound_are_refused() -> None:
    points = [Point("post_block", layer) for layer in range(MAX_POINTS + 1)]
    with pytest.raises(VectorError, match="1025 points; give 1 to 1024"):
        vector(rows=dict.fromkeys(points, numbers(1)))
    assert len(vector(rows=dict.fromkeys(points[1:], numbers(1))).points) == MAX_POINTS
    wide = np.ones(MAX_WIDTH, np.float32)
    with pytest.raises(VectorError, match=f"at most {MAX_NUMBERS} numbers"):
        vector(rows=dict.fromkeys(points[: MAX_NUMBERS // MAX_WIDTH + 1], wide))


@pytest.mark.parametrize("field", ["model", "description", "method"])
@pytest.mark.parametrize("value", ["", "a\nb", "a\x1b[31m", "x" * 501, 1, b"a"], ids=quote)
def test_a_text_that_cannot_be_shown_is_refused(field: str, value: object) -> None:
    with pytest.raises(VectorError, match=field):
        vector(**{field: value})


@pytest.mark.parametrize(
    "value", [float("nan"), float("inf"), 1e39, 10**400, "1", True, None, [1]], ids=quote
)
def test_a_scale_that_is_no_finite_float32_is_refused(value: object) -> None:
    with pytest.raises(VectorError, match="scale"):
        vector(scale=value)


def test_rows_are_sorted_in_the_order_of_the_forward_pass() -> None:
    assert vector().points == (FIRST, SECOND)
    assert list(vector().rows) == [FIRST, SECOND]
    assert vector().width == 3


def test_rows_are_read_only_copies() -> None:
    given = {FIRST: numbers(1, 2)}
    made = vector(rows=given)
    given[FIRST][0] = 9
    given[SECOND] = numbers(1, 1)
    assert made.rows[FIRST].tolist() == [1, 2]
    assert made.points == (FIRST,)
    with pytest.raises(ValueError, match="read-only"):
        made.rows[FIRST][0] = 9
    with pytest.raises(TypeError, match="does not support item assignment"):
        made.rows[SECOND] = numbers(1, 1)  # type: ignore[index]
    with pytest.raises(FrozenInstanceError):
        made.scale = 2.0  # type: ignore[misc]


def test_a_strided_row_is_read_in_its_own_order() -> None:
    assert vector(rows={FIRST: numbers(1, 2, 3, 4)[::-2]}).rows[FIRST].tolist() == [4, 2]


ROWS: list[dict[Point, Any]] = [
    {FIRST: numbers(1, 2, 2)},
    {FIRST: numbers(3, -4, 0), SECOND: numbers(1, 2, 2)},
    {FIRST: numbers(1, 2, 2), SECOND: numbers(3, -4, 1e-9)},
    {FIRST: numbers(1, 2, 2), Point("post_block", 2): numbers(3, -4, 0)},
    {FIRST: numbers(1, 2, 2), Point("post_attn", 1): numbers(3, -4, 0)},
    {FIRST: numbers(1, 2, 2, 3, -4, 0)},
]


@pytest.mark.parametrize("rows", ROWS)
def test_the_digest_changes_with_points_and_numbers(rows: dict[Point, Any]) -> None:
    assert vector(rows=rows).digest != vector().digest
    assert vector(rows=rows) != vector()


TOLD: list[dict[str, Any]] = [
    {"name": "w"}, {"description": "Words."}, {"model": "m"}, {"method": "PCA"}, {"scale": 2.0},
]  # fmt: skip


@pytest.mark.parametrize("change", TOLD, ids=lambda change: next(iter(change)))
def test_metadata_makes_another_vector_of_the_same_digest(change: dict[str, Any]) -> None:
    assert replace(vector(), **change).digest == vector().digest
    assert replace(vector(), **change) != vector()


def test_the_digest_never_changes_between_versions() -> None:
    assert vector() == vector()
    assert len({vector(), vector()}) == 1
    assert vector() != "v"
    assert vector().digest == "0a442816844762c9594cffddc3d6f3996c04b80ba3ff141bebb6ad2616397911"


def test_rows_of_equal_numbers_share_a_digest_wherever_they_are() -> None:
    one = vector(rows={FIRST: numbers(1, 2), SECOND: numbers(1, 2)})
    assert one.row_digests[FIRST] == one.row_digests[SECOND] == digest_row(numbers(1, 2))
    assert one.row_digests[FIRST] != digest_row(numbers(2, 1))
    assert one.row_digests[FIRST] != digest_row(numbers(1, 2, 0))


def test_a_listed_vector_survives_the_wire() -> None:
    listed = vector(description="Words.", method="PCA", scale=4).listed()
    expected = ("v", ("pre_attn.1", "post_block.1"), 3, vector().digest, (3.0, 5.0))
    assert listed == steering_messages.ListedVector(*expected, "Words.", "PCA", 4.0)
    assert (
        msgspec.msgpack.decode(msgspec.msgpack.encode(listed), type=steering_messages.ListedVector)
        == listed
    )


@pytest.mark.parametrize("number", [1e-45, 1e-40, 4e-16, 6e14, 3e38])
def test_a_row_so_short_or_so_long_that_float32_overflows_is_refused(number: float) -> None:
    rows = {Point("pre_attn", 0): numbers(1, 0, 0, 0), FIRST: numbers(*[number] * 4)}
    with pytest.raises(VectorError, match=r"at .*the row has length .*; scale it to a length of"):
        vector(rows=rows)


@pytest.mark.parametrize("number", [6e-16, 1e-3, 4e14])
def test_a_row_within_the_bounds_has_a_norm(number: float) -> None:
    (norm,) = vector(rows={FIRST: numbers(*[number] * 4)}).listed().norms
    assert norm == pytest.approx(2 * number, rel=1e-6)


def test_the_block_of_a_vector_has_its_rows_wherever_they_came_from() -> None:
    """Rows that are views of the caller's own block, in another order, are not taken for it."""
    theirs_ND = np.arange(1, 9, dtype=np.float32).reshape(2, 4)
    points = [Point("post_block", layer) for layer in (3, 1)]
    made = Vector("v", dict(zip(points, theirs_ND, strict=True)))
    assert made.block_ND.tolist() == [[5, 6, 7, 8], [1, 2, 3, 4]]
    assert np.shares_memory(made.block_ND, made.rows[points[0]])


@pytest.mark.parametrize("is_read_only", [True, False])
def test_rows_that_can_still_be_written_are_copied(is_read_only: bool) -> None:
    theirs_ND = np.arange(1, 9, dtype=np.float32).reshape(2, 4).copy()
    points = [Point("post_block", layer) for layer in (1, 3)]
    theirs_ND.setflags(write=not is_read_only)
    made = Vector("v", dict(zip(points, theirs_ND, strict=True)))
    assert np.shares_memory(made.block_ND, theirs_ND) == is_read_only
    assert not made.block_ND.flags.writeable
    assert not made.rows[points[0]].flags.writeable
