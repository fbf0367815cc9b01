"""The checksum is the same in C, in numpy and by its definition."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from clairai.local import c_extension
from clairai.weights import checksum as host

SOURCE = Path(host.__file__).with_name("checksum.c")
Sum = Callable[[bytes | memoryview], str]
Copy = Callable[[memoryview, bytes | memoryview], str]


def plainly(raw: bytes) -> str:
    """The definition, word by word."""
    total = 0
    for index in range(0, len(raw), 8):
        word = int.from_bytes(raw[index : index + 8].ljust(8, b"\0"), "little")
        x = (word + index // 8 * host.PLACE) & host.MASK
        x ^= x >> 33
        x = x * host.MIX & host.MASK
        x ^= x >> 29
        total += x
    return f"{(total + len(raw) * host.PLACE) & host.MASK:016x}"


def by_numpy(raw: bytes | memoryview) -> str:
    return host.finish_checksum(host._sum_bytes(raw), len(raw))


@pytest.fixture(scope="module")
def narrow(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """checksum.c as compiled for a processor without wide multiplication."""
    folder = tmp_path_factory.mktemp("plain")
    source = folder / "checksum.c"
    text = SOURCE.read_text()
    assert text.count("is_wide() ?") == 2
    source.write_text(text.replace("is_wide() ?", "0 ?"))
    (folder / "cache").mkdir()
    with pytest.MonkeyPatch.context() as patched:
        patched.setenv("XDG_CACHE_HOME", str(folder / "cache"))
        return c_extension.load_extension(source)


@pytest.fixture(scope="module")
def one_by_one(narrow: Any) -> Sum:
    return lambda raw: host.finish_checksum(narrow.checksum(raw), len(raw))


@pytest.fixture(scope="module")
def copies(narrow: Any) -> dict[str, Copy]:
    """Every implementation of copying and summing."""

    def by_blocks(target: memoryview, source: bytes | memoryview) -> str:
        return host.finish_checksum(narrow.copy_and_checksum(target, source), len(target))

    def by_slices(target: memoryview, source: bytes | memoryview) -> str:
        with pytest.MonkeyPatch.context() as patched:
            patched.setattr(host, "load_native", lambda: None)
            return host.copy_and_checksum(target, source)

    return {"as it is": host.copy_and_checksum, "block by block": by_blocks, "numpy": by_slices}


def test_the_c_module_is_used_where_there_is_a_compiler() -> None:
    assert host.load_native() is not None


@settings(derandomize=True, deadline=None)
@given(st.binary(max_size=300))
def test_c_and_numpy_follow_the_definition(one_by_one: Sum, raw: bytes) -> None:
    assert {host.checksum(raw), one_by_one(raw), by_numpy(raw)} == {plainly(raw)}


@settings(derandomize=True, deadline=None, max_examples=30)
@given(st.integers(0, 3 * 8 * host.CHUNK_WORDS), st.integers(0, 7), st.integers(0, 2**32))
def test_c_and_numpy_agree_wherever_memory_begins_and_ends(
    one_by_one: Sum, nbytes: int, begin: int, seed: int
) -> None:
    raw = memoryview(np.random.default_rng(seed).bytes(nbytes + begin))[begin:]
    assert host.checksum(raw) == one_by_one(raw) == by_numpy(raw)


@pytest.mark.parametrize("words", [1, host.CHUNK_WORDS - 1, host.CHUNK_WORDS, host.CHUNK_WORDS + 1])
def test_numpy_follows_the_definition_across_chunks(words: int) -> None:
    raw = np.random.default_rng(words).bytes(8 * words + 3)
    assert host.checksum(raw) == by_numpy(raw) == plainly(raw)


def test_without_a_compiler_numpy_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host, "load_native", lambda: None)
    raw = np.random.default_rng(3).bytes(1003)
    assert host.checksum(raw) == plainly(raw)


@settings(derandomize=True, deadline=None, max_examples=60)
@given(
    st.one_of(st.integers(0, 300), st.integers(4000, 20000)),
    st.integers(0, 7),
    st.integers(0, 7),
    st.integers(0, 2**32),
)
def test_a_copy_is_exact_and_its_sum_is_the_checksum(
    copies: dict[str, Copy], nbytes: int, begin: int, lands: int, seed: int
) -> None:
    raw = memoryview(np.random.default_rng(seed).bytes(nbytes + begin))[begin:]
    for way, copy in copies.items():
        room = bytearray(b"\xa5" * (lands + nbytes + 64))
        said = copy(memoryview(room)[lands : lands + nbytes], raw)
        assert said == by_numpy(raw), way
        assert room[lands : lands + nbytes] == raw, way
        assert room[:lands] + room[lands + nbytes :] == b"\xa5" * (lands + 64), way


def test_a_copy_that_does_not_fit_is_refused(copies: dict[str, Copy]) -> None:
    for copy in copies.values():
        for nbytes in (7, 9):
            with pytest.raises(ValueError, match=r"."):
                copy(memoryview(bytearray(8)), bytes(nbytes))


def test_read_only_memory_is_not_a_target() -> None:
    with pytest.raises(TypeError):
        host.copy_and_checksum(memoryview(bytes(8)), bytes(8))


def test_memory_that_is_not_contiguous_is_refused() -> None:
    with pytest.raises(BufferError):
        host.checksum(memoryview(bytes(64))[::2])


def test_every_flipped_bit_changes_the_checksum() -> None:
    raw = bytearray(np.random.default_rng(1).bytes(250))
    before = host.checksum(bytes(raw))
    for bit in range(8 * len(raw)):
        raw[bit // 8] ^= 1 << bit % 8
        assert host.checksum(bytes(raw)) != before
        raw[bit // 8] ^= 1 << bit % 8


def test_swapped_words_and_a_longer_tail_change_the_checksum() -> None:
    a, b = b"\x00" * 6 + b"\x80\x3f", b"\x00" * 6 + b"\x00\x40"
    assert host.checksum(a + b) != host.checksum(b + a)
    assert host.checksum(a) != host.checksum(a + b"\0")
