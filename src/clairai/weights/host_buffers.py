"""The buffers of a transfer in host memory: as the sender fills them, as the engine receives them.

A large buffer is a memfd that is sealed once it is full, so that not even its sender can change it;
the engine maps it. A small one (a bank) is a `SharedBuffer` that the sender uses again; the engine
makes its own copy, because touching fresh pages costs more than copying.
"""

from __future__ import annotations

import fcntl
import mmap
import os
from collections.abc import Sequence
from typing import Final, Protocol, Self

from clairai.errors import WeightsError, WeightsRoomError
from clairai.local.shared_buffer import (
    SIZE_SEALS,
    BufferCopier,
    ByteArray,
    create_memfd,
    require_memfd,
)
from clairai.weights.checksum import checksum, copy_and_checksum
from clairai.weights.manifest import PlannedTensor
from clairai.wire.weights_messages import MAX_SHARED_BYTES

SEALS: Final = SIZE_SEALS | fcntl.F_SEAL_WRITE
MAX_COPIED_BYTES: Final = MAX_SHARED_BYTES  # a larger buffer is mapped


class HostBuffer:
    """The sender's sealed buffer: fill `view`, `seal` it, then pass on `fd`."""

    def __init__(self, nbytes: int) -> None:
        self.nbytes = nbytes
        self.fd = -1
        try:
            self.fd = create_memfd("weights", nbytes)
            self._mapping: mmap.mmap | None = mmap.mmap(self.fd, nbytes, mmap.MAP_SHARED)
        except OSError as error:
            self.close()
            raise WeightsRoomError(
                f"no {nbytes} bytes of shared memory: {error.strerror}; free some, or send to an "
                f"engine with more"
            ) from error

    @property
    def view(self) -> memoryview:
        assert self._mapping is not None, "sealed"
        return memoryview(self._mapping)

    @property
    def fds(self) -> tuple[int, ...]:
        return (self.fd,)

    def seal(self) -> None:
        """Make it read-only for everybody; no view may be held any more."""
        assert self._mapping is not None
        self._mapping.close()
        self._mapping = None
        fcntl.fcntl(self.fd, fcntl.F_ADD_SEALS, SEALS)

    def close(self) -> None:
        if self.fd < 0:
            return
        os.close(self.fd)
        self.fd = -1
        self._mapping = None  # a view that is still held keeps the pages

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class ReceivedBuffer(Protocol):
    """A buffer that has arrived at the engine."""

    @property
    def extent(self) -> int:
        """Its size according to the kernel or the driver."""

    def checksums(self, tensors: Sequence[PlannedTensor]) -> list[str]:
        """The checksum of each of these tensors, computed from the bytes received."""

    def close(self) -> None: ...


class ReceivedHostBuffer:
    """A sealed buffer, mapped by the engine."""

    def __init__(self, fd: int, nbytes: int) -> None:
        """Closes the descriptor, also if it is refused."""
        try:
            require_memfd(fd, nbytes, seals=SEALS, error=WeightsError)
            # Private, because torch wants writable memory and a sealed file has none to share.
            self._mapping: mmap.mmap | None = mmap.mmap(fd, nbytes, mmap.MAP_PRIVATE)
        except (OSError, ValueError) as error:
            raise WeightsError(f"the buffer cannot be mapped ({error}); send it again") from error
        finally:
            os.close(fd)
        self.extent = nbytes

    @property
    def view(self) -> memoryview:
        assert self._mapping is not None, "closed"
        return memoryview(self._mapping)

    def checksums(self, tensors: Sequence[PlannedTensor]) -> list[str]:
        view = self.view
        return [checksum(view[each.offset : each.offset + each.nbytes]) for each in tensors]

    def close(self) -> None:
        """Unmap; a tensor that is still held keeps the pages."""
        self._mapping = None


class CopiedBuffer:
    """The engine's copy of a small buffer, as it was at one moment."""

    def __init__(
        self, copier: BufferCopier, fd: int, nbytes: int, tensors: Sequence[PlannedTensor]
    ) -> None:
        """Copies the `tensors` and nothing else; closes the descriptor, also if it is refused."""

        def copy(target_N: ByteArray, source_N: ByteArray) -> dict[str, str]:
            spans = {each.name: slice(each.offset, each.offset + each.nbytes) for each in tensors}
            return {
                name: copy_and_checksum(target_N[span].data, source_N[span].data)
                for name, span in spans.items()
            }

        used = max(each.offset + each.nbytes for each in tensors)
        try:
            require_memfd(fd, nbytes, seals=fcntl.F_SEAL_SHRINK, error=WeightsError, is_exact=False)
            self.bytes_N, self._checksums = copier.copy_with(copy, fd, used)
        except OSError as error:
            raise WeightsError(f"the buffer cannot be read ({error}); send it again") from error
        finally:
            os.close(fd)
        self.extent = nbytes

    def checksums(self, tensors: Sequence[PlannedTensor]) -> list[str]:
        """Computed while the bytes were copied."""
        return [self._checksums[each.name] for each in tensors]

    def close(self) -> None:
        """Free the copy; a tensor that is still held keeps it."""
        self.bytes_N = self.bytes_N[:0].copy()
