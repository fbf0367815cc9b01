"""A C file is compiled once, by any compiler, into a folder that only its user can write."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest

import clairai
from clairai.local import c_extension

SOURCE = Path(clairai.__file__).parent / "engine" / "publish" / "step.c"


def test_a_library_is_built_once_and_found_again(tmp_path: Path) -> None:
    made = c_extension.build_extension(SOURCE, tmp_path / "cache")
    before = made.stat().st_mtime_ns
    assert c_extension.build_extension(SOURCE, tmp_path / "cache") == made
    assert made.stat().st_mtime_ns == before
    assert [path.name for path in made.parent.iterdir()] == [made.name]


def test_a_changed_header_gives_another_library(tmp_path: Path) -> None:
    for file in (SOURCE, *SOURCE.parent.glob("*.h")):
        shutil.copy(file, tmp_path)
    made = c_extension.build_extension(tmp_path / SOURCE.name, tmp_path / "cache")
    with (tmp_path / "ledger.h").open("a") as header:
        header.write("/* another */\n")
    assert c_extension.build_extension(tmp_path / SOURCE.name, tmp_path / "cache") != made


def test_only_the_owner_can_write_a_library(tmp_path: Path) -> None:
    made = c_extension.build_extension(SOURCE, tmp_path / "cache")
    assert made.stat().st_mode & 0o077 == 0
    assert made.parent.stat().st_mode & 0o077 == 0


@pytest.mark.parametrize("place", ["file", "folder"])
def test_a_library_that_others_could_have_written_is_built_again(
    tmp_path: Path, place: str
) -> None:
    made = c_extension.build_extension(SOURCE, tmp_path / "cache")
    made.write_bytes(b"not a library")
    (made if place == "file" else made.parent).chmod(0o777)
    assert c_extension.build_extension(SOURCE, tmp_path / "cache").read_bytes()[:4] == b"\x7fELF"
    assert made.parent.stat().st_mode & 0o077 == 0


def test_a_compiler_that_fails_says_why(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    broken = tmp_path / "broken"
    broken.write_text("#!/bin/sh\necho no room >&2\nexit 1\n")
    broken.chmod(0o700)
    monkeypatch.setenv("CC", str(broken))
    with pytest.raises(c_extension.NoCompilerError, match="broken failed: no room"):
        c_extension.build_extension(SOURCE, tmp_path / "cache")
    assert os.listdir(tmp_path / "cache") == []


def test_a_missing_compiler_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CC", str(tmp_path / "nothing"))
    with pytest.raises(c_extension.NoCompilerError, match="could not be run"):
        c_extension.build_extension(SOURCE, tmp_path / "cache")


@pytest.mark.parametrize("name", ["run", "note", "goes_on"])
def test_a_call_without_its_arguments_is_an_error(name: str) -> None:
    with pytest.raises(TypeError, match=r"1 arguments were given, [234] are wanted"):
        getattr(c_extension.load_extension(SOURCE), name)(0)


def test_without_a_compiler_there_is_no_module_and_a_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("CC", str(tmp_path / "nothing"))
    assert c_extension.load_or_warn(SOURCE, "steps take longer") is None
    assert caplog.messages[0].endswith("; steps take longer")
