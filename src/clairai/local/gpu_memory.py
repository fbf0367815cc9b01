"""Takes sizes, addresses and 64-byte handles; gives CUDA memory that two processes share. No torch.

The driver's own functions through cuda-bindings, which every CUDA build of vLLM brings along. A
reader of a ring in host memory needs none of this.
"""

from __future__ import annotations

import contextlib
import ctypes
import warnings
from typing import Any, Final, Self

from clairai.errors import HandshakeError, RingError

# Smaller allocations share a block, and a handle opens the whole block (CUDA programming guide).
GRANULE_BYTES: Final = 2 << 20
HANDLE_BYTES: Final = 64
STAGING_BYTES: Final = 1 << 20


class Gpu:
    """One GPU, with the context that torch uses too; its calls raise RingError."""

    def __init__(self, ordinal: int) -> None:
        try:
            from cuda.bindings import driver
        except ImportError:
            raise RingError(
                "a ring in GPU memory needs the package cuda-bindings; install it, or use the "
                'ring in host memory ("ring_home": "host")'
            ) from None
        self._driver = driver
        self._context: Any = None
        self.call("cuInit", 0)
        self._device = self.call("cuDeviceGet", ordinal)
        self.uuid = bytes(self.call("cuDeviceGetUuid", self._device).bytes).hex()

    @classmethod
    def by_uuid(cls, uuid: str) -> Gpu:
        """The GPU of this machine with this UUID."""
        first = cls(0)
        for ordinal in range(first.call("cuDeviceGetCount")):
            gpu = cls(ordinal)
            if gpu.uuid == uuid:
                return gpu
        raise HandshakeError(
            f"the engine's ring is on GPU {uuid}, which this process does not see; run the reader "
            f"on the same machine, with the same CUDA_VISIBLE_DEVICES"
        )

    def call(self, name: str, *given: Any) -> Any:
        """One function of the driver; what it returns beside its status."""
        status, *found = getattr(self._driver, name)(*given)
        self._require(status, name)
        return found[0] if len(found) == 1 else found

    def _require(self, status: Any, name: str) -> None:
        if status != self._driver.CUresult.CUDA_SUCCESS:
            raise RingError(f"{name} failed on the GPU: {status.name}; see the engine's log")

    def enter(self) -> None:
        """Make this thread's calls go to this GPU."""
        if self._context is None:
            # Not before: a context takes hundreds of MiB, also on GPUs that are only looked at.
            self._context = self.call("cuDevicePrimaryCtxRetain", self._device)
        self.call("cuCtxSetCurrent", self._context)

    def stream(self, handle: int) -> Any:
        """The driver's name for a stream of torch's."""
        return self._driver.CUstream(handle)

    def event(self) -> Any:
        self.enter()
        return self.call("cuEventCreate", self._driver.CUevent_flags.CU_EVENT_DISABLE_TIMING)

    def write(self, stream: int, address: int, value: int) -> None:
        """Of torch's stream: store this word when all it was given before is done and seen."""
        # Flags 0: "the write is preceded by a system-wide memory fence" (cuStreamWriteValue64).
        (status,) = self._driver.cuStreamWriteValue64(self.stream(stream), address, value, 0)
        self._require(status, "cuStreamWriteValue64")

    def map_host(self, address: int, nbytes: int) -> int:
        """Let the GPU reach host memory of ours; the address it has there."""
        self.enter()
        flags = self._driver.CU_MEMHOSTREGISTER_DEVICEMAP | self._driver.CU_MEMHOSTREGISTER_PORTABLE
        self.call("cuMemHostRegister", address, nbytes, flags)
        return int(self.call("cuMemHostGetDevicePointer", address, 0))

    def unmap_host(self, address: int) -> None:
        self.enter()
        self.call("cuMemHostUnregister", address)

    def ipc_handle(self, raw: bytes) -> Any:
        handle = self._driver.CUipcMemHandle()
        # In place: from cuda-bindings 13.4 on the field `reserved` has no name in Python.
        ctypes.memmove(handle.getPtr(), raw, HANDLE_BYTES)
        return handle

    def extent(self, address: int) -> int:
        """How many bytes the driver itself says lie behind an address."""
        attribute = self._driver.CUpointer_attribute.CU_POINTER_ATTRIBUTE_RANGE_SIZE
        return int(self.call("cuPointerGetAttribute", attribute, address))


class DeviceBlock:
    """An allocation of a GPU, whole: `create` it here, `attach` another process's by its handle."""

    home: Final = "device"
    fds: Final[tuple[int, ...]] = ()  # it travels as a handle

    def __init__(self, gpu: Gpu, address: int, nbytes: int, *, release: str | None) -> None:
        """`release` is the driver's function that lets go of it; None: it is somebody else's."""
        self._gpu = gpu
        self.address, self.nbytes = address, nbytes
        self._undo = contextlib.ExitStack()
        if release is not None:
            self._undo.callback(gpu.call, release, address)
        self._is_open = True

    @classmethod
    def create(cls, nbytes: int, ordinal: int) -> Self:
        """New memory outside torch's pool, so that its handle shows nothing else."""
        gpu = Gpu(ordinal)
        gpu.enter()
        held = -(-nbytes // GRANULE_BYTES) * GRANULE_BYTES
        address = int(gpu.call("cuMemAlloc", held))
        return cls(gpu, address, nbytes, release="cuMemFree")

    @classmethod
    def attach(cls, handle: bytes, nbytes: int, uuid: str) -> Self:
        """Open another process's memory; refused unless the driver too finds it large enough."""
        if len(handle) != HANDLE_BYTES:
            raise HandshakeError(
                f"the handle has {len(handle)} bytes, a CUDA IPC handle {HANDLE_BYTES}; "
                f"do not trust this peer"
            )
        gpu = Gpu.by_uuid(uuid)
        gpu.enter()
        address = int(gpu.call("cuIpcOpenMemHandle", gpu.ipc_handle(handle), 1))
        with contextlib.ExitStack() as undo:
            memory = cls(gpu, address, nbytes, release="cuIpcCloseMemHandle")
            undo.callback(memory.close)
            if memory.extent < nbytes:
                raise HandshakeError(
                    f"memory has {memory.extent} bytes, peer claims {nbytes}; do not trust it"
                )
            undo.pop_all()
        return memory

    @property
    def uuid(self) -> str:
        return self._gpu.uuid

    @property
    def extent(self) -> int:
        """How many bytes the driver says there are."""
        self._gpu.enter()
        return self._gpu.extent(self.address)

    @property
    def handle(self) -> bytes:
        """64 bytes by which another process of this machine can attach."""
        self._gpu.enter()
        handle = self._gpu.call("cuIpcGetMemHandle", self.address)
        return ctypes.string_at(handle.getPtr(), HANDLE_BYTES)

    def close(self) -> None:
        """Let go; the engine's own close frees it."""
        if not self._is_open:
            return
        self._is_open = False
        self._gpu.enter()
        self._undo.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __del__(self) -> None:
        if getattr(self, "_is_open", False):
            warnings.warn(f"{self!r} was dropped open", ResourceWarning, stacklevel=2)


class DeviceMemory(DeviceBlock):
    """A block that the host reads and writes; the engine's is zero when it is new."""

    def __init__(self, gpu: Gpu, address: int, nbytes: int, *, release: str | None) -> None:
        """What cannot be opened whole is let go of here."""
        super().__init__(gpu, address, nbytes, release=release)
        with contextlib.ExitStack() as undo:
            undo.callback(self.close)
            self._staging = int(gpu.call("cuMemAllocHost", STAGING_BYTES))
            self._undo.callback(gpu.call, "cuMemFreeHost", self._staging)
            # A stream that waits for no other: a reader's copies never queue behind a forward.
            self._stream = gpu.call("cuStreamCreate", 1)  # CU_STREAM_NON_BLOCKING
            self._undo.callback(gpu.call, "cuStreamDestroy", self._stream)
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
    def borrow(cls, address: int, nbytes: int, uuid: str) -> DeviceMemory:
        """Memory of this very process: CUDA IPC refuses to open a handle where it was made."""
        gpu = Gpu.by_uuid(uuid)
        gpu.enter()
        return cls(gpu, address, nbytes, release=None)

    def load(self, offset: int) -> int:
        return int.from_bytes(self.copy(offset, 8), "little")

    def copy(self, offset: int, nbytes: int) -> bytes:
        """Own bytes; the copy has completed on return."""
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
        """For the engine, before any reader is there."""
        self._gpu.enter()
        self._gpu.call("cuMemcpyHtoD", self.address + offset, raw, len(raw))
