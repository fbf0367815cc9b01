"""How far the spool has read the ring: one word that the spool process writes and the worker reads.

It lies in shared memory: to ask the spool would wake it, and take longer than a step.
"""

from __future__ import annotations

import mmap
import os
from typing import Final, Self

from clairai.local.shared_words import open_words

_BYTES: Final = 8  # one aligned word, which is read and written whole


class ReadPosition:
    """The number of records that were read, or lost; 0 before the first."""

    def __init__(self, fd: int) -> None:
        """Takes over the descriptor."""
        self.fd = fd
        self._memory = mmap.mmap(fd, _BYTES)
        self._words = open_words(self._memory)

    @classmethod
    def create(cls) -> Self:
        fd = os.memfd_create("clairai-spool", os.MFD_CLOEXEC)
        os.ftruncate(fd, _BYTES)
        return cls(fd)

    @property
    def num_read(self) -> int:
        # Before the worker overwrites records. Pairs with the setter.
        return self._words[0]

    @num_read.setter
    def num_read(self, num_read: int) -> None:
        # After the records have been copied. Pairs with the load in RingRoom.find_limit(), before
        # the worker overwrites them.
        self._words[0] = num_read

    def close(self) -> None:
        self._words.release()
        self._memory.close()
        os.close(self.fd)
