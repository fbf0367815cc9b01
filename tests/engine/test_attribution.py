"""Rows belong to the request, position and token they name: under everything the scheduler does."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.engine import attribution, mutants
from tests.engine.process import EngineProcess

pytestmark = [pytest.mark.engine, pytest.mark.timeout(900)]

FULL = attribution.Plan(num_requests=300, num_at_once=32, max_prompt=100, max_new=24, seed=1)
SHORT = attribution.Plan(num_requests=24, num_at_once=12, max_prompt=60, max_new=8, seed=2)


@pytest.mark.matrix
def test_pitfall_01_no_row_lands_on_another_request(
    engine: EngineProcess, report: Callable[..., None]
) -> None:
    verdict = engine.call(attribution.run, FULL)
    report(test="attribution", rows=verdict.rows, wrong=len(verdict.wrong))
    assert verdict.wrong == []
    assert verdict.unaccounted == 0
    assert verdict.lost == 0
    # The load really was what it claims to be.
    assert verdict.rows > 10_000
    assert verdict.decode_rows > 1_000
    assert verdict.cached_tokens > 0, "no prefix-cache hit"
    assert verdict.recomputed_rows > 0, "nothing was preempted"
    assert verdict.aborted > 0


@pytest.mark.parametrize("mutant", mutants.MUTANTS, ids=lambda mutant: mutant.__name__)
def test_the_attribution_check_catches_a_planted_bug(
    engine: EngineProcess, mutant: Callable[[], object]
) -> None:
    verdict = engine.call(mutants.run, mutant, SHORT)
    assert verdict.wrong or verdict.unaccounted
