"""A folder is trusted if nobody else can change what lies in it, or exchange it."""

from __future__ import annotations

import os
import pwd
from pathlib import Path

import pytest

from clairai.local.trusted_folder import (
    UntrustedFolderError,
    cache_home,
    is_trusted_file,
    make_private_folder,
    why_untrusted,
)
from tests.support.other_user import give_away


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "a" / "b").mkdir(parents=True)
    return tmp_path / "a" / "b"


def test_a_folder_below_a_sticky_one_is_trusted(folder: Path) -> None:
    assert why_untrusted(folder) is None
    folder.parent.chmod(0o1777)
    assert why_untrusted(folder) is None


@pytest.mark.parametrize("mode", [0o777, 0o1777, 0o707, 0o702])
def test_a_folder_that_others_can_write_is_not_trusted(folder: Path, mode: int) -> None:
    folder.chmod(mode)
    reason = why_untrusted(folder)
    assert reason is not None
    assert f"mode {mode:04o}" in reason


def test_a_folder_in_one_that_others_can_write_is_not_trusted(folder: Path) -> None:
    folder.parent.chmod(0o757)
    reason = why_untrusted(folder)
    assert reason is not None
    assert str(folder.parent) in reason


def test_a_group_of_many_is_not_trusted_and_a_group_of_one_is(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder.chmod(0o770)
    user = pwd.getpwuid(os.geteuid())
    monkeypatch.setattr("grp.getgrgid", lambda _: type("G", (), {"gr_mem": [user.pw_name]}))
    monkeypatch.setattr("pwd.getpwall", lambda: [user])
    os.chown(folder, -1, user.pw_gid)
    assert why_untrusted(folder) is None
    monkeypatch.setattr("grp.getgrgid", lambda _: type("G", (), {"gr_mem": ["mallory"]}))
    assert why_untrusted(folder) is not None


def test_a_link_on_the_way_must_not_be_anothers(
    tmp_path: Path, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "link").symlink_to(folder)
    assert why_untrusted(tmp_path / "link") is None
    give_away(tmp_path / "link", monkeypatch=monkeypatch)
    assert "belongs to user" in (why_untrusted(tmp_path / "link") or "")


def test_a_folder_is_made_with_all_that_leads_to_it_for_this_user_alone(tmp_path: Path) -> None:
    umask = os.umask(0)
    try:
        made = make_private_folder(tmp_path / "x" / "y")
    finally:
        os.umask(umask)
    assert made == tmp_path / "x" / "y"
    assert [path.stat().st_mode & 0o777 for path in (made, made.parent)] == [0o700] * 2


def test_a_folder_of_this_user_is_closed_to_others(folder: Path) -> None:
    folder.chmod(0o777)
    assert make_private_folder(folder) == folder
    assert folder.stat().st_mode & 0o777 == 0o700


def test_a_file_in_place_of_a_folder_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    for path in (tmp_path / "file", tmp_path / "file" / "x"):
        with pytest.raises(NotADirectoryError):
            make_private_folder(path)


def test_only_a_plain_file_with_one_name_is_trusted(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_text("")
    assert is_trusted_file(file.stat())
    file.chmod(0o666)
    assert not is_trusted_file(file.stat())
    file.chmod(0o600)
    os.link(file, tmp_path / "twin")
    assert not is_trusted_file(file.stat())
    assert not is_trusted_file(tmp_path.stat())


def test_a_user_without_a_home_has_no_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setenv("HOME", "/home/someone")
    assert cache_home() == Path("/home/someone/.cache")

    def fail() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setattr(Path, "home", fail)
    assert cache_home() is None


def test_anothers_folder_is_refused_before_it_is_changed(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder.chmod(0o777)
    give_away(folder, monkeypatch=monkeypatch)
    with pytest.raises(UntrustedFolderError, match="belongs to user"):
        make_private_folder(folder)
    assert folder.stat().st_mode & 0o777 == 0o777
