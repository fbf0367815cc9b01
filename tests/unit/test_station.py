"""What the worker's side of clairai does between the steps of an engine."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.unit.toy_station import running_station


def test_a_forward_of_nobodys_rows_waits_until_the_last_steps_are_read(
    runtime: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It writes where they lie; on a GPU they may still be on their way out."""
    waited = []
    with running_station(runtime) as station:
        monkeypatch.setattr(station._outlet, "begin", lambda: waited.append(1))
        station.blank()
        assert waited == [1]
        station._is_serving = False  # start-up: nothing has been read, and graphs are captured
        station.blank()
    assert waited == [1]
