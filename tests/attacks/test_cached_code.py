"""Attempts to run other code through the cache of compiled libraries, or to break it for good."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from importlib.machinery import ExtensionFileLoader
from pathlib import Path
from typing import Any

import pytest

from clairai.local import c_extension
from tests.support.other_user import give_away
from tests.support.tiny_extension import cache as cache
from tests.support.tiny_extension import kept_library
from tests.support.tiny_extension import source as source


@pytest.fixture
def planted(source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> bytes:
    """A whole library, as this package keeps one, that is not what tiny.c says."""
    with monkeypatch.context() as patched:
        patched.setenv("XDG_CACHE_HOME", str(tmp_path / "evil"))
        assert c_extension.load_extension(source, {"ANSWER": "666"}).ANSWER == 666
    return kept_library(tmp_path / "evil").read_bytes()


def _damage(library: Path, change: Callable[[bytes], bytes]) -> None:
    library.write_bytes(change(library.read_bytes()))


@pytest.mark.attack(600)
def test_a_library_swapped_between_check_and_load_does_not_run(
    source: Path, cache: Path, planted: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    class SwapFirst(ExtensionFileLoader):
        def __init__(self, name: str, path: str) -> None:
            library = kept_library(cache)
            library.unlink()
            library.write_bytes(planted)
            super().__init__(name, path)

    monkeypatch.setattr(c_extension, "ExtensionFileLoader", SwapFirst)
    assert c_extension.load_extension(source).ANSWER == 42
    assert kept_library(cache).read_bytes() == planted  # the swap did happen


@pytest.mark.attack(601)
@pytest.mark.parametrize("depth", [0, 1, 2])
def test_a_cache_of_another_user_is_neither_read_nor_written(
    source: Path,
    cache: Path,
    planted: bytes,
    depth: int,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    c_extension.load_extension(source)
    library = kept_library(cache)
    library.write_bytes(planted)
    folders = (library.parent, library.parent.parent, cache)
    give_away(folders[depth], monkeypatch=monkeypatch)
    assert c_extension.load_extension(source).ANSWER == 42
    assert "belongs to user" in caplog.text
    assert os.listdir(library.parent) == [library.name]
    assert library.read_bytes() == planted


@pytest.mark.attack(602)
def test_a_cache_below_a_folder_that_others_can_write_is_passed_by(
    source: Path, cache: Path, planted: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    c_extension.load_extension(source)
    kept_library(cache).write_bytes(planted)
    cache.chmod(0o777)
    assert c_extension.load_extension(source).ANSWER == 42
    assert "can be written by others" in caplog.text


@pytest.mark.attack(603)
@pytest.mark.parametrize("kept", [0, 0.25, 0.9, 0.9999])
def test_a_truncated_library_is_built_again(source: Path, cache: Path, kept: float) -> None:
    """In a process of its own: a library that is cut off can end the process that maps it."""
    program = (
        "import pathlib, sys; from clairai.local import c_extension; "
        "print(c_extension.load_extension(pathlib.Path(sys.argv[1])).ANSWER)"
    )

    def load() -> str:
        command = [sys.executable, "-c", program, str(source)]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()

    assert load() == "42"
    _damage(kept_library(cache), lambda raw: raw[: int(kept * len(raw))])
    assert load() == "42"
    assert c_extension.load_extension(source).ANSWER == 42  # and the cache is whole again


@pytest.mark.attack(604)
@pytest.mark.parametrize("place", [0, 0.3, 0.7, 1])
def test_a_flipped_bit_in_a_library_is_found(source: Path, cache: Path, place: float) -> None:
    c_extension.load_extension(source)
    library = kept_library(cache)
    whole = library.read_bytes()
    at = int(place * (len(whole) - 1))
    library.write_bytes(whole[:at] + bytes([whole[at] ^ 1]) + whole[at + 1 :])
    assert c_extension.load_extension(source).ANSWER == 42
    assert library.stat().st_size == len(whole)
    assert library.read_bytes()[at] == whole[at]


def _as_link(library: Path) -> None:
    library.rename(library.with_suffix(".else"))
    library.symlink_to(library.with_suffix(".else"))


def _as_second_name(library: Path) -> None:
    os.link(library, library.with_suffix(".else"))


def _as_fifo(library: Path) -> None:
    library.unlink()
    os.mkfifo(library)


def _writable(library: Path) -> None:
    library.chmod(0o666)


@pytest.mark.attack(605)
@pytest.mark.parametrize("disguise", [_as_link, _as_second_name, _as_fifo, _writable])
def test_a_library_that_is_not_a_plain_file_of_this_user_is_built_again(
    source: Path, cache: Path, planted: bytes, disguise: Callable[[Path], None]
) -> None:
    c_extension.load_extension(source)
    library = kept_library(cache)
    library.write_bytes(planted)
    disguise(library)
    assert c_extension.load_extension(source).ANSWER == 42
    assert library.is_file()
    assert not library.is_symlink()
    assert library.stat().st_mode & 0o777 == 0o600


@pytest.mark.attack(606)
def test_a_library_that_is_whole_and_cannot_be_loaded_is_built_again(
    source: Path, cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    compiler = tmp_path / "cc"
    compiler.write_text("#!/bin/sh\necho built for another machine > tiny.so\n")
    compiler.chmod(0o700)
    with monkeypatch.context() as patched:
        patched.setenv("CC", str(compiler))
        with pytest.raises(c_extension.NoCompilerError):
            c_extension.load_extension(source)
    assert b"another machine" in kept_library(cache).read_bytes()
    assert c_extension.load_extension(source).ANSWER == 42
    assert c_extension.load_extension(source).ANSWER == 42


@pytest.mark.attack(607)
def test_a_cache_without_room_costs_a_build_and_no_start(
    source: Path, cache: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def no_room(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(os, "replace", no_room)
        assert c_extension.load_extension(source).ANSWER == 42
    assert "cannot be kept" in caplog.text
    assert "No space left on device" in caplog.text
    assert os.listdir(cache / "clairai" / "native") == []


@pytest.mark.attack(608)
def test_a_relative_cache_is_not_looked_for_in_the_present_folder(
    source: Path, cache: Path, tmp_path: Path, planted: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    c_extension.load_extension(source)
    kept_library(cache).write_bytes(planted)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", "cache")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    assert c_extension.load_extension(source).ANSWER == 42
    assert kept_library(tmp_path / "home" / ".cache").is_file()


@pytest.mark.attack(609)
def test_a_link_of_another_user_in_the_cache_leads_to_no_change_elsewhere(
    source: Path, cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As root with another user's home: the link could lead to /tmp, which must stay open."""
    shared = tmp_path / "shared"
    shared.mkdir()
    shared.chmod(0o1777)
    (cache / "clairai").mkdir(parents=True)
    (cache / "clairai" / "native").symlink_to(shared)
    give_away(cache / "clairai" / "native", cache / "clairai", cache, monkeypatch=monkeypatch)
    assert c_extension.load_extension(source).ANSWER == 42
    assert shared.stat().st_mode & 0o7777 == 0o1777
    assert list(shared.iterdir()) == []
