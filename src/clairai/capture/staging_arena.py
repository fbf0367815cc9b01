"""Shared memory through which captured rows go from the engine to the capture writer.

A ring of bytes behind a header. The engine allocates regions in order and has rows copied there;
the writer, which may be another process, reads them and frees the regions in the same order. Each
word of the header has one writer.
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
from clairai.local.own_clock import OwnClock
from clairai.local.shared_buffer import SIZE_SEALS, create_memfd
from clairai.local.shared_words import open_words

ALIGNMENT: Final = 256
HEADER_NBYTES: Final = 4096
# Words of the header, counted in 8 bytes; each has a cache line of its own.
FREED_WORD: Final = 0  # bytes freed so far; the capture writer writes it
COPIED_WORD: Final = 8  # the last message whose rows are there; the engine or its GPU writes it
POLL_S: Final = 0.0005
BLOCK_S: Final = 60.0  # how long the engine waits for a consumer that frees nothing


@dataclass(frozen=True)
class ArenaRegion:
    """A part of the arena."""

    start: int
    nbytes: int
    end: int  # bytes allocated so far, this region included


class StagingArena:
    """One side's view of the arena."""

    def __init__(self, mapping: mmap.mmap, fd: int | None) -> None:
        self.fd = fd
        self.nbytes = len(mapping) - HEADER_NBYTES
        self.whole: NDArray[np.uint8] = np.frombuffer(mapping, np.uint8)
        self.memory = self.whole[HEADER_NBYTES:]
        self._words = open_words(mapping)
        self._allocated = self._floor = 0  # bytes, counted from the start
        self._stuck_at = -1  # bytes freed when waiting for more was given up

    @classmethod
    def create(cls, nbytes: int) -> StagingArena:
        """New memory; `nbytes` must be a multiple of ALIGNMENT."""
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
            arena = cls(mapping, fd)
            undo.pop_all()
        return arena

    @classmethod
    def attach(cls, fd: int) -> StagingArena:
        """The same memory in another process; closes the descriptor."""
        try:
            if fcntl.fcntl(fd, fcntl.F_GET_SEALS) & SIZE_SEALS != SIZE_SEALS:
                raise RingError("memory for rows is not sealed; its owner could resize it under us")
            return cls(mmap.mmap(fd, os.fstat(fd).st_size), None)
        finally:
            os.close(fd)  # the mapping holds a descriptor of its own

    def close(self) -> None:
        """Close the descriptor; views that are still in use keep the pages."""
        if self.fd is not None:
            os.close(self.fd)
            self.fd = None

    @property
    def used_nbytes(self) -> int:
        return self._allocated - self._freed

    @property
    def _freed(self) -> int:
        # Pairs with free(): the bytes before the number that is read here have been read.
        return max(self._words[FREED_WORD], self._floor)

    @property
    def allocated(self) -> int:
        """Bytes allocated so far, in all."""
        return self._allocated

    def allocate(self, nbytes: int, *, spare: int = 0) -> ArenaRegion | None:
        """None without room for it and `spare` bytes more. One thread of the engine calls this."""
        if self._allocated == self._freed:  # empty: start at the beginning of the memory
            self._allocated = self._floor = -(-self._allocated // self.nbytes) * self.nbytes
        needed = -(-nbytes // ALIGNMENT) * ALIGNMENT
        start = self._allocated % self.nbytes
        skipped = self.nbytes - start if start + needed > self.nbytes else 0
        if self._allocated + skipped + needed + spare - self._freed > self.nbytes:
            return None
        self._allocated += skipped + needed
        return ArenaRegion((start + skipped) % self.nbytes, nbytes, self._allocated)

    def wait_for_room(
        self, nbytes: int, is_served: Callable[[], bool] = lambda: True
    ) -> ArenaRegion | None:
        """A region of at most the arena's size; None once nobody is left to free any.

        Also None when nothing has been freed for BLOCK_S, and from then on at once, until
        something is: a consumer that hangs must not hold up generation for good.
        """
        clock, freed, progress_s = OwnClock(), self._freed, 0.0
        while (region := self.allocate(nbytes)) is None:
            if not is_served() or self._freed == self._stuck_at:
                return None
            now_s = clock.tick()
            if self._freed != freed:
                freed, progress_s = self._freed, now_s
            if now_s - progress_s >= BLOCK_S:
                self._stuck_at = freed
            time.sleep(POLL_S)  # nothing signals that a disk has written
        return region

    def free(self, end: int) -> None:
        """Free everything up to the end of a region. Only the capture writer calls this."""
        # Pairs with _freed: all loads of the rows come before this store.
        self._words[FREED_WORD] = end

    def discard_all(self) -> None:
        """Everything is free: the capture writer that would have read it is dead."""
        self._floor = self._allocated

    def mark_copied(self, number: int) -> None:
        """The rows of all messages up to this number are there; for an engine without a GPU."""
        # Pairs with is_copied(): all stores of the rows come before this one.
        self._words[COPIED_WORD] = number

    def is_copied(self, number: int) -> bool:
        # Pairs with mark_copied(), and with the barrier before the same write of a GPU.
        return self._words[COPIED_WORD] >= number

    @property
    def last_copied(self) -> int:
        return self._words[COPIED_WORD]
