"""A C file is compiled once, by any compiler, into a folder that only its user can write."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from clairai.local import c_extension

TINY = """
#include <Python.h>
#include "tiny.h"
static struct PyModuleDef definition = {PyModuleDef_HEAD_INIT, "tiny", NULL, -1, NULL};
PyMODINIT_FUNC PyInit_tiny(void)
{
    PyObject *module = PyModule_Create(&definition);
    PyModule_AddIntConstant(module, "ANSWER", ANSWER);
    return module;
}
"""
HEADER = """
#ifndef ANSWER
#define ANSWER 42
#endif
"""


@pytest.fixture
def source(tmp_path: Path) -> Path:
    folder = tmp_path / "source"
    folder.mkdir()
    (folder / "tiny.c").write_text(TINY)
    (folder / "tiny.h").write_text(HEADER)
    return folder / "tiny.c"


def test_a_library_is_built_once_and_found_again(source: Path, tmp_path: Path) -> None:
    made = c_extension.build_extension(source, tmp_path / "cache")
    before = made.stat().st_mtime_ns
    assert c_extension.build_extension(source, tmp_path / "cache") == made
    assert made.stat().st_mtime_ns == before
    assert [path.name for path in made.parent.iterdir()] == [made.name]


def test_a_changed_header_gives_another_library(source: Path, tmp_path: Path) -> None:
    made = c_extension.build_extension(source, tmp_path / "cache")
    with source.with_suffix(".h").open("a") as header:
        header.write("/* another */\n")
    assert c_extension.build_extension(source, tmp_path / "cache") != made


def test_macros_are_defined_and_another_value_is_another_library(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert c_extension.load_extension(source).ANSWER == 42
    assert c_extension.load_extension(source, {"ANSWER": "7"}).ANSWER == 7


def test_only_the_owner_can_write_a_library(source: Path, tmp_path: Path) -> None:
    made = c_extension.build_extension(source, tmp_path / "cache")
    assert made.stat().st_mode & 0o077 == 0
    assert made.parent.stat().st_mode & 0o077 == 0


@pytest.mark.parametrize("place", ["file", "folder"])
def test_a_library_that_others_could_have_written_is_built_again(
    source: Path, tmp_path: Path, place: str
) -> None:
    made = c_extension.build_extension(source, tmp_path / "cache")
    made.write_bytes(b"not a library")
    (made if place == "file" else made.parent).chmod(0o777)
    assert c_extension.build_extension(source, tmp_path / "cache").read_bytes()[:4] == b"\x7fELF"
    assert made.parent.stat().st_mode & 0o077 == 0


def test_a_compiler_that_fails_says_why(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    broken = tmp_path / "broken"
    broken.write_text("#!/bin/sh\necho no room >&2\nexit 1\n")
    broken.chmod(0o700)
    monkeypatch.setenv("CC", str(broken))
    with pytest.raises(c_extension.NoCompilerError, match="broken failed: no room"):
        c_extension.build_extension(source, tmp_path / "cache")
    assert os.listdir(tmp_path / "cache") == []


def test_a_missing_compiler_is_reported(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CC", str(tmp_path / "nothing"))
    with pytest.raises(c_extension.NoCompilerError, match="could not be run"):
        c_extension.build_extension(source, tmp_path / "cache")


def test_without_a_compiler_there_is_no_module_and_a_warning(
    source: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("CC", str(tmp_path / "nothing"))
    assert c_extension.load_or_warn(source, "steps take longer") is None
    assert caplog.messages[0].endswith("; steps take longer")
