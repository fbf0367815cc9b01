"""Takes one piece of host memory; gives parts of it out and back, in the order they were given."""

from __future__ import annotations

import threading
from dataclasses import dataclass
from typing import Final

import torch

ALIGNMENT: Final = 256


@dataclass(frozen=True)
class Region:
    """Part of an arena."""

    start: int
    nbytes: int
    end: int  # in all bytes that were ever given out


class Arena:
    """A ring of bytes; pinned, so that a GPU copies into it while everybody else goes on."""

    def __init__(self, nbytes: int) -> None:
        self.nbytes = nbytes
        self.memory = torch.empty(nbytes, dtype=torch.uint8, pin_memory=torch.cuda.is_available())
        self._given = self._back = 0  # bytes, ever
        self._changed = threading.Condition()

    @property
    def used_nbytes(self) -> int:
        with self._changed:
            return self._given - self._back

    def take(self, nbytes: int) -> Region | None:
        """None if there is no room now."""
        with self._changed:
            return self._take(nbytes)

    def wait(self, nbytes: int) -> Region:
        """Room for this much, which is less than there is in all."""
        with self._changed:
            while (region := self._take(nbytes)) is None:
                self._changed.wait()
            return region

    def _take(self, nbytes: int) -> Region | None:
        if self._given == self._back:  # nothing is out: begin at the beginning
            self._given = self._back = 0
        needed = -(-nbytes // ALIGNMENT) * ALIGNMENT
        start = self._given % self.nbytes
        skipped = self.nbytes - start if start + needed > self.nbytes else 0
        if self._given + skipped + needed - self._back > self.nbytes:
            return None
        self._given += skipped + needed
        return Region((start + skipped) % self.nbytes, nbytes, self._given)

    def free(self, region: Region) -> None:
        """The oldest that is out."""
        with self._changed:
            self._back = region.end
            self._changed.notify_all()
