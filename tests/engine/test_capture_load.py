"""No stored row belongs to another request, whatever the scheduler does, and none is missing."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from tests.engine import capture_load
from tests.engine.capture_load import Plan
from tests.engine.process import EngineProcess

pytestmark = [pytest.mark.engine, pytest.mark.timeout(900)]


@pytest.mark.matrix
def test_no_row_is_stored_under_another_request(
    engine: EngineProcess, report: Callable[..., None]
) -> None:
    verdict = engine.call(capture_load.run, Plan(num_requests=300, num_at_once=32, seed=1))
    report(test="capture attribution", rows=verdict.rows, wrong=len(verdict.wrong))
    assert verdict.wrong == []
    assert verdict.missing == 0
    assert verdict.unmeasured == 0
    # The load had everything it is meant to have.
    assert verdict.rows > 5_000
    assert verdict.cached > 0
    assert verdict.preempted > 0
    assert verdict.aborted > 0
    assert verdict.told >= 3 * verdict.rows  # at three points; some were computed twice


@pytest.mark.parametrize("mutant", capture_load.MUTANTS, ids=lambda mutant: mutant.__name__)
def test_the_check_catches_a_planted_bug(
    engine: EngineProcess, mutant: Callable[[], Any], request: pytest.FixtureRequest
) -> None:
    seed = 2 + [one.__name__ for one in capture_load.MUTANTS].index(mutant.__name__)
    plan = Plan(num_requests=40, num_at_once=12, seed=seed, max_new=8)
    verdict = engine.call(capture_load.run, plan, mutant)
    assert verdict.wrong or verdict.missing, request.node.name
