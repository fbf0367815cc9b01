"""Takes nothing; gives how many bytes this machine, or the group we are in, can still be given.

Shared memory has no limit of its own: who asks for more than there is gets it promised, page by
page, until the kernel ends some process, and not always the one that asked.
"""

from __future__ import annotations

import fcntl
import mmap
import os
import secrets
import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final, TypeVar

import numpy as np
from numpy.typing import NDArray

from clairai.errors import ClairaiError, UnsupportedError, WeightsError
from clairai.wire.weights_messages import MAX_SHARED_BYTES, SharedBytes

MEMINFO_FILE: Final = Path("/proc/meminfo")
CGROUP_FILE: Final = Path("/proc/self/cgroup")
CGROUP_ROOT: Final = Path("/sys/fs/cgroup")
RESERVED_BYTES: Final = 64 << 20  # for whoever else lives here


def free_memory_bytes() -> int:
    """The least of what the machine has available and what our control groups still allow."""
    return max(min([_machine_free_bytes(), *_cgroup_free_bytes()]) - RESERVED_BYTES, 0)


def _machine_free_bytes() -> int:
    for line in MEMINFO_FILE.read_text().splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) << 10
    raise AssertionError(f"{MEMINFO_FILE} of Linux 3.14 or later has MemAvailable")


def _cgroup_free_bytes() -> list[int]:
    """Of every group around us that has a limit, in cgroup v2."""
    named = [line for line in CGROUP_FILE.read_text().splitlines() if line.startswith("0::/")]
    groups = [CGROUP_ROOT / line.removeprefix("0::/") for line in named]
    around = [folder for group in groups for folder in (group, *group.parents)]
    limits = [(folder, _read_number(folder / "memory.max")) for folder in around]
    return [
        limit - (_read_number(folder / "memory.current") or 0)
        for folder, limit in limits
        if limit is not None
    ]


def _read_number(file: Path) -> int | None:
    """None where there is no such file, or no limit in it."""
    try:
        text = file.read_text().strip()
    except OSError:
        return None
    return int(text) if text.isdecimal() else None


# MERGED
# Takes numbers; gives them to a process of our own user, in memory that both have used before.
#
# A message of megabytes is copied half a dozen times on its way through vLLM, each time to pages
# that
# nobody has touched, which cost more than the copy. Here the same memfd is filled again and
# again,
# and its reader (local/shared_buffer.py) makes one copy, which is what it checks and keeps.


MIN_SHARED_BYTES: Final = 1 << 18  # less is sooner sent in the message itself


class SharedBuffer:
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

    def lent(self, nbytes: int) -> SharedBytes:
        """Where so many bytes of it are to be read."""
        return SharedBytes(os.getpid(), self._fd, self.token, nbytes)

    def room(self, nbytes: int) -> NDArray[np.uint8]:
        """So many bytes, with whatever lies there from the last time."""
        if nbytes > len(self._pages_N):
            self._grow(nbytes)
        return self._pages_N[:nbytes]

    def _grow(self, nbytes: int) -> None:
        if nbytes > (free := free_memory_bytes()):
            raise WeightsError(f"no {nbytes} bytes of shared memory: {free} are free; free some")
        try:
            os.posix_fallocate(self._fd, 0, nbytes)  # all of it now, or none
            self._pages_N = np.frombuffer(mmap.mmap(self._fd, nbytes, mmap.MAP_SHARED), np.uint8)
        except OSError as error:
            raise WeightsError(
                f"no {nbytes} bytes of shared memory ({error.strerror}); free some"
            ) from error


class SharedBufferPool:
    """One for each engine; it learns whether that engine can reach this process's memory."""

    def __init__(self) -> None:
        self._shelf = SharedBuffer()
        self._lock = threading.Lock()  # the shelf holds one thing at a time
        self._is_refused = False

    def takes(self, nbytes: int) -> bool:
        return not self._is_refused and MIN_SHARED_BYTES <= nbytes <= MAX_SHARED_BYTES

    @contextmanager
    def lend(self, array: NDArray[Any]) -> Iterator[SharedBytes]:
        """Where it is to be read, until the reader has answered; UnsupportedError: never again."""
        with self._lock:
            np.copyto(self._shelf.room(array.nbytes), array.reshape(-1).view(np.uint8))
            try:
                yield self._shelf.lent(array.nbytes)
            except ClairaiError as error:
                self._is_refused = isinstance(error, UnsupportedError)
                raise
            except BaseException:
                self._shelf = SharedBuffer()  # nobody has answered: the old one may yet be read
                raise


# MERGED
# Takes the descriptor of a memfd that another process fills again and again; gives copies of it.
#
# To map it once and copy is several times as fast as to read it. It cannot be made shorter
# (sealed
# against that alone), so no copy runs beyond its end; what its owner writes meanwhile is in the
# copy
# or not, and whoever needs to know compares a checksum of the copy.


MAX_FREE_BLOCKS: Final = 3  # a bank, the one before it that is still described, and the next
ByteArray = NDArray[np.uint8]
Result = TypeVar("Result")


def _allocate_bytes(nbytes: int) -> ByteArray:
    return np.empty(nbytes, np.uint8)


class _PooledBytes:
    """Memory as numpy takes it without a copy: an array of it, or a view of one, keeps this."""

    def __init__(self, pages_N: ByteArray, nbytes: int) -> None:
        self.__array_interface__ = pages_N[:nbytes].__array_interface__


class BufferCopier:
    """One for each place where memory comes; it keeps the mapping, and room for the next copies."""

    def __init__(self, allocate: Callable[[int], ByteArray] = _allocate_bytes) -> None:
        """`allocate` gives the memory that copies lie in."""
        self._allocate = allocate
        self._lock = threading.Lock()
        self._inode = (0, 0)
        self._theirs_N: ByteArray = np.empty(0, np.uint8)
        self._free: deque[ByteArray] = deque(maxlen=MAX_FREE_BLOCKS)

    def copy(self, fd: int, nbytes: int) -> ByteArray:
        """The first bytes of a memfd as they are now, in memory of our own."""
        return self.copied(fd, nbytes, np.copyto)[0]

    def copied(
        self, fd: int, nbytes: int, copy: Callable[[ByteArray, ByteArray], Result]
    ) -> tuple[ByteArray, Result]:
        """As `copy`, by a function of where to and where from; and what that says."""
        require_memfd(fd, nbytes)
        with self._lock:
            copied_N = self._room(nbytes)
            said = copy(copied_N, self._mapped(fd, nbytes)[:nbytes])
        return copied_N, said

    def borrowed(self, lent: SharedBytes) -> memoryview:
        """A copy that nobody writes to; UnsupportedError where the lender cannot be reached."""
        fd = open_shared(lent)
        try:
            return self.copy(fd, lent.nbytes).data.toreadonly()
        finally:
            os.close(fd)

    def _mapped(self, fd: int, nbytes: int) -> ByteArray:
        """A memfd that is mapped here lives: its number is no other's."""
        found = os.fstat(fd)
        inode = found.st_dev, found.st_ino
        if inode != self._inode or nbytes > len(self._theirs_N):
            self._theirs_N = np.frombuffer(
                mmap.mmap(fd, nbytes, mmap.MAP_SHARED, mmap.PROT_READ), np.uint8
            )
            self._inode = inode
        return self._theirs_N

    def _room(self, nbytes: int) -> ByteArray:
        """Of what was used before, if nobody holds it any more: fresh pages cost more than a copy.

        It comes back when the last array that lies in it has gone, whoever held that.
        """
        pages_N = self._free.pop() if self._free else np.empty(0, np.uint8)
        if len(pages_N) < nbytes:
            pages_N = self._allocate(nbytes)
        block = _PooledBytes(pages_N, nbytes)
        weakref.finalize(block, self._free.append, pages_N).atexit = False
        return np.asarray(block)


def open_shared(lent: SharedBytes) -> int:
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


def require_memfd(fd: int, nbytes: int) -> None:
    """A pipe, a device or a file of a slow disk could take for ever."""
    try:
        seals = fcntl.fcntl(fd, fcntl.F_GET_SEALS)
    except OSError:
        raise WeightsError("the buffer is not a memfd; use the Sender") from None
    if (size := os.fstat(fd).st_size) < nbytes:
        raise WeightsError(f"the buffer has {size} bytes, {nbytes} were planned; plan again")
    if not seals & fcntl.F_SEAL_SHRINK:
        raise WeightsError("the buffer could be cut off while it is read; use the Sender")
