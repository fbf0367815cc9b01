"""A probe is checked when it is made, cannot be changed after, and scores exactly."""

from __future__ import annotations

from dataclasses import FrozenInstanceError, replace
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from clairai.errors import ProbeError, quote
from clairai.points import Point
from clairai.probe.model import MAX_BINS, MAX_COUNT, MAX_DESCRIPTION, MAX_NAME, MAX_WIDTH
from clairai.wire import control_messages, ring_messages
from tests.support.probes import numbers, probe


@pytest.mark.parametrize("name", ["a", "A.b_c:d/e@f+g-h", "x" * MAX_NAME, "a.", "-", "0"])
def test_names_within_the_rule_are_accepted(name: str) -> None:
    assert probe(name=name).name == name


@pytest.mark.parametrize(
    "name",
    ["", ".", ".a", "a..b", "../x", "/etc/x", "a b", "a\n", "\u00e9", "x" * (MAX_NAME + 1), "a\0",
     1, None, "x" * 10**6],
    ids=quote,
)  # fmt: skip
def test_names_outside_the_rule_are_refused_in_a_short_sentence(name: object) -> None:
    with pytest.raises(ProbeError, match="1 to 128") as caught:
        probe(name=name)
    assert len(str(caught.value)) < 300


@pytest.mark.parametrize(
    ("direction", "bound"),
    [
        ([1.0, 2.0], "float32 array"),
        (np.ones(3), "float32 array"),
        (np.ones((3, 1), np.float32), "one dimension"),
        (np.float32(1), "one dimension"),
        (np.ones(3, ">f4"), "float32 array"),
        (numbers(), "1 to 1000000"),
        (np.ones(MAX_WIDTH + 1, np.float32), "1 to 1000000"),
        (numbers(1, np.nan), "NaN or infinity"),
        (numbers(1, -np.inf), "NaN or infinity"),
        (numbers(0, -0.0), "all zeros"),
    ],
)
def test_a_direction_that_cannot_score_is_refused(direction: object, bound: str) -> None:
    with pytest.raises(ProbeError, match=bound):
        probe(direction_D=direction)


def test_the_widest_and_the_narrowest_direction_are_accepted() -> None:
    assert probe(direction_D=np.ones(MAX_WIDTH, np.float32)).width == MAX_WIDTH
    assert probe(direction_D=numbers(1)).width == 1


NOT_FINITE = [float("nan"), float("inf"), -float("inf"), 1e39, 10**400, "1", True, [1], Path()]


@pytest.mark.parametrize("value", [*NOT_FINITE, None], ids=quote)
def test_a_bias_that_is_no_finite_float32_is_refused(value: object) -> None:
    with pytest.raises(ProbeError, match="bias"):
        probe(bias=value)


@pytest.mark.parametrize("value", NOT_FINITE, ids=quote)
def test_a_threshold_that_is_no_finite_float32_is_refused(value: object) -> None:
    with pytest.raises(ProbeError, match="threshold"):
        probe(threshold=value)


@pytest.mark.parametrize(
    "value", [(1.0, 1.0), (2.0, 1.0), (0.0, float("inf")), (float("nan"), 1.0), (1.0,), "01", 3, ()]
)
def test_a_calibration_that_is_no_range_is_refused(value: object) -> None:
    with pytest.raises(ProbeError, match="calibration"):
        probe(calibration=value)


@pytest.mark.parametrize("value", ["tanh", "", None, "ReLU", ["relu"]])
def test_an_unknown_activation_is_refused_with_the_known_ones(value: object) -> None:
    with pytest.raises(ProbeError, match="none, relu, sigmoid"):
        probe(activation=value)


@pytest.mark.parametrize("field", ["model", "description"])
@pytest.mark.parametrize(
    "value", ["", "a\nb", "a\x1b[31m", "a\u202eb", "x" * 501, 1, b"a"], ids=quote
)
def test_a_text_that_cannot_be_shown_is_refused(field: str, value: object) -> None:
    with pytest.raises(ProbeError, match=field):
        probe(**{field: value})


def test_a_description_has_room_for_a_sentence_in_any_script() -> None:
    assert probe(description="é" * MAX_DESCRIPTION).description == "é" * MAX_DESCRIPTION
    with pytest.raises(ProbeError, match=f"1 to {MAX_DESCRIPTION} printable"):
        probe(description="é" * (MAX_DESCRIPTION + 1))


@pytest.mark.parametrize("value", [-1e-9, 1.0000001, *NOT_FINITE], ids=quote)
def test_an_auroc_that_is_no_share_is_refused(value: object) -> None:
    with pytest.raises(ProbeError, match="auroc"):
        probe(auroc=value)


@pytest.mark.parametrize("value", [0, 0.5, 1, np.float32(0.75)])
def test_an_auroc_from_0_to_1_is_accepted(value: float) -> None:
    assert probe(auroc=value).auroc == value


COUNTS = (0, 1, 2, 3, 4, 5, 6, 7)


@pytest.mark.parametrize(
    "value",
    [
        (0.0, 1.0, COUNTS),
        control_messages.Histogram(1.0, 1.0, COUNTS),
        control_messages.Histogram(0.0, float("inf"), COUNTS),
        control_messages.Histogram(float("nan"), 1.0, COUNTS),
        control_messages.Histogram("0", 1.0, COUNTS),  # type: ignore[arg-type]
        control_messages.Histogram(0.0, 1.0, COUNTS[1:]),
        control_messages.Histogram(0.0, 1.0, COUNTS * 9),
        control_messages.Histogram(0.0, 1.0, 8),  # type: ignore[arg-type]
        control_messages.Histogram(0.0, 1.0, (0,) * 8),
        control_messages.Histogram(0.0, 1.0, (-1, *COUNTS)),
        control_messages.Histogram(0.0, 1.0, (True, *COUNTS)),
        control_messages.Histogram(0.0, 1.0, (1.5, *COUNTS)),  # type: ignore[arg-type]
        control_messages.Histogram(0.0, 1.0, (MAX_COUNT + 1, *COUNTS)),
    ],
    ids=str,
)
def test_a_wrong_histogram_is_refused(value: object) -> None:
    with pytest.raises(ProbeError, match="histogram"):
        probe(histogram=value)


@pytest.mark.parametrize("counts", [COUNTS, (MAX_COUNT,) * MAX_BINS])
def test_the_smallest_and_the_largest_histogram_are_accepted(counts: tuple[int, ...]) -> None:
    assert probe(
        histogram=control_messages.Histogram(-1, 1, counts)
    ).histogram == control_messages.Histogram(-1, 1, counts)


def test_a_point_must_be_a_point() -> None:
    with pytest.raises(ProbeError, match="Point"):
        probe(point="post_block.1")


def test_the_direction_is_a_read_only_copy() -> None:
    given_D = numbers(1, 2)
    made = probe(direction_D=given_D)
    given_D[0] = 9
    assert made.direction_D[0] == 1
    with pytest.raises(ValueError, match="read-only"):
        made.direction_D[0] = 9
    with pytest.raises(FrozenInstanceError):
        made.bias = 1.0  # type: ignore[misc]


def test_a_strided_direction_is_read_in_its_own_order() -> None:
    assert probe(direction_D=numbers(1, 2, 3, 4)[::-2]).direction_D.tolist() == [4, 2]


CHANGES: list[dict[str, Any]] = [
    {"name": "q"}, {"point": Point("pre_attn", 1)}, {"direction_D": numbers(1, -2, 4)},
    {"bias": 1e-9}, {"activation": "relu"}, {"threshold": 0.0}, {"calibration": (0.0, 1.0)},
    {"model": "m"},
]  # fmt: skip


@pytest.mark.parametrize("change", CHANGES, ids=lambda change: next(iter(change)))
def test_the_digest_changes_with_every_part(change: dict[str, Any]) -> None:
    assert replace(probe(), **change).digest != probe().digest
    assert replace(probe(), **change) != probe()


TOLD: list[dict[str, Any]] = [
    {"description": "Words."},
    {"auroc": 0.9},
    {"histogram": control_messages.Histogram(0, 1, COUNTS)},
]


@pytest.mark.parametrize("change", TOLD, ids=lambda change: next(iter(change)))
def test_fields_for_people_change_the_probe_and_not_its_digest(change: dict[str, Any]) -> None:
    assert replace(probe(), **change).digest == probe().digest
    assert replace(probe(), **change) != probe()


def test_a_digest_is_what_it_was_before_probes_had_descriptions() -> None:
    made = probe(bias=0.5, threshold=1.0, calibration=(0.0, 2.0), model="m")
    assert made.digest == "b3b661c62cfb946a8fe2ad7db457c88c"


def test_equal_content_has_an_equal_digest_of_128_bits() -> None:
    assert probe().digest == probe(direction_D=numbers(1, -2, 3), bias=0).digest
    assert len(bytes.fromhex(probe().digest)) == 16
    assert probe() == probe()
    assert len({probe(), probe()}) == 1
    assert probe() != "p"


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_scores_are_as_wide_as_the_rows(dtype: type[np.floating]) -> None:
    hidden_TD = np.array([[1, 1, 1], [2, 0, -1]], dtype)
    scores_T = probe(bias=0.5).apply(hidden_TD)
    assert scores_T.tolist() == [2.5, -0.5]
    assert scores_T.dtype == dtype


def test_each_activation_is_applied_after_the_bias() -> None:
    hidden_TD = np.array([[1, 0, 0], [-2, 0, 0]], np.float64)
    assert probe(bias=1.0, activation="relu").apply(hidden_TD).tolist() == [2, 0]
    sigmoid = probe(bias=1.0, activation="sigmoid").apply(hidden_TD)
    np.testing.assert_allclose(sigmoid, 1 / (1 + np.exp([-2.0, 1.0])), rtol=1e-15)


@settings(deadline=None)
@given(st.lists(st.floats(width=32), min_size=3, max_size=3), st.sampled_from(["none", "sigmoid"]))
def test_no_row_of_any_bits_makes_scoring_warn(row: list[float], activation: str) -> None:
    scores_T = probe(activation=activation).apply(np.array([row], np.float32))
    assert scores_T.shape == (1,)


@pytest.mark.parametrize("shape", [(3,), (2, 4), (2, 3, 1), (2, 0)])
def test_rows_of_another_width_are_refused(shape: tuple[int, ...]) -> None:
    with pytest.raises(ProbeError, match="width 3"):
        probe().apply(np.ones(shape, np.float32))


def test_the_message_form_survives_encoding() -> None:
    info = probe(threshold=1, calibration=[0, 2], activation="relu").info()
    assert info == ring_messages.ProbeInfo(
        "p", "post_block.1", "relu", 1.0, (0.0, 2.0), info.digest
    )
    assert (
        msgspec.msgpack.decode(msgspec.msgpack.encode(info), type=ring_messages.ProbeInfo) == info
    )


def test_fields_for_people_go_through_control_and_not_through_the_ring() -> None:
    made = probe(
        description="Words.", auroc=0.9, histogram=control_messages.Histogram(0, 1, COUNTS)
    )
    assert made.info() == probe().info()
    listed = made.listed()
    assert (listed.description, listed.auroc) == ("Words.", 0.9)
    assert listed.histogram == control_messages.Histogram(0, 1, COUNTS)
    state = control_messages.BankState(1, 16, (listed,))
    raw = msgspec.msgpack.encode(state)
    assert msgspec.msgpack.decode(raw, type=control_messages.ControlReply) == state
