"""A C file is compiled once, by any compiler, into a folder that only its user can write."""

from __future__ import annotations

import multiprocessing
import os
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import pytest

from clairai.local import c_extension
from tests.support.tiny_extension import cache as cache
from tests.support.tiny_extension import kept_library
from tests.support.tiny_extension import source as source


def test_a_library_is_built_once_and_found_again(
    source: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert c_extension.load_extension(source).ANSWER == 42
    monkeypatch.setenv("CC", str(cache / "no-compiler"))
    assert c_extension.load_extension(source).ANSWER == 42
    assert os.listdir(kept_library(cache).parent) == [kept_library(cache).name]


def test_a_changed_header_gives_another_library(source: Path, cache: Path) -> None:
    c_extension.load_extension(source)
    made = kept_library(cache)
    made.unlink()
    with source.with_suffix(".h").open("a") as header:
        header.write("/* another */\n")
    c_extension.load_extension(source)
    assert kept_library(cache) != made


@pytest.mark.usefixtures("cache")
def test_macros_are_defined_and_another_value_is_another_library(source: Path) -> None:
    for _ in range(2):  # built, and found again
        assert c_extension.load_extension(source).ANSWER == 42
        assert c_extension.load_extension(source, {"ANSWER": "7"}).ANSWER == 7


def test_only_the_owner_can_write_a_library(source: Path, cache: Path) -> None:
    c_extension.load_extension(source)
    made = kept_library(cache)
    for path in (made, made.parent, made.parent.parent, cache):
        assert path.stat().st_mode & 0o077 == 0


def _load(source: Path) -> int:
    return int(c_extension.load_extension(source).ANSWER)


def test_processes_that_build_at_once_each_get_the_library(source: Path, cache: Path) -> None:
    spawn = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(max_workers=3, mp_context=spawn) as pool:
        assert list(pool.map(_load, [source] * 3)) == [42] * 3
    assert os.listdir(kept_library(cache).parent) == [kept_library(cache).name]


@pytest.mark.usefixtures("cache")
def test_a_compiler_that_fails_says_why(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    broken = tmp_path / "broken"
    broken.write_text("#!/bin/sh\necho no room >&2\nexit 1\n")
    broken.chmod(0o700)
    monkeypatch.setenv("CC", str(broken))
    with pytest.raises(c_extension.NoCompilerError, match="broken failed: no room"):
        c_extension.load_extension(source)
    assert os.listdir(tmp_path / "cache" / "clairai" / "native") == []


@pytest.mark.usefixtures("cache")
def test_a_missing_compiler_is_reported(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CC", str(tmp_path / "nothing"))
    with pytest.raises(c_extension.NoCompilerError, match="could not be run"):
        c_extension.load_extension(source)


@pytest.mark.usefixtures("cache")
def test_a_compiler_that_makes_no_library_is_reported(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    useless = tmp_path / "useless"
    useless.write_text("#!/bin/sh\necho text > tiny.so\n")
    useless.chmod(0o700)
    monkeypatch.setenv("CC", str(useless))
    with pytest.raises(c_extension.NoCompilerError, match="cannot be loaded"):
        c_extension.load_extension(source)


@pytest.mark.usefixtures("cache")
def test_without_a_compiler_there_is_no_module_and_a_warning(
    source: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setenv("CC", str(tmp_path / "nothing"))
    assert c_extension.load_or_warn(source, "steps take longer") is None
    assert caplog.messages[0].endswith("; steps take longer")
