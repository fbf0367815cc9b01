"""One number for each probe: of which tokens, and what counts if some have no score."""

from __future__ import annotations

import math

import numpy as np
import pytest
from numpy.typing import NDArray

from clairai.errors import ConfigError, ProbeError
from clairai.match.align import Scores
from clairai.match.reduce import Part, ReducedScores, Reduction, check_reduction, reduce_scores

NAN = math.nan
# Two tokens of the prompt, the second cached; five generated, of which the last is never scored.
TABLE: list[list[float]] = [[9, -9], [NAN, NAN], [1, 5], [4, 2], [-2, 7], [3, 3], [NAN, NAN]]


def scores(table: list[list[float]] = TABLE, num_prompt: int = 2) -> Scores:
    values_NP = np.array(table, np.float32).reshape(-1, 2)
    zeros: NDArray[np.uint8] = np.zeros(len(values_NP), np.uint8)
    return Scores(("a", "b"), zeros.astype(np.int32), values_NP, zeros, num_prompt, 0)


def reduced(how: Reduction, over: Part = "generated") -> tuple[list[float], list[int], int]:
    found = reduce_scores(scores(), how, over)
    return found.values_P.tolist(), found.tokens_P.tolist(), found.num_rows


def test_each_reduction_gives_its_value_and_the_token_that_has_it() -> None:
    assert reduced("max") == ([4, 7], [3, 4], 4)
    assert reduced("min") == ([-2, 2], [4, 3], 4)
    assert reduced("last") == ([3, 3], [5, 5], 4)
    assert reduced("sum") == ([6, 17], [-1, -1], 4)
    assert reduced("mean") == ([1.5, 4.25], [-1, -1], 4)


def test_the_prompt_and_the_whole_can_be_reduced_too() -> None:
    assert reduced("max", "prompt") == ([9, -9], [0, 0], 1)
    assert reduced("min", "all") == ([-2, -9], [4, 0], 5)
    assert reduced("mean", "all") == ([3, np.float32(1.6)], [-1, -1], 5)


def test_a_probe_that_came_late_is_reduced_over_its_own_tokens() -> None:
    late = scores([[1, NAN], [2, NAN], [8, 5], [4, 6], [NAN, NAN]], num_prompt=1)
    assert reduce_scores(late, "mean").values_P.tolist() == [np.float32(14 / 3), 5.5]
    assert reduce_scores(late, "sum").values_P.tolist() == [14, 11]
    assert reduce_scores(late, "min").tokens_P.tolist() == [1, 2]


def test_a_probe_that_was_removed_has_its_last_token() -> None:
    early = scores([[1, 2], [3, NAN], [NAN, NAN]], num_prompt=0)
    found = reduce_scores(early, "last")
    assert (found.values_P.tolist(), found.tokens_P.tolist()) == ([3, 2], [1, 0])


@pytest.mark.parametrize("how", ["max", "min", "mean", "sum", "last"])
def test_what_scored_nothing_is_nan(how: Reduction) -> None:
    for table in ([], [[NAN, NAN]], [[NAN, 1.0]]):
        found = reduce_scores(scores(table, num_prompt=0), how)
        assert math.isnan(found["a"])
        assert found.tokens_P[0] == -1


def test_many_tokens_are_added_without_losing_digits() -> None:
    table = [[0.1, 0.0]] * 100_000
    found = reduce_scores(scores(table, num_prompt=0), "sum")
    assert found["a"] == np.float32(np.float64(np.float32(0.1)) * 100_000)


def test_a_probe_that_is_not_there_is_named() -> None:
    found: ReducedScores = reduce_scores(scores(), "max")
    with pytest.raises(ProbeError, match="no scores of a probe named 'x'; there are 'a, b'"):
        found["x"]


@pytest.mark.parametrize(
    ("reduce", "over", "reason"),
    [
        ("most", "all", "reduce is 'most'; use one of max, min, mean, sum, last"),
        ("max", "answer", "over is 'answer'; use one of generated, prompt, all"),
        (None, "answer", "over is 'answer'"),
    ],
)
def test_an_unknown_reduction_is_refused(reduce: str | None, over: str, reason: str) -> None:
    check_reduction("max", "all")
    with pytest.raises(ConfigError, match=reason):
        check_reduction(reduce, over)
