"""Hostile key files: pipes, files that others can read or replace, nonsense, and doubles."""

from __future__ import annotations

import json
import os
import stat
from pathlib import Path
from typing import Any

import pytest

from clairai.errors import ConfigError
from clairai.launch.api_key import MAX_FILE_BYTES, UPSTREAM, access_keys, api_key

SECRET = "a-secret-0123456789"  # noqa: S105


def _write(file: Path, data: bytes = SECRET.encode(), mode: int = 0o600) -> Path:
    file.write_bytes(data)
    file.chmod(mode)
    return file


def _refusal(file: Path) -> str:
    """What both readers of key files say; neither repeats what is in the file."""
    said = []
    for read in (access_keys, lambda path: api_key(path, UPSTREAM)):
        with pytest.raises(ConfigError) as caught:
            read(file)
        said.append(str(caught.value))
    assert SECRET not in " ".join(said)
    return said[0]


@pytest.mark.attack(300)
@pytest.mark.timeout(60)
def test_a_pipe_as_key_file_is_refused_and_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe", 0o600)
    assert "not a regular file" in _refusal(tmp_path / "pipe")


@pytest.mark.attack(301)
@pytest.mark.parametrize("mode", [0o644, 0o604, 0o602, 0o601, 0o640, 0o620, 0o660, 0o444, 0o666])
def test_a_key_file_that_others_can_read_or_change_is_refused(tmp_path: Path, mode: int) -> None:
    file = _write(tmp_path / "key", mode=mode)
    os.chown(file, os.geteuid(), _foreign_group(file))
    assert "chmod 600" in _refusal(file)
    file.chmod(0o400)
    assert access_keys(file)


def _foreign_group(file: Path) -> int:
    """A group that is not ours, where this user may give files away; else the file's own."""
    return 54_321 if os.geteuid() == 0 else file.stat().st_gid


@pytest.mark.attack(302)
def test_a_key_file_of_another_user_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = _write(tmp_path / "key")
    if os.geteuid() == 0:
        os.chown(file, 54_321, -1)
    else:
        uid = os.geteuid()
        monkeypatch.setattr(os, "geteuid", lambda: uid + 1)
    assert "another user" in _refusal(file)


def test_a_mounted_secret_of_root_may_be_read_by_a_group_of_ours(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As Kubernetes mounts it with fsGroup: a link to a file of root's, mode 0440."""
    real = os.fstat
    ours = os.getegid()

    def as_mounted(opened: int) -> os.stat_result:
        found = list(real(opened))
        found[stat.ST_UID], found[stat.ST_GID] = 0, ours
        return os.stat_result(found)

    target = _write(tmp_path / "data", mode=0o440)
    (tmp_path / "key").symlink_to(target)
    monkeypatch.setattr(os, "fstat", as_mounted)
    assert access_keys(tmp_path / "key")
    target.chmod(0o444)
    assert "mode 0444" in _refusal(tmp_path / "key")


@pytest.mark.attack(303)
@pytest.mark.timeout(60)
@pytest.mark.parametrize("what", ["folder", "device", "loop", "missing", "large", "binary", "nul"])
def test_what_is_no_key_file_is_refused_quickly(tmp_path: Path, what: str) -> None:
    file = tmp_path / "key"
    match what:
        case "folder":
            file.mkdir(0o700)
        case "device":
            file = Path("/dev/zero")
        case "loop":
            file.symlink_to(file)
        case "large":
            entry = {"name": "a", "rights": ["read"], "key": SECRET}
            _write(file, json.dumps([entry]).encode().ljust(MAX_FILE_BYTES + 1))  # a list, and air
        case "binary":
            _write(file, SECRET.encode() + bytes(range(256)))
        case "nul":
            file = Path("key\0file")
    assert "docs/errors/config.md" in _refusal(file)


@pytest.mark.attack(304)
@pytest.mark.parametrize(
    "changes",
    [
        [{"name": "a"}, {"name": "a", "key": f"{SECRET}2"}],
        [{"name": "a"}, {"name": "b"}],
        [{"name": "a", "rights": ["read", "root"]}],
        [{"name": "a\nb"}],
        [{"name": "a", "key": [SECRET]}],
        [{"name": "a", SECRET: "a"}],
        SECRET,
        {"name": "a"},
    ],
    ids=["name twice", "key twice", "right", "line break", "type", "field", "text", "object"],
)
def test_a_list_with_doubles_or_nonsense_is_refused_as_a_whole(
    tmp_path: Path, changes: Any
) -> None:
    usual = {"rights": ["read"], "key": SECRET}
    entries = [usual | one for one in changes] if isinstance(changes, list) else [changes]
    _refusal(_write(tmp_path / "key", json.dumps(entries).encode()))


@pytest.mark.attack(305)
@pytest.mark.parametrize(
    "text",
    [
        '[{"name":"a","rights":["read"],"rights":["admin"],"key":"%s"}]',
        '[{"name":"a","rights":["read"],"key":"x","key":"%s"}]',
        '[{"name":"a","rights":["read"],"key":"%s"}',
        '[{"name":"a","rights":["read"],"key":"%s"}] []',
        "[" * 5000 + '"%s"',
        '\ufeff["%s"]',
    ],
)
def test_a_list_that_two_parsers_could_read_differently_is_refused(
    tmp_path: Path, text: str
) -> None:
    _refusal(_write(tmp_path / "key", (text % SECRET).encode()))
