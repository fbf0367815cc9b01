"""Words in memory that another process or a GPU sees too, in an order that both can rely on.

A word is stored after all that was read or stored before it, and before all that is stored later.
A word is loaded after all that was read before it, and before all that is read or stored later.
x86-64 keeps that order for every load and store, so there the words are Python's own. ARM does not:
there shared_words.c keeps it, and without a C compiler the memory is refused.
"""

from __future__ import annotations

import functools
import mmap
import platform
from pathlib import Path
from typing import Any, Final, Protocol

from clairai.errors import RingError
from clairai.local.c_extension import NoCompilerError, load_extension

SOURCE: Final = Path(__file__).with_name("shared_words.c")
ORDERED_MACHINES: Final = ("x86_64", "AMD64")
ARM: Final = "aarch64"


class SharedWords(Protocol):
    """Numbers of 64 bits without a sign, by their index; each is read and written whole."""

    def __getitem__(self, index: int, /) -> int: ...

    def __setitem__(self, index: int, value: int, /) -> None: ...

    def release(self) -> None:
        """Let go of the memory, which can then be unmapped."""


def open_words(memory: mmap.mmap | memoryview) -> SharedWords:
    """The aligned words of some memory; RingError on a machine that cannot keep their order."""
    words, machine = memoryview(memory).cast("B").cast("Q"), platform.machine()
    if machine in ORDERED_MACHINES:
        return words
    if machine != ARM:
        raise RingError(
            f"CPU is {machine}, the ring needs x86-64 or 64-bit ARM: the order of its loads and "
            "stores was checked for no other; use one of those"
        )
    functions = load_functions()
    if isinstance(functions, NoCompilerError):
        raise RingError(
            f"CPU is {machine}, where a reader may see the head move before the record unless C "
            f"orders the two, and {SOURCE.name} cannot be used: {functions}; install a C compiler "
            "and Python's headers, for the engine and for its readers"
        )
    return _WordsInC(words, functions)


@functools.cache
def load_functions() -> Any:
    """The functions of shared_words.c, or the error: readers look again, and build it once."""
    try:
        return load_extension(SOURCE)
    except NoCompilerError as error:
        return error


class _WordsInC:
    """The same words by the functions of shared_words.c."""

    def __init__(self, words: memoryview, functions: Any) -> None:
        self._words, self._functions = words, functions

    def __getitem__(self, index: int, /) -> int:
        value: int = self._functions.load(self._words, index)
        return value

    def __setitem__(self, index: int, value: int, /) -> None:
        self._functions.store(self._words, index, value)

    def release(self) -> None:
        self._words.release()
