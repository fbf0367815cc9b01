"""Memory that processes of one user share: memfds, a buffer that is used again, and copies of it.

A message of megabytes is copied half a dozen times on its way through vLLM, each time to pages that
no process has touched, which costs more than the copy itself. So numbers of that size go through a
`ReusableBuffer`: the sender fills the same memfd again and again, and its reader (`BufferCopier`)
makes one copy, to memory it has used before; that copy is what it checks and keeps.
"""

from __future__ import annotations

import errno
import fcntl
import mmap
import os
import secrets
import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Final, TypeVar

import numpy as np
from numpy.typing import NDArray

from clairai.errors import ClairaiError, UnsupportedError, WeightsError
from clairai.local.free_memory import free_memory_bytes
from clairai.wire.weights_messages import MAX_SHARED_BYTES, SharedBytes

MIN_SHARED_BYTES: Final = 1 << 18  # fewer are faster in the message itself
SIZE_SEALS: Final = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
MAX_FREE_BLOCKS: Final = 3  # a bank, the one before it that is still described, and the next

ByteArray = NDArray[np.uint8]
_Result = TypeVar("_Result")


def create_memfd(name: str, nbytes: int) -> int:
    """Return a new memfd with all its memory allocated; OSError if there is not enough."""
    fd = os.memfd_create(f"clairai-{name}", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        _allocate_memfd(fd, nbytes)
    except OSError:
        os.close(fd)
        raise
    return fd


def _allocate_memfd(fd: int, nbytes: int) -> None:
    """Grow a memfd to `nbytes`, now: memory that is missing later ends a process with SIGBUS."""
    if nbytes > (free := free_memory_bytes()):
        raise OSError(errno.ENOMEM, f"{free} are free")
    if nbytes:
        os.posix_fallocate(fd, 0, nbytes)


def require_memfd(
    fd: int, nbytes: int, *, seals: int, error: type[ClairaiError], is_exact: bool = True
) -> None:
    """Refuse what is no memfd, has another size or can still be changed as `seals` forbid.

    Reading a pipe, a device or a file on a slow disk could block forever.
    """
    try:
        found = fcntl.fcntl(fd, fcntl.F_GET_SEALS)
    except OSError:
        raise error("this is not a memfd; do not trust this peer") from None
    size = os.fstat(fd).st_size
    if size < nbytes or (is_exact and size != nbytes):
        raise error(f"memory has {size} bytes, {nbytes} were announced; do not trust this peer")
    if found & seals != seals:
        raise error(
            f"memory has seals {found:#x}, needs {seals:#x}: it could change while it is read"
        )


class SharedBuffer:
    """A memfd that its owner fills again and again; it grows as needed and never shrinks."""

    def __init__(self) -> None:
        self.token = secrets.token_hex(16)  # in its name, so that no other memory passes for it
        self._fd = create_memfd(self.token, 0)
        # A reader may map it: it cannot be cut off under a copy.
        fcntl.fcntl(self._fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK)
        self._bytes_N: ByteArray = np.empty(0, np.uint8)
        weakref.finalize(self, os.close, self._fd)

    @property
    def fds(self) -> tuple[int, ...]:
        return (self._fd,)

    def reference(self, nbytes: int) -> SharedBytes:
        """What another process needs to read the first `nbytes`."""
        return SharedBytes(os.getpid(), self._fd, self.token, nbytes)

    def view(self, nbytes: int) -> ByteArray:
        """The first `nbytes`, writable, with whatever they held before."""
        if nbytes > len(self._bytes_N):
            self._grow(nbytes)
        return self._bytes_N[:nbytes]

    def _grow(self, nbytes: int) -> None:
        try:
            _allocate_memfd(self._fd, nbytes)
            self._bytes_N = np.frombuffer(mmap.mmap(self._fd, nbytes, mmap.MAP_SHARED), np.uint8)
        except OSError as error:
            raise WeightsError(
                f"no {nbytes} bytes of shared memory: {error.strerror}; free some"
            ) from error


class ReusableBuffer:
    """The shared buffer for one engine; remembers whether that engine can read it."""

    def __init__(self) -> None:
        self._buffer = SharedBuffer()
        self._lock = threading.Lock()  # it holds one message's bytes at a time
        self.is_readable = True  # until an engine says UnsupportedError

    def can_hold(self, nbytes: int) -> bool:
        """False for too few or too many bytes, and once an engine could not read it."""
        return self.is_readable and MIN_SHARED_BYTES <= nbytes <= MAX_SHARED_BYTES

    @contextmanager
    def lock(self) -> Iterator[SharedBuffer]:
        """Fill it and wait for the engine's answer within this context."""
        with self._lock:
            try:
                yield self._buffer
            except ClairaiError as error:
                self.is_readable &= not isinstance(error, UnsupportedError)
                raise
            except BaseException:
                self._buffer = SharedBuffer()  # without an answer: the engine may yet read it
                raise


class BufferCopier:
    """Copies from other processes' buffers; keeps the mapping, and the memory of old copies.

    Mapping once and copying is several times as fast as reading. What the owner writes meanwhile
    is in the copy or not: compare a checksum of the copy where that matters.
    """

    def __init__(self, allocate: Callable[[int], ByteArray] | None = None) -> None:
        """`allocate` returns the memory for copies; ordinary memory if None."""
        self._allocate = allocate or (lambda nbytes: np.empty(nbytes, np.uint8))
        self._lock = threading.Lock()
        self._inode = (0, 0)
        self._source_N: ByteArray = np.empty(0, np.uint8)
        self._free: deque[ByteArray] = deque(maxlen=MAX_FREE_BLOCKS)

    def copy(self, fd: int, nbytes: int) -> ByteArray:
        """Return a private copy of the first bytes of a memfd."""
        return self.copy_with(np.copyto, fd, nbytes)[0]

    def copy_with(
        self, copy: Callable[[ByteArray, ByteArray], _Result], fd: int, nbytes: int
    ) -> tuple[ByteArray, _Result]:
        """Copy by `copy(target, source)`; return the copy and its result."""
        require_memfd(fd, nbytes, seals=fcntl.F_SEAL_SHRINK, error=WeightsError, is_exact=False)
        with self._lock:
            copied_N = self._take_block(nbytes)
            result = copy(copied_N, self._map(fd, nbytes)[:nbytes])
        return copied_N, result

    def copy_shared(self, shared: SharedBytes) -> memoryview:
        """Return a read-only copy; UnsupportedError if the owner's memory cannot be reached."""
        fd = open_shared(shared)
        try:
            return self.copy(fd, shared.nbytes).data.toreadonly()
        finally:
            os.close(fd)

    def _map(self, fd: int, nbytes: int) -> ByteArray:
        # A mapped memfd lives, so that no other one can have its inode.
        status = os.fstat(fd)
        inode = status.st_dev, status.st_ino
        if inode != self._inode or nbytes > len(self._source_N):
            self._source_N = np.frombuffer(
                mmap.mmap(fd, nbytes, mmap.MAP_SHARED, mmap.PROT_READ), np.uint8
            )
            self._inode = inode
        return self._source_N

    def _take_block(self, nbytes: int) -> ByteArray:
        """Memory of an old copy, if there is one: fresh pages cost more than the copy.

        It becomes free again when the last array that uses it is gone, whoever holds that.
        """
        block_N = self._free.pop() if self._free else np.empty(0, np.uint8)
        if len(block_N) < nbytes:
            block_N = self._allocate(nbytes)
        owner = _BlockOwner(block_N, nbytes)
        weakref.finalize(owner, self._free.append, block_N).atexit = False
        return np.asarray(owner)


class _BlockOwner:
    """Every array made of this, and every view of one, keeps it alive."""

    def __init__(self, block_N: ByteArray, nbytes: int) -> None:
        self.__array_interface__ = block_N[:nbytes].__array_interface__


def open_shared(shared: SharedBytes) -> int:
    """Open another process's buffer; UnsupportedError if it cannot be reached from here."""
    path = f"/proc/{shared.pid}/fd/{shared.fd}"
    try:
        # Checked before it is opened: opening something else may have effects, or block.
        if os.readlink(path) != f"/memfd:clairai-{shared.token} (deleted)":
            raise UnsupportedError("other memory is at this place now; send it in the message")
        return os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError as error:
        raise UnsupportedError(
            f"the shared memory cannot be reached from here ({error.strerror}); "
            f"send it in the message"
        ) from error
