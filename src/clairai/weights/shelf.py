"""Takes what is small, such as a bank; gives it over in memory that both sides have used before.

A page that nobody has touched costs more than copying into it: the sender fills the same memfd
again and again, and the engine reads it into memory of its own instead of mapping it. So it need
not be sealed: what the engine checks and keeps is its copy, and nobody else can reach that.
"""

from __future__ import annotations

import fcntl
import mmap
import os
import weakref
from collections.abc import Sequence
from typing import Final

import numpy as np
from numpy.typing import NDArray

from clairai.errors import WeightsError
from clairai.ring.room import free_bytes
from clairai.weights.checksum import checksum
from clairai.weights.manifest import Tensor

COPIED_BYTES: Final = 32 << 20  # at most; more is mapped


class Shelf:
    """The sender's: room that is kept from one hand-over to the next, as long as it lives."""

    def __init__(self) -> None:
        self._fd = os.memfd_create("clairai-weights", os.MFD_CLOEXEC)
        self._pages_N: NDArray[np.uint8] = np.empty(0, np.uint8)
        weakref.finalize(self, os.close, self._fd)

    @property
    def fds(self) -> tuple[int, ...]:
        return (self._fd,)

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


class Copied:
    """The engine's: its own copy of what a sender's memfd held at one moment."""

    def __init__(self, fd: int, nbytes: int, used: int) -> None:
        """Takes the descriptor over, also when it refuses it; after `used` bytes lies nothing."""
        try:
            _require_memory(fd, nbytes)
            self.bytes_N = _read(fd, used)
        except OSError as error:
            raise WeightsError(f"the buffer cannot be read ({error}); send it again") from error
        finally:
            os.close(fd)
        self.extent = nbytes

    def checksums(self, tensors: Sequence[Tensor]) -> list[str]:
        view = self.bytes_N.data
        return [checksum(view[each.offset : each.offset + each.nbytes]) for each in tensors]

    def close(self) -> None:
        """Who still holds a tensor of it keeps it."""
        self.bytes_N = self.bytes_N[:0].copy()


def _require_memory(fd: int, nbytes: int) -> None:
    """To read a pipe, a device or a file of a slow disk could take for ever."""
    try:
        fcntl.fcntl(fd, fcntl.F_GET_SEALS)
    except OSError:
        raise WeightsError("the buffer is not a memfd; use the Sender") from None
    if (size := os.fstat(fd).st_size) < nbytes:
        raise WeightsError(f"the buffer has {size} bytes, {nbytes} were planned; plan again")


def _read(fd: int, nbytes: int) -> NDArray[np.uint8]:
    bytes_N = np.empty(nbytes, np.uint8)
    done = 0
    while done < nbytes:
        count = os.preadv(fd, [bytes_N[done:].data], done)
        if not count:
            raise WeightsError(
                f"the buffer ends after {done} bytes, while it is read; send it again"
            )
        done += count
    return bytes_N
