"""The memory of a ring: written by the engine, read by every reader, in host or GPU memory.

In host memory it is a sealed memfd, whose only writable mapping is the engine's own.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import mmap
import os
import warnings
from typing import Final, Protocol, Self

from clairai.errors import HandshakeError, RingError
from clairai.local.gpu_memory import DeviceBlock, Gpu
from clairai.local.shared_buffer import SIZE_SEALS, create_memfd, require_memfd
from clairai.local.shared_words import open_words
from clairai.ring.layout import WORD_BYTES

F_SEAL_FUTURE_WRITE: Final = 0x10  # linux/fcntl.h; Python's fcntl does not name it yet
SEALS: Final = SIZE_SEALS | F_SEAL_FUTURE_WRITE
STAGING_BYTES: Final = 1 << 20


class RingMemory(Protocol):
    """What a reader needs of a ring's memory, wherever that is."""

    @property
    def nbytes(self) -> int: ...

    def load(self, offset: int) -> int:
        """Read one aligned u64, whole: after all earlier copies, and before all later ones."""

    def copy(self, offset: int, nbytes: int) -> bytes:
        """Return a private copy."""

    def close(self) -> None: ...

    def __enter__(self) -> Self: ...

    def __exit__(self, *_: object) -> None: ...


class HostMemory:
    """Shared host memory; `create` it writable in the engine, `attach` it read-only elsewhere."""

    home: Final = "host"
    handle: Final = b""  # it is passed on as a descriptor
    uuid: Final = ""
    address: Final = 0

    def __init__(self, mapping: mmap.mmap, fd: int | None) -> None:
        self._words = open_words(mapping)
        self._mapping: mmap.mmap | None = mapping
        self._fd = fd

    @classmethod
    def create(cls, nbytes: int) -> HostMemory:
        """Create zeroed memory whose size and readers' rights never change."""
        with contextlib.ExitStack() as undo:
            try:
                fd = create_memfd("ring", nbytes)
                undo.callback(os.close, fd)
                mapping = mmap.mmap(fd, nbytes, mmap.MAP_SHARED | mmap.MAP_POPULATE)
                fcntl.fcntl(fd, fcntl.F_ADD_SEALS, SEALS)
            except OSError as error:
                raise RingError(
                    f"no {nbytes} bytes for the ring: {error.strerror}; lower its size"
                ) from error
            memory = cls(mapping, fd)
            undo.pop_all()
        return memory

    @classmethod
    def attach(cls, fd: int, nbytes: int) -> HostMemory:
        """Map a received descriptor read-only, and close it even if it is refused."""
        try:
            require_memfd(fd, nbytes, seals=SEALS, error=HandshakeError)
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
        """What goes with the first message to a reader."""
        return (self.fd,)

    @property
    def nbytes(self) -> int:
        return len(self._open_mapping())

    def load(self, offset: int) -> int:
        self._open_mapping()
        # CPython moves an aligned native word with one instruction; tests/process checks that.
        # Pairs with _advance_head() in writer.py and the head's store in publish_kernel.py.
        return self._words[offset // WORD_BYTES]

    def copy(self, offset: int, nbytes: int) -> bytes:
        return self._open_mapping()[offset : offset + nbytes]

    def close(self) -> None:
        """Unmap; a view that is still held keeps the pages."""
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


class DeviceMemory(DeviceBlock):
    """A ring in GPU memory that the host reads and writes; a new one is zeroed."""

    def __init__(self, gpu: Gpu, address: int, nbytes: int, *, release: str | None) -> None:
        """Frees everything again if any part of it fails."""
        super().__init__(gpu, address, nbytes, release=release)
        with contextlib.ExitStack() as undo:
            undo.callback(self.close)
            self._staging = int(gpu.call("cuMemAllocHost", STAGING_BYTES))
            self._cleanup.callback(gpu.call, "cuMemFreeHost", self._staging)
            # Non-blocking: a reader's copies never queue behind a forward pass.
            self._stream = gpu.call("cuStreamCreate", 1)  # CU_STREAM_NON_BLOCKING
            self._cleanup.callback(gpu.call, "cuStreamDestroy", self._stream)
            undo.pop_all()

    @classmethod
    def create(cls, nbytes: int, ordinal: int) -> Self:
        with contextlib.ExitStack() as undo:
            memory = super().create(nbytes, ordinal)
            undo.callback(memory.close)
            memory._gpu.call("cuMemsetD8", memory.address, 0, memory.extent)
            undo.pop_all()
        return memory

    @classmethod
    def at_address(cls, address: int, nbytes: int, uuid: str) -> DeviceMemory:
        """Use memory of this process: CUDA IPC cannot open a handle in the process that made it."""
        gpu = Gpu.by_uuid(uuid)
        gpu.enter()
        return cls(gpu, address, nbytes, release=None)

    def load(self, offset: int) -> int:
        return int.from_bytes(self.copy(offset, 8), "little")

    def copy(self, offset: int, nbytes: int) -> bytes:
        """Return a private copy, complete on return."""
        if not 0 <= offset <= offset + nbytes <= self.nbytes:
            raise RingError(f"bytes {offset} to {offset + nbytes} of {self.nbytes}: please report")
        self._gpu.enter()
        parts = range(offset, offset + nbytes, STAGING_BYTES)
        return b"".join(self._copy(at, min(STAGING_BYTES, offset + nbytes - at)) for at in parts)

    def _copy(self, offset: int, nbytes: int) -> bytes:
        self._gpu.call(
            "cuMemcpyDtoHAsync", self._staging, self.address + offset, nbytes, self._stream
        )
        self._gpu.call("cuStreamSynchronize", self._stream)
        return ctypes.string_at(self._staging, nbytes)

    def write(self, offset: int, raw: bytes) -> None:
        """For the engine, before any reader attaches."""
        self._gpu.enter()
        self._gpu.call("cuMemcpyHtoD", self.address + offset, raw, len(raw))
