"""GPU memory that two processes share, through the CUDA driver's own functions. No torch.

cuda-bindings comes with every CUDA build of vLLM. A reader of a ring in host memory never needs it.
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


class Gpu:
    """One GPU, with the primary context that torch uses too; its calls raise RingError."""

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

    def call(self, name: str, *arguments: Any) -> Any:
        """Call a driver function; return its results without the status."""
        status, *results = getattr(self._driver, name)(*arguments)
        self._require(status, name)
        return results[0] if len(results) == 1 else results

    def _require(self, status: Any, name: str) -> None:
        if status != self._driver.CUresult.CUDA_SUCCESS:
            raise RingError(f"{name} failed on the GPU: {status.name}; see the engine's log")

    def enter(self) -> None:
        """Make this GPU current for the calling thread."""
        if self._context is None:
            # Not earlier: a context takes hundreds of MiB, also on GPUs that are only listed.
            self._context = self.call("cuDevicePrimaryCtxRetain", self._device)
        self.call("cuCtxSetCurrent", self._context)

    def stream(self, handle: int) -> Any:
        """The driver's handle of a torch stream."""
        return self._driver.CUstream(handle)

    def event(self) -> Any:
        self.enter()
        return self.call("cuEventCreate", self._driver.CUevent_flags.CU_EVENT_DISABLE_TIMING)

    def write(self, stream: int, address: int, value: int) -> None:
        """Store this word once all earlier work of a torch stream is done and visible."""
        # Flags 0: "the write is preceded by a system-wide memory fence" (cuStreamWriteValue64).
        (status,) = self._driver.cuStreamWriteValue64(self.stream(stream), address, value, 0)
        self._require(status, "cuStreamWriteValue64")

    def map_host(self, address: int, nbytes: int) -> int:
        """Map host memory for the GPU; return its device address."""
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
        """The size of the allocation at an address, according to the driver."""
        attribute = self._driver.CUpointer_attribute.CU_POINTER_ATTRIBUTE_RANGE_SIZE
        return int(self.call("cuPointerGetAttribute", attribute, address))


class DeviceBlock:
    """A whole GPU allocation: `create` a new one, or `attach` another process's by its handle."""

    home: Final = "device"
    fds: Final[tuple[int, ...]] = ()  # it is passed on as a handle

    def __init__(self, gpu: Gpu, address: int, nbytes: int, *, release: str | None) -> None:
        """`release` names the driver function that frees it; None if it is not ours."""
        self._gpu = gpu
        self.address, self.nbytes = address, nbytes
        self._cleanup = contextlib.ExitStack()
        if release is not None:
            self._cleanup.callback(gpu.call, release, address)
        self._is_open = True

    @classmethod
    def create(cls, nbytes: int, ordinal: int) -> Self:
        """Allocate outside torch's pool, so that the handle exposes nothing else."""
        gpu = Gpu(ordinal)
        gpu.enter()
        size = -(-nbytes // GRANULE_BYTES) * GRANULE_BYTES
        address = int(gpu.call("cuMemAlloc", size))
        return cls(gpu, address, nbytes, release="cuMemFree")

    @classmethod
    def attach(cls, handle: bytes, nbytes: int, uuid: str) -> Self:
        """Open another process's memory; refused if the driver says that it is smaller."""
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
        """The size according to the driver."""
        self._gpu.enter()
        return self._gpu.extent(self.address)

    @property
    def handle(self) -> bytes:
        """64 bytes by which another process on this machine can attach."""
        self._gpu.enter()
        handle = self._gpu.call("cuIpcGetMemHandle", self.address)
        return ctypes.string_at(handle.getPtr(), HANDLE_BYTES)

    def close(self) -> None:
        """Free it, or detach from another process's memory."""
        if not self._is_open:
            return
        self._is_open = False
        self._gpu.enter()
        self._cleanup.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __del__(self) -> None:
        if getattr(self, "_is_open", False):
            warnings.warn(f"{self!r} was dropped open", ResourceWarning, stacklevel=2)
