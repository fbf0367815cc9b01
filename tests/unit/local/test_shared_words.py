"""Words in shared memory are the same by Python and by C; no machine goes without their order."""

from __future__ import annotations

import mmap
from collections.abc import Iterator
from pathlib import Path

import pytest

from clairai.errors import RingError
from clairai.local.shared_words import load_functions, open_words
from tests.support.tiny_extension import cache as cache

MAX_WORD = (1 << 64) - 1


@pytest.fixture
def on_arm(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("platform.machine", lambda: "aarch64")


@pytest.fixture
def no_compiler(cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Nothing is built yet, and nothing can be."""
    assert not cache.exists()
    monkeypatch.setenv("CC", str(tmp_path / "nothing"))
    load_functions.cache_clear()
    yield
    load_functions.cache_clear()


@pytest.mark.parametrize("machine", ["x86_64", "AMD64"])
def test_on_x86_64_the_words_are_pythons_own(machine: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("platform.machine", lambda: machine)
    assert isinstance(open_words(memoryview(bytearray(16))), memoryview)


@pytest.mark.usefixtures("on_arm")
@pytest.mark.parametrize("value", [0, 1, 1 << 63, MAX_WORD])
def test_a_word_stored_by_c_is_the_word_that_python_and_c_load(value: int) -> None:
    memory = bytearray(b"\xaa" * 24)
    words = open_words(memoryview(memory))
    words[1] = value
    assert words[1] == value
    assert memory == b"\xaa" * 8 + value.to_bytes(8, "little") + b"\xaa" * 8


@pytest.mark.usefixtures("on_arm")
@pytest.mark.parametrize("index", [-1, 2, 1 << 60])
def test_a_word_outside_of_the_memory_is_an_error(index: int) -> None:
    words = open_words(memoryview(bytearray(16)))
    with pytest.raises(IndexError):
        words[index]
    with pytest.raises(IndexError):
        words[index] = 1


@pytest.mark.usefixtures("on_arm")
@pytest.mark.parametrize("value", [-1, MAX_WORD + 1])
def test_a_number_that_fills_no_word_changes_nothing(value: int) -> None:
    words = open_words(memoryview(bytearray(8)))
    with pytest.raises(OverflowError):
        words[0] = value
    assert words[0] == 0


@pytest.mark.usefixtures("on_arm")
def test_words_of_read_only_memory_are_loaded_and_not_stored() -> None:
    words = open_words(memoryview((7).to_bytes(8, "little")))
    assert words[0] == 7
    with pytest.raises(TypeError):
        words[0] = 1


@pytest.mark.usefixtures("on_arm")
def test_words_that_are_not_aligned_are_refused() -> None:
    words = open_words(memoryview(bytearray(24))[1:17])
    with pytest.raises(ValueError, match="not aligned"):
        words[0]


@pytest.mark.usefixtures("on_arm")
def test_released_words_let_go_of_their_memory() -> None:
    with mmap.mmap(-1, 4096) as memory:
        words = open_words(memory)
        words.release()
        with pytest.raises(ValueError, match="released"):
            words[0]


@pytest.mark.usefixtures("on_arm", "no_compiler")
def test_arm_without_a_compiler_is_refused_with_the_way_out() -> None:
    with pytest.raises(RingError, match=r"CPU is aarch64.*nothing could not be run.*install a C"):
        open_words(memoryview(bytearray(8)))


@pytest.mark.usefixtures("on_arm", "no_compiler")
def test_a_reader_that_looks_again_does_not_compile_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls, broken = tmp_path / "calls", tmp_path / "broken"
    broken.write_text(f"#!/bin/sh\necho called >> {calls}\nexit 1\n")
    broken.chmod(0o700)
    monkeypatch.setenv("CC", str(broken))
    for _ in range(3):
        with pytest.raises(RingError, match="broken failed"):
            open_words(memoryview(bytearray(8)))
    assert calls.read_text() == "called\n"


@pytest.mark.usefixtures("no_compiler")
def test_x86_64_needs_no_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("platform.machine", lambda: "x86_64")
    words = open_words(memoryview(bytearray(8)))
    words[0] = 5
    assert words[0] == 5


@pytest.mark.parametrize("machine", ["riscv64", "ppc64le", "armv7l", "s390x"])
def test_another_machine_is_refused_by_name(machine: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("platform.machine", lambda: machine)
    with pytest.raises(RingError, match=f"CPU is {machine}, the ring needs x86-64 or 64-bit ARM"):
        open_words(memoryview(bytearray(8)))
