"""Takes a size or a received file descriptor; gives memory that one process writes and others read.

The host home is a sealed memfd: the engine keeps the only writable mapping there will ever be.
A home in device memory can stand beside it: a reader asks for nothing more than `RingMemory`.
"""

from __future__ import annotations

import fcntl
import mmap
import os
import platform
import warnings
from typing import Final, Protocol, Self

from clairai.errors import HandshakeError, RingError
from clairai.local.shared_buffer import free_memory_bytes
from clairai.ring.layout import WORD_BYTES

F_SEAL_FUTURE_WRITE: Final = 0x10  # linux/fcntl.h; Python's fcntl does not name it yet
SEALS: Final = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | F_SEAL_FUTURE_WRITE | fcntl.F_SEAL_SEAL


class RingMemory(Protocol):
    """What a reader needs of the memory of a ring, wherever it lies."""

    @property
    def nbytes(self) -> int: ...

    def load(self, offset: int) -> int:
        """One aligned u64, read whole."""

    def copy(self, offset: int, nbytes: int) -> bytes:
        """Own bytes; every load has completed on return."""

    def close(self) -> None: ...

    def __enter__(self) -> Self: ...

    def __exit__(self, *_: object) -> None: ...


class HostMemory:
    """Shared host memory; `create` it writable in the engine, `attach` it read-only elsewhere."""

    home: Final = "host"
    handle: Final = b""  # it travels as a descriptor
    uuid: Final = ""
    address: Final = 0

    def __init__(self, mapping: mmap.mmap, fd: int | None) -> None:
        self._mapping: mmap.mmap | None = mapping
        self._words = memoryview(mapping).cast("Q")
        self._fd = fd

    @classmethod
    def create(cls, nbytes: int) -> HostMemory:
        """New zeroed memory whose size and readers' rights are fixed for good."""
        if nbytes > (free := free_memory_bytes()):
            raise RingError(f"ring of {nbytes} bytes, {free} are free here; lower its size")
        fd = os.memfd_create("clairai-ring", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            # Allocates now: a machine without the memory refuses here, not with SIGBUS in a step.
            os.posix_fallocate(fd, 0, nbytes)
            mapping = mmap.mmap(fd, nbytes, mmap.MAP_SHARED | mmap.MAP_POPULATE)
            fcntl.fcntl(fd, fcntl.F_ADD_SEALS, SEALS)
        except OSError as error:
            os.close(fd)
            raise RingError(f"no {nbytes} bytes for the ring ({error}); lower its size") from error
        return cls(mapping, fd)

    @classmethod
    def attach(cls, fd: int, nbytes: int) -> HostMemory:
        """Map a received descriptor read-only; takes it over, also when it refuses it."""
        try:
            require_total_store_order()
            _require_sealed(fd, nbytes)
            mapping = mmap.mmap(fd, nbytes, mmap.MAP_SHARED, mmap.PROT_READ)
        except (OSError, ValueError) as error:
            raise HandshakeError(f"ring cannot be mapped ({error}); restart the engine") from error
        finally:
            os.close(fd)  # the mapping holds a descriptor of its own
        return cls(mapping, None)

    @property
    def buffer(self) -> memoryview:
        """The bytes in place: writable where created, read-only where attached."""
        return memoryview(self._open_mapping())

    @property
    def fd(self) -> int:
        """The descriptor to pass to readers; only the creator has it."""
        if self._fd is None:
            raise RingError("memory is closed or attached; only its open creator may pass it on")
        return self._fd

    @property
    def fds(self) -> tuple[int, ...]:
        """What travels with the first message to a reader."""
        return (self.fd,)

    @property
    def nbytes(self) -> int:
        return len(self._open_mapping())

    def load(self, offset: int) -> int:
        self._open_mapping()
        # CPython moves an aligned native word with one instruction; tests/process holds it to that.
        return self._words[offset // WORD_BYTES]

    def copy(self, offset: int, nbytes: int) -> bytes:
        return self._open_mapping()[offset : offset + nbytes]

    def close(self) -> None:
        """Let go; a view that somebody still holds keeps the pages and never dangles."""
        if self._mapping is None:
            return
        self._words.release()
        self._mapping = None
        if self._fd is not None:
            os.close(self._fd)
            self._fd = None

    def _open_mapping(self) -> mmap.mmap:
        if self._mapping is None:
            raise RingError("memory of the ring is closed; attach again")
        return self._mapping

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __del__(self) -> None:
        if getattr(self, "_mapping", None) is not None:
            warnings.warn(f"{self!r} was dropped open", ResourceWarning, stacklevel=2)
            self.close()


def require_total_store_order() -> None:
    """Refuse a CPU on which plain stores from Python may be seen out of order."""
    if platform.machine() not in ("x86_64", "AMD64"):
        raise RingError(
            f"CPU is {platform.machine()}, the host ring needs x86-64: elsewhere a reader may see "
            "the head move before the record, as Python has no release store; use an x86-64 host"
        )


def _require_sealed(fd: int, nbytes: int) -> None:
    size = os.fstat(fd).st_size
    if size != nbytes:
        raise HandshakeError(f"ring has {size} bytes, peer claims {nbytes}; do not trust this peer")
    try:
        seals = fcntl.fcntl(fd, fcntl.F_GET_SEALS)
    except OSError as error:
        raise HandshakeError(f"ring is not a memfd ({error}); do not trust this peer") from error
    if seals & SEALS != SEALS:
        raise HandshakeError(
            f"ring has seals {seals:#x}, needs {SEALS:#x}; its owner could resize it under us"
        )
