"""Where a spool's files go, and what happens if none can be made there."""

from __future__ import annotations

from pathlib import Path

import pytest

from clairai.errors import ConfigError
from clairai.spool.launch import find_folder


def test_the_folder_that_was_chosen_is_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TMPDIR", "/nowhere")
    assert find_folder(str(tmp_path)) == tmp_path
    assert list(tmp_path.iterdir()) == []


def test_else_that_of_temporary_files_is_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    assert find_folder(None) == tmp_path


def test_a_folder_that_cannot_hold_files_is_refused_at_the_start(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"no files for scores can be made in .*missing"):
        find_folder(str(tmp_path / "missing"))
