"""Takes numbers; gives them to a process of our own user, in memory that both have used before.

A message of megabytes is copied half a dozen times on its way through vLLM, each time to pages that
nobody has touched, which cost more than the copy. Here the same memfd is filled again and again,
and its reader (borrow.py) makes one copy, which is what it checks and keeps.
"""

from __future__ import annotations

import fcntl
import mmap
import os
import secrets
import threading
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from clairai.errors import ClairaiError, UnsupportedError, WeightsError
from clairai.ring.room import free_bytes
from clairai.wire import MAX_LENT_BYTES, Lent

MIN_BYTES: Final = 1 << 18  # less is sooner sent in the message itself


class Shelf:
    """Room that is kept from one time to the next, as long as it lives."""

    def __init__(self) -> None:
        self.token = secrets.token_hex(16)  # in the name: no other memory is taken for this one
        flags = os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING
        self._fd = os.memfd_create(f"clairai-{self.token}", flags)
        fcntl.fcntl(self._fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK)  # who maps it may rely on it
        self._pages_N: NDArray[np.uint8] = np.empty(0, np.uint8)
        weakref.finalize(self, os.close, self._fd)

    @property
    def fds(self) -> tuple[int, ...]:
        return (self._fd,)

    def lent(self, nbytes: int) -> Lent:
        """Where so many bytes of it are to be read."""
        return Lent(os.getpid(), self._fd, self.token, nbytes)

    def room(self, nbytes: int) -> NDArray[np.uint8]:
        """So many bytes, with whatever lies there from the last time."""
        if nbytes > len(self._pages_N):
            self._grow(nbytes)
        return self._pages_N[:nbytes]

    def _grow(self, nbytes: int) -> None:
        if nbytes > (free := free_bytes()):
            raise WeightsError(f"no {nbytes} bytes of shared memory: {free} are free; free some")
        try:
            os.posix_fallocate(self._fd, 0, nbytes)  # all of it now, or none
            self._pages_N = np.frombuffer(mmap.mmap(self._fd, nbytes, mmap.MAP_SHARED), np.uint8)
        except OSError as error:
            raise WeightsError(
                f"no {nbytes} bytes of shared memory ({error.strerror}); free some"
            ) from error


class Lender:
    """One for each engine; it learns whether that engine can reach this process's memory."""

    def __init__(self) -> None:
        self._shelf = Shelf()
        self._lock = threading.Lock()  # the shelf holds one thing at a time
        self._is_refused = False

    def takes(self, nbytes: int) -> bool:
        return not self._is_refused and MIN_BYTES <= nbytes <= MAX_LENT_BYTES

    @contextmanager
    def lend(self, array: NDArray[Any]) -> Iterator[Lent]:
        """Where it is to be read, until the reader has answered; UnsupportedError: never again."""
        with self._lock:
            np.copyto(self._shelf.room(array.nbytes), array.reshape(-1).view(np.uint8))
            try:
                yield self._shelf.lent(array.nbytes)
            except ClairaiError as error:
                self._is_refused = isinstance(error, UnsupportedError)
                raise
            except BaseException:
                self._shelf = Shelf()  # nobody has answered: the old one may yet be read
                raise
