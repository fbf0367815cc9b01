"""Takes one piece of shared memory; gives parts of it out and back, in the order they were given.

Two sides, which may be two processes: the engine's gives parts out and has rows written there, the
clerk's reads them and gives the parts back. Each word of the header has one writer.
"""

from __future__ import annotations

import contextlib
import fcntl
import mmap
import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from clairai.errors import ConfigError, RingError
from clairai.local.shared_buffer import SIZE_SEALS, create_memfd

ALIGNMENT: Final = 256
HEADER_NBYTES: Final = 4096
# Words of the header, in places of 8 bytes; each has a cache line for itself.
FREED_WORD: Final = 0  # bytes that were ever given back; the clerk's side writes it
COPIED_WORD: Final = (
    8  # the last ticket whose rows are there; the engine's side, or its GPU, writes it
)
POLL_S: Final = 0.0005


@dataclass(frozen=True)
class ArenaRegion:
    """Part of an arena."""

    start: int
    nbytes: int
    end: int  # in all bytes that were ever given out


class StagingArena:
    """A ring of bytes behind a header."""

    def __init__(self, mapping: mmap.mmap, fd: int | None) -> None:
        self.fd = fd
        self.nbytes = len(mapping) - HEADER_NBYTES
        self.whole: NDArray[np.uint8] = np.frombuffer(mapping, np.uint8)
        self.memory = self.whole[HEADER_NBYTES:]
        self._words = memoryview(mapping).cast("Q")
        self._given = self._floor = 0  # bytes, ever

    @classmethod
    def create(cls, nbytes: int) -> StagingArena:
        """New memory; a multiple of ALIGNMENT."""
        whole = HEADER_NBYTES + nbytes
        with contextlib.ExitStack() as undo:
            try:
                fd = create_memfd("rows", whole)
                undo.callback(os.close, fd)
                fcntl.fcntl(fd, fcntl.F_ADD_SEALS, SIZE_SEALS)
                mapping = mmap.mmap(fd, whole)
            except OSError as error:
                raise ConfigError(
                    f"no {nbytes} bytes for rows on their way: {error.strerror}; lower "
                    "capture.staging_mib"
                ) from error
            undo.pop_all()
        return cls(mapping, fd)

    @classmethod
    def attach(cls, fd: int) -> StagingArena:
        """The same memory in another process; takes the descriptor over."""
        try:
            if fcntl.fcntl(fd, fcntl.F_GET_SEALS) & SIZE_SEALS != SIZE_SEALS:
                raise RingError("memory for rows is not sealed; its owner could resize it under us")
            return cls(mmap.mmap(fd, os.fstat(fd).st_size), None)
        finally:
            os.close(fd)  # the mapping holds a descriptor of its own

    def close(self) -> None:
        """Let go of the descriptor; views that somebody still holds keep the pages."""
        if self.fd is not None:
            os.close(self.fd)
            self.fd = None

    @property
    def used_nbytes(self) -> int:
        return self._given - self._back

    @property
    def _back(self) -> int:
        # Pairs with free(): whoever reads the new number finds the bytes before it read out.
        return max(int(self._words[FREED_WORD]), self._floor)

    @property
    def given(self) -> int:
        """Bytes that were ever given out."""
        return self._given

    def take(self, nbytes: int, *, spare: int = 0) -> ArenaRegion | None:
        """None if there is no room now, with so much left over. The engine's side, one thread."""
        if self._given == self._back:  # nothing is out: begin at the beginning
            self._given = self._floor = -(-self._given // self.nbytes) * self.nbytes
        needed = -(-nbytes // ALIGNMENT) * ALIGNMENT
        start = self._given % self.nbytes
        skipped = self.nbytes - start if start + needed > self.nbytes else 0
        if self._given + skipped + needed + spare - self._back > self.nbytes:
            return None
        self._given += skipped + needed
        return ArenaRegion((start + skipped) % self.nbytes, nbytes, self._given)

    def wait(self, nbytes: int, is_served: Callable[[], bool] = lambda: True) -> ArenaRegion | None:
        """Room for this much, which is less than there is in all; None if nobody gives any back."""
        while (region := self.take(nbytes)) is None:
            if not is_served():
                return None
            time.sleep(POLL_S)  # for a disk: nobody rings when it has written
        return region

    def free(self, end: int) -> None:
        """All up to the end of this region; the oldest that is out. Only the clerk's side does."""
        # Pairs with _back. On x86 a store is not seen before the loads in front of it are done.
        self._words[FREED_WORD] = end

    def land(self, number: int) -> None:
        """All rows up to this ticket are there; for an engine that writes them itself."""
        # Pairs with has_landed(). On x86 stores are seen in the order in which they were made.
        self._words[COPIED_WORD] = number

    def is_copied(self, number: int) -> bool:
        # Pairs with land(); with a GPU, with the barrier that its write of the word begins with.
        return int(self._words[COPIED_WORD]) >= number

    @property
    def landed(self) -> int:
        return int(self._words[COPIED_WORD])
