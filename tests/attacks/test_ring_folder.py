"""Runtime folders that other users could reach into are refused."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from clairai.errors import RingError
from clairai.local.private_socket import engine_sockets, runtime_dir


def test_a_symlinked_runtime_folder_is_refused(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir(mode=0o700)
    (tmp_path / "link").symlink_to(tmp_path / "real")
    with pytest.raises(RingError, match="is a link"):
        runtime_dir(os.fspath(tmp_path / "link"))


def test_a_link_to_nowhere_is_refused_and_nothing_is_made_behind_it(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(tmp_path / "planted")
    with pytest.raises(RingError):
        runtime_dir(os.fspath(tmp_path / "link"))
    assert not (tmp_path / "planted").exists()


@pytest.mark.parametrize("mode", [0o770, 0o701, 0o755, 0o1777])
def test_a_runtime_folder_that_lets_others_in_is_refused(tmp_path: Path, mode: int) -> None:
    folder = tmp_path / "run"
    folder.mkdir()
    folder.chmod(mode)
    with pytest.raises(RingError, match="chmod 700"):
        runtime_dir(os.fspath(folder))


def test_a_runtime_folder_of_another_user_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "run"
    folder.mkdir(mode=0o700)
    owner = os.geteuid()
    monkeypatch.setattr("os.geteuid", lambda: owner + 1)
    with pytest.raises(RingError, match="belongs to user"):
        runtime_dir(os.fspath(folder))


def test_a_file_in_place_of_the_runtime_folder_is_refused(tmp_path: Path) -> None:
    (tmp_path / "run").write_text("")
    with pytest.raises(RingError):
        runtime_dir(os.fspath(tmp_path / "run"))


def test_a_link_named_like_a_socket_is_never_followed(tmp_path: Path) -> None:
    (tmp_path / "engine-0000000000000001.sock").symlink_to("/run/elsewhere.sock")
    assert engine_sockets(tmp_path) == []
