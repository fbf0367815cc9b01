"""Encoders keep what they promise on rows of a real model, first tokens included."""

from __future__ import annotations

import numpy as np
import pytest
from numpy.typing import NDArray

from clairai.demo.model import smollm2
from clairai.store.codecs.fidelity import compare
from clairai.store.codecs.registry import named
from tests.fidelity.oracle import hidden_states

# Hugging Face and the model are loaded here, beside whatever else runs.
pytestmark = pytest.mark.timeout(900)
POINTS = [f"post_block.{layer}" for layer in (0, 1, 8, 15, 22, 28, 29)]

Rows = NDArray[np.float32]


@pytest.fixture(scope="module")
def rows() -> dict[str, Rows]:
    """128 tokens of no text: a stream that is rougher than one of words."""
    return hidden_states(str(smollm2()), [1, *range(1000, 26_400, 200)])


def test_full8_and_rp8_keep_their_promises_on_rows_of_a_real_model(
    rows: dict[str, Rows],
) -> None:
    full8, rp8 = named("full8"), named("rp8", {"k": 512})
    cosines, distortions = {}, {}
    for point in POINTS:
        rows_TD = rows[point]
        found = compare(full8, rows_TD, full8.encode(rows_TD))
        distances = compare(rp8, rows_TD, rp8.encode(rows_TD))
        assert found.num_rows == len(rows_TD) == 128
        cosines[point], distortions[point] = found.cosine_min, distances.distortion_p95
    assert {point: c for point, c in cosines.items() if c is None or c < 0.999} == {}
    assert {point: d for point, d in distortions.items() if d is None or d > 0.15} == {}


def test_a_few_places_of_real_rows_hold_most_of_them(rows: dict[str, Rows]) -> None:
    """So the promises above are kept where one scale for a whole row would be coarse."""
    row_D = np.abs(rows["post_block.15"][0])
    assert row_D.max() > 50 * np.median(row_D)
