"""Names of tap points: one spelling each, in path order, and errors that say the bound."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import FrozenInstanceError
from typing import cast

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from clairai.errors import PointError, quote
from clairai.points import MAX_LAYER, POINT_KINDS, Point, PointKind, expand

points = st.builds(Point, st.sampled_from(POINT_KINDS), st.integers(0, MAX_LAYER))


@settings(deadline=None)
@given(points)
def test_every_point_is_what_its_own_name_parses_to(point: Point) -> None:
    assert Point.parse(str(point)) == point


@pytest.mark.parametrize(
    ("alias", "name"),
    [
        ("resid_pre.3", "pre_attn.3"),
        ("resid_mid.0", "post_attn.0"),
        ("resid_post.9", "post_block.9"),
    ],
)
def test_an_alias_is_the_point_it_stands_for(alias: str, name: str) -> None:
    assert str(Point.parse(alias)) == name


@pytest.mark.parametrize(
    "text",
    [
        "", ".", "post_block", "post_block.", "post_block.-1", "post_block.+1", "post_block.01",
        "post_block.1 ", "post_block.1\n", "post_block.1.2", "POST_BLOCK.1", "mlp.1",
        "post_block.x", "post_block.\u0661", "post_block.100000", "post_block." + "9" * 5000,
        "post_block.*", "all",
    ],
    ids=quote,
)  # fmt: skip
def test_anything_but_a_point_is_refused_with_the_syntax(text: str) -> None:
    with pytest.raises(PointError, match=r"post_block\.15") as caught:
        Point.parse(text)
    assert len(str(caught.value)) < 400


@settings(deadline=None)
@given(st.text())
def test_any_text_is_a_point_or_a_point_error(text: str) -> None:
    with suppress(PointError):
        assert Point.parse(text).layer >= 0


@pytest.mark.parametrize("layer", [-1, MAX_LAYER + 1, True, 1.0, "1", 10**5000], ids=quote)
def test_a_layer_that_is_no_layer_is_refused(layer: object) -> None:
    with pytest.raises(PointError, match=r"0\.\.99999"):
        Point("post_block", cast(int, layer))


def test_a_kind_that_does_not_exist_is_refused() -> None:
    with pytest.raises(PointError, match="pre_attn, post_attn, post_block"):
        Point(cast(PointKind, "mlp"), 0)


def test_a_point_cannot_be_changed() -> None:
    with pytest.raises(FrozenInstanceError):
        Point("post_block", 0).layer = 1  # type: ignore[misc]


def test_points_sort_in_the_order_the_residual_meets_them() -> None:
    names = ["pre_attn.0", "post_attn.0", "post_block.0", "pre_attn.1", "post_block.10"]
    assert [str(point) for point in sorted(map(Point.parse, reversed(names)))] == names
    assert Point("post_block", 0) < Point("pre_attn", 1) <= Point("pre_attn", 1)


@pytest.mark.parametrize(
    ("patterns", "expected"),
    [
        (["post_block.2"], "post_block.2"),
        (["post_block.*"], "post_block.0 post_block.1 post_block.2"),
        (["pre_attn.0-1"], "pre_attn.0 pre_attn.1"),
        (["post_block.0,2"], "post_block.0 post_block.2"),
        (["post_block.2,0-1"], "post_block.0 post_block.1 post_block.2"),
        (["resid_post.1", "post_block.1", "pre_attn.1"], "pre_attn.1 post_block.1"),
        ("post_block.1", "post_block.1"),
    ],
)
def test_patterns_expand_sorted_and_without_duplicates(patterns: list[str], expected: str) -> None:
    assert " ".join(map(str, expand(patterns, 3))) == expected


@settings(deadline=None)
@given(st.integers(1, 40))
def test_all_is_every_point_of_every_layer(num_layers: int) -> None:
    expanded = expand(["all"], num_layers)
    assert len(expanded) == len(POINT_KINDS) * num_layers
    assert list(expanded) == sorted(set(expanded))


@settings(deadline=None)
@given(st.lists(st.builds(Point, st.sampled_from(POINT_KINDS), st.integers(0, 29)), min_size=1))
def test_expanding_plain_names_gives_exactly_those_points(listed: list[Point]) -> None:
    assert set(expand([str(point) for point in listed], 30)) == set(listed)


def test_a_layer_the_model_does_not_have_is_refused_with_those_it_has() -> None:
    for pattern in ("post_block.30", "post_block.0-30", "post_block.0,99999"):
        with pytest.raises(PointError, match=r"this model has 30 layers: 0\.\.29"):
            expand([pattern], 30)


def test_an_empty_list_is_refused() -> None:
    with pytest.raises(PointError, match="at least one"):
        expand([], 30)


@pytest.mark.parametrize(
    "pattern",
    ["", "*", "*.1", "post_block", "post_block.", "post_block.1,", "post_block.-1",
     "post_block.3-1", "post_block.1-", "post_block.**", "post_block.1-2-3", "mlp.*", "All",
     "post_block.1 ,2"],
)  # fmt: skip
def test_a_pattern_that_cannot_be_read_is_refused(pattern: str) -> None:
    with pytest.raises(PointError):
        expand([pattern], 30)


def test_a_pattern_that_is_no_text_is_refused() -> None:
    with pytest.raises(PointError, match="15"):
        expand(cast(list[str], [15]), 30)


def test_a_model_without_layers_is_refused() -> None:
    with pytest.raises(PointError, match="at least 1"):
        expand(["all"], 0)
