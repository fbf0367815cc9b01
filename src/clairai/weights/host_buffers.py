"""Takes sizes, descriptors and handles; gives buffers that the sender fills and the engine reads.

In host memory a buffer is a memfd, sealed once it is full: not even its sender can change it after.
In GPU memory it is the driver's own allocation, never a piece of torch's pool.
"""

from __future__ import annotations

import fcntl
import mmap
import os
from collections.abc import Sequence
from functools import partial
from typing import Final, Protocol, Self

from clairai.errors import WeightsError
from clairai.local.shared_buffer import BufferCopier, ByteArray, free_memory_bytes, require_memfd
from clairai.weights.checksum import checksum, copy_and_checksum
from clairai.weights.manifest import PlannedTensor
from clairai.wire.weights_messages import MAX_SHARED_BYTES

SEALS: Final = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_WRITE | fcntl.F_SEAL_SEAL


class ReceivedBuffer(Protocol):
    """A buffer that has come to the engine."""

    @property
    def extent(self) -> int:
        """Bytes behind it, as the kernel or the driver says."""

    def checksums(self, tensors: Sequence[PlannedTensor]) -> list[str]:
        """Of each of these tensors in it, as this side reads it."""

    def close(self) -> None: ...


class HostBuffer:
    """The sender's: fill `view`, then `seal` it and pass `fd` on."""

    home: Final = "host"
    handle: Final = b""

    def __init__(self, nbytes: int) -> None:
        self.nbytes = nbytes
        if nbytes > (free := free_memory_bytes()):
            raise WeightsError(
                f"no {nbytes} bytes of shared memory: {free} are free; free some, or send to an "
                f"engine with more"
            )
        self.fd = os.memfd_create("clairai-weights", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            os.posix_fallocate(self.fd, 0, nbytes)  # all of it now, or none
            self._mapping: mmap.mmap | None = mmap.mmap(self.fd, nbytes, mmap.MAP_SHARED)
        except OSError as error:
            os.close(self.fd)
            raise WeightsError(
                f"no {nbytes} bytes of shared memory ({error.strerror}); free some"
            ) from error

    @property
    def view(self) -> memoryview:
        assert self._mapping is not None, "sealed"
        return memoryview(self._mapping)

    @property
    def fds(self) -> tuple[int, ...]:
        return (self.fd,)

    def seal(self) -> None:
        """No view may be held any more: from now on nobody writes here."""
        assert self._mapping is not None
        self._mapping.close()
        self._mapping = None
        fcntl.fcntl(self.fd, fcntl.F_ADD_SEALS, SEALS)

    def close(self) -> None:
        if self.fd < 0:
            return
        os.close(self.fd)
        self.fd = -1
        self._mapping = None  # a view that somebody still holds keeps the pages

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class ReceivedHostBuffer:
    """The engine's: the pages of a sealed memfd."""

    def __init__(self, fd: int, nbytes: int) -> None:
        """Takes the descriptor over, also when it refuses it."""
        try:
            _require_sealed(fd, nbytes)
            # Private: torch wants memory it could write, and a sealed file has no such shared one.
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
        """A tensor that somebody still holds keeps the pages and never dangles."""
        self._mapping = None


def _require_sealed(fd: int, nbytes: int) -> None:
    size = os.fstat(fd).st_size
    if size != nbytes:
        raise WeightsError(f"the buffer has {size} bytes, {nbytes} were planned; plan again")
    try:
        seals = fcntl.fcntl(fd, fcntl.F_GET_SEALS)
    except OSError:
        raise WeightsError("the buffer is not a memfd; use the Sender") from None
    if seals & SEALS != SEALS:
        raise WeightsError(
            f"the buffer has seals {seals:#x}, needs {SEALS:#x}: it could change while it is read"
        )


# MERGED
# Takes the descriptor of what is small, such as a bank; gives the engine's own copy of it.
#
# A page that nobody has touched costs more than copying into it: the sender fills the same memfd
# again and again (local/shared_buffer.py), and the engine copies it to memory that it used before
# (local/shared_buffer.py).


MAX_COPIED_BYTES: Final = MAX_SHARED_BYTES  # at most; more is mapped


class CopiedBuffer:
    """The engine's: its own copy of what a sender's memfd held at one moment."""

    def __init__(
        self, borrower: BufferCopier, fd: int, nbytes: int, tensors: Sequence[PlannedTensor]
    ) -> None:
        """Takes the descriptor over, also when it refuses it; nothing but `tensors` is copied."""
        used = max(each.offset + each.nbytes for each in tensors)
        try:
            require_memfd(fd, nbytes)
            self.bytes_N, self._sums = borrower.copied(fd, used, partial(_copy_tensors, tensors))
        except OSError as error:
            raise WeightsError(f"the buffer cannot be read ({error}); send it again") from error
        finally:
            os.close(fd)
        self.extent = nbytes

    def checksums(self, tensors: Sequence[PlannedTensor]) -> list[str]:
        """Of the copies, taken while they were made."""
        return [self._sums[each.name] for each in tensors]

    def close(self) -> None:
        """Who still holds a tensor of it keeps it."""
        self.bytes_N = self.bytes_N[:0].copy()


def _copy_tensors(
    tensors: Sequence[PlannedTensor], target_N: ByteArray, source_N: ByteArray
) -> dict[str, str]:
    return {
        each.name: copy_and_checksum(
            _tensor_span(target_N, each).data, _tensor_span(source_N, each).data
        )
        for each in tensors
    }


def _tensor_span(bytes_N: ByteArray, tensor: PlannedTensor) -> ByteArray:
    return bytes_N[tensor.offset : tensor.offset + tensor.nbytes]
