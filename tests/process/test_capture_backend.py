"""The process in which consumers run, and errors about it."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from clairai.capture.backend import open_backend
from clairai.capture.capture_settings import CaptureSettings
from clairai.capture.in_process import InProcessBackend
from clairai.errors import ConfigError, StoreBusyError
from tests.support.capture_parts import capture_plan
from tests.support.capture_rig import ABOUT, remote_rig


def test_an_error_of_a_remote_consumer_is_raised_when_the_engine_starts(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"unknown option .shards"):
        open_backend(
            CaptureSettings.parse({"consumers": {"fs": {"folder": "x", "shards": 1}}}), ABOUT
        )
    with pytest.raises(ConfigError, match="must be what JSON has"):
        open_backend(CaptureSettings.parse({"consumers": {"fs": {"folder": tmp_path}}}), ABOUT)
    setting = {"folder": str(tmp_path / "s")}
    with remote_rig(setting), pytest.raises(StoreBusyError), remote_rig(setting):
        pass


def test_a_writer_that_cannot_be_started_is_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "executable", str(tmp_path / "no-python"))
    with pytest.raises(ConfigError, match='"process": "engine"'):
        open_backend(CaptureSettings.parse({"folder": str(tmp_path / "s")}), ABOUT)


HEARD: list[Any] = []


def test_a_users_function_is_called_in_the_engines_process(tmp_path: Path) -> None:
    consumers = {
        "fs": {"folder": str(tmp_path / "s")},
        "mine": {"kind": "callback", "call": f"{__name__}:hear"},
    }
    with pytest.raises(ConfigError, match="consumer callback runs in the engine's own process"):
        open_backend(CaptureSettings.parse({"consumers": consumers, "process": "own"}), ABOUT)
    with remote_rig({"consumers": consumers}) as made:
        assert isinstance(made.backend, InProcessBackend)
        made.enter("a", 1, capture_plan(to=("fs", "mine")))
        made.step(("a", 0, 3))
        assert made.ended("api-a", "kept").rows == 3
    assert [one.rows["position"].tolist() for one in HEARD] == [[0, 1, 2]]


def hear(delivery: Any) -> None:
    HEARD.append(replace(delivery))


def test_rows_reach_a_process_of_their_own_on_arm(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("platform.machine", lambda: "aarch64")
    consumers = {"fs": {"folder": str(tmp_path / "s")}}
    with remote_rig({"consumers": consumers, "process": "own"}) as made:
        assert made.backend.is_remote
        made.enter("a", 1, capture_plan(to=("fs",)))
        made.step(("a", 0, 3))
        assert made.ended("api-a", "kept").rows == 3
