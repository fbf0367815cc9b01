"""What the step publisher does between the steps of an engine."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.toy_publisher import running_publisher


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
