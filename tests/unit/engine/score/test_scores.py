"""Taps score rows of the residual stream as each probe itself would.

T = tokens in this step, P = probes, K = capacity of a site.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from clairai.engine.score.score_tables import ScoreTables
from clairai.points import Point
from clairai.probe.bank import EngineBank
from clairai.probe.model import ACTIVATIONS, Probe
from clairai.probe.numeric_bounds import MAX_NUMBER

HERE = Point("post_block", 0)
LARGEST = float(np.finfo(np.float32).max)


def bank(*kinds: str, biases: tuple[float, ...] = ()) -> EngineBank:
    """One probe of width 1 for each kind: its product is the row's one number."""
    one_D = np.ones(1, np.float32)
    probes = [
        Probe(f"p{index}", HERE, one_D, bias=bias, activation=kind)  # type: ignore[arg-type]
        for index, (kind, bias) in enumerate(zip(kinds, biases or (0.0,) * len(kinds), strict=True))
    ]
    empty = EngineBank.empty((HERE,), max(1, len(kinds)), 1, "toy")
    return empty.add(probes) if probes else empty


def oracle(columns: EngineBank, raw_T: NDArray[np.float32]) -> NDArray[np.floating[Any]]:
    return np.stack([probe.apply(raw_T[:, None]) for probe in columns.probes], axis=1)


def loaded(columns: EngineBank, max_tokens: int) -> ScoreTables:
    tables = ScoreTables(
        [str(HERE)], width=1, capacity=columns.capacity, max_tokens=max_tokens, device="cpu"
    )
    tables.load(columns)
    return tables


def scored(tables: ScoreTables, raw_T: NDArray[np.float32]) -> NDArray[np.float32]:
    tables.site(str(HERE)).read(torch.from_numpy(raw_T[:, None]))
    scores_TP: NDArray[np.float32] = tables.gather(len(raw_T)).numpy()
    return scores_TP


mixes = st.lists(
    st.tuples(st.sampled_from(ACTIVATIONS), st.floats(-100, 100, width=32)), min_size=1, max_size=6
)
raws = st.lists(st.floats(-1000, 1000, width=32), min_size=1, max_size=8)


@settings(derandomize=True, deadline=None)
@given(mixes, raws)
def test_any_mix_of_activations_scores_as_each_probe_alone_does(
    mix: list[tuple[str, float]], raw: list[float]
) -> None:
    columns = bank(*(kind for kind, _ in mix), biases=tuple(bias for _, bias in mix))
    raw_T = np.array(raw, np.float32)
    scores_TP = scored(loaded(columns, len(raw)), raw_T)
    assert scores_TP.dtype == np.float32
    np.testing.assert_allclose(scores_TP, oracle(columns, raw_T), rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("bias", [0.0, 1.0, MAX_NUMBER, -MAX_NUMBER])
def test_extreme_scores_neither_overflow_nor_warn(bias: float) -> None:
    """Warnings are errors here, so this also shows that there was none."""
    columns = bank(*ACTIVATIONS, biases=(bias,) * len(ACTIVATIONS))
    tiny = float(np.finfo(np.float32).tiny)
    extremes = [0.0, -0.0, 88.8, -88.8, -104.0, 1e4, -1e4, LARGEST, -LARGEST, np.inf, -np.inf]
    raw_T = np.array([*extremes, np.nan, tiny], np.float32)
    scores_TP = scored(loaded(columns, len(raw_T)), raw_T)
    np.testing.assert_allclose(scores_TP, oracle(columns, raw_T), rtol=1e-5, atol=1e-37)
    sigmoid_T = scores_TP[:-2, ACTIVATIONS.index("sigmoid")]
    assert ((sigmoid_T >= 0) & (sigmoid_T <= 1)).all()


def test_a_tap_leaves_the_rows_as_they_were() -> None:
    raw_T = np.array([-1.0, 2.0, 3.0, -4.0], np.float32)
    before = raw_T.copy()
    scored(loaded(bank("relu", "sigmoid", biases=(1.0, 2.0)), 4), raw_T)
    assert np.array_equal(raw_T, before)


def test_an_empty_bank_gives_rows_without_columns() -> None:
    assert scored(loaded(bank(), 3), np.zeros(3, np.float32)).shape == (3, 0)


def test_an_activation_given_to_the_wrong_column_would_be_noticed() -> None:
    columns = bank("relu", "none", "sigmoid")
    raw_T = np.array([-2.0, 2.0], np.float32)
    tables = loaded(columns, 2)
    np.testing.assert_allclose(scored(tables, raw_T), oracle(columns, raw_T), rtol=1e-6)
    tables.activation_SK.copy_(tables.activation_SK.roll(1))
    assert not np.allclose(scored(tables, raw_T), oracle(columns, raw_T))


def test_a_bias_given_to_the_wrong_column_would_be_noticed() -> None:
    columns = bank("none", "none", biases=(1.0, 2.0))
    raw_T = np.array([-2.0, 2.0], np.float32)
    tables = loaded(columns, 2)
    tables.bias_SK.copy_(tables.bias_SK.roll(1))
    assert not np.allclose(scored(tables, raw_T), oracle(columns, raw_T))
