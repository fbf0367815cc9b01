"""Takes the descriptor of a memfd that another process fills again and again; gives copies of it.

To map it once and copy is several times as fast as to read it. It cannot be made shorter (sealed
against that alone), so no copy runs beyond its end; what its owner writes meanwhile is in the copy
or not, and whoever needs to know compares a checksum of the copy.
"""

from __future__ import annotations

import fcntl
import mmap
import os
import threading
import weakref
from collections import deque
from collections.abc import Callable
from typing import Final, TypeVar

import numpy as np
from numpy.typing import NDArray

from clairai.errors import UnsupportedError, WeightsError
from clairai.wire import Lent

KEPT_BLOCKS: Final = 3  # a bank, the one before it that is still described, and the next
Pages = NDArray[np.uint8]
Said = TypeVar("Said")


def _ordinary(nbytes: int) -> Pages:
    return np.empty(nbytes, np.uint8)


class _Block:
    """Memory as numpy takes it without a copy: an array of it, or a view of one, keeps this."""

    def __init__(self, pages_N: Pages, nbytes: int) -> None:
        self.__array_interface__ = pages_N[:nbytes].__array_interface__


class Borrower:
    """One for each place where memory comes; it keeps the mapping, and room for the next copies."""

    def __init__(self, allocate: Callable[[int], Pages] = _ordinary) -> None:
        """`allocate` gives the memory that copies lie in."""
        self._allocate = allocate
        self._lock = threading.Lock()
        self._inode = (0, 0)
        self._theirs_N: Pages = np.empty(0, np.uint8)
        self._free: deque[Pages] = deque(maxlen=KEPT_BLOCKS)

    def copy(self, fd: int, nbytes: int) -> Pages:
        """The first bytes of a memfd as they are now, in memory of our own."""
        return self.copied(fd, nbytes, np.copyto)[0]

    def copied(
        self, fd: int, nbytes: int, copy: Callable[[Pages, Pages], Said]
    ) -> tuple[Pages, Said]:
        """As `copy`, by a function of where to and where from; and what that says."""
        require_memory(fd, nbytes)
        with self._lock:
            copied_N = self._room(nbytes)
            said = copy(copied_N, self._mapped(fd, nbytes)[:nbytes])
        return copied_N, said

    def borrowed(self, lent: Lent) -> memoryview:
        """A copy that nobody writes to; UnsupportedError where the lender cannot be reached."""
        fd = open_lent(lent)
        try:
            return self.copy(fd, lent.nbytes).data.toreadonly()
        finally:
            os.close(fd)

    def _mapped(self, fd: int, nbytes: int) -> Pages:
        """A memfd that is mapped here lives: its number is no other's."""
        found = os.fstat(fd)
        inode = found.st_dev, found.st_ino
        if inode != self._inode or nbytes > len(self._theirs_N):
            self._theirs_N = np.frombuffer(
                mmap.mmap(fd, nbytes, mmap.MAP_SHARED, mmap.PROT_READ), np.uint8
            )
            self._inode = inode
        return self._theirs_N

    def _room(self, nbytes: int) -> Pages:
        """Of what was used before, if nobody holds it any more: fresh pages cost more than a copy.

        It comes back when the last array that lies in it has gone, whoever held that.
        """
        pages_N = self._free.pop() if self._free else np.empty(0, np.uint8)
        if len(pages_N) < nbytes:
            pages_N = self._allocate(nbytes)
        block = _Block(pages_N, nbytes)
        weakref.finalize(block, self._free.append, pages_N).atexit = False
        return np.asarray(block)


def open_lent(lent: Lent) -> int:
    """A descriptor of it; UnsupportedError where the lender cannot be reached."""
    path = f"/proc/{lent.pid}/fd/{lent.fd}"
    try:
        # Looked at before it is opened: to open something else may have effects, or no end.
        if os.readlink(path) != f"/memfd:clairai-{lent.token} (deleted)":
            raise UnsupportedError("other memory is where this was lent; send it in the message")
        return os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError as error:
        raise UnsupportedError(
            f"what was lent cannot be reached from here ({error.strerror}); send it in the message"
        ) from error


def require_memory(fd: int, nbytes: int) -> None:
    """A pipe, a device or a file of a slow disk could take for ever."""
    try:
        seals = fcntl.fcntl(fd, fcntl.F_GET_SEALS)
    except OSError:
        raise WeightsError("the buffer is not a memfd; use the Sender") from None
    if (size := os.fstat(fd).st_size) < nbytes:
        raise WeightsError(f"the buffer has {size} bytes, {nbytes} were planned; plan again")
    if not seals & fcntl.F_SEAL_SHRINK:
        raise WeightsError("the buffer could be cut off while it is read; use the Sender")
