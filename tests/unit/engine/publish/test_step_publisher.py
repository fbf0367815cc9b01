"""What the step publisher does between the steps of an engine."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.toy_publisher import running_publisher


def test_a_ring_that_cannot_hold_one_step_is_told_of(runtime: Path) -> None:
    with running_publisher(runtime) as step_publisher:
        assert step_publisher.find_ring_problem() is None
        step_publisher.tables.max_tokens = 1 << 18
        problem = step_publisher.find_ring_problem()
    assert problem is not None
    assert "a step of 262144 tokens and a full bank has 10 MiB of scores" in problem
    assert "the ring has 1 MiB" in problem
    assert "raise ring_mib to 30" in problem


def test_a_dummy_run_waits_until_the_rows_of_the_last_step_are_read(
    runtime: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It overwrites them; on a GPU they may not be published yet."""
    waited = []
    with running_publisher(runtime) as step_publisher:
        monkeypatch.setattr(step_publisher._publisher, "begin_step", lambda: waited.append(1))
        step_publisher.before_dummy_run()
        assert waited == [1]
        step_publisher._is_serving = (
            False  # start-up: nothing has been read, and graphs are captured
        )
        step_publisher.before_dummy_run()
    assert waited == [1]
