"""A toy CUDA driver: its GPUs are memory of this process, and it records its calls.

It stands where `cuda.bindings.driver` stands, and answers as that does: a status, then the rest.
Device addresses are addresses of this process, so that a copy that misses its mark is seen.
"""

from __future__ import annotations

import ctypes
import enum
import sys
from collections.abc import Callable
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

UUIDS = (bytes(range(16)), bytes(range(16, 32)))
Answer = tuple[Any, ...]


class CUresult(enum.IntEnum):
    CUDA_SUCCESS = 0
    CUDA_ERROR_OUT_OF_MEMORY = 2
    CUDA_ERROR_INVALID_HANDLE = 400


OK = CUresult.CUDA_SUCCESS


class Handle:
    """64 unnamed bytes, as in cuda-bindings 13.4 and later."""

    def __init__(self, raw: bytes = bytes(64)) -> None:
        self._raw = ctypes.create_string_buffer(raw, 64)

    def getPtr(self) -> int:
        return ctypes.addressof(self._raw)

    @property
    def raw(self) -> bytes:
        return self._raw.raw


class ToyDriver(ModuleType):
    """Two GPUs; `asked` lists the calls in order."""

    CUresult = CUresult
    CUipcMemHandle = Handle
    CUstream = staticmethod("stream {}".format)
    CUevent_flags = SimpleNamespace(CU_EVENT_DISABLE_TIMING=2)
    CUpointer_attribute = SimpleNamespace(CU_POINTER_ATTRIBUTE_RANGE_SIZE="range size")
    CU_MEMHOSTREGISTER_PORTABLE, CU_MEMHOSTREGISTER_DEVICEMAP = 1, 2

    def __init__(self) -> None:
        super().__init__("cuda.bindings.driver")
        self.asked: list[str] = []
        self.failing: dict[str, CUresult] = {}
        self.held: dict[
            int, ctypes.Array[ctypes.c_char]
        ] = {}  # allocations that are not freed, by address
        self.opened: set[int] = set()
        self.copied: list[int] = []
        self.ordered: list[str] = []
        self.context: str | None = None

    def __getattribute__(self, name: str) -> Any:
        found = super().__getattribute__(name)
        return self._noted(name, found) if name.startswith("cu") else found

    def _noted(self, name: str, function: Callable[..., Answer]) -> Callable[..., Answer]:
        def call(*given: Any) -> Answer:
            self.asked.append(name)
            failure = self.failing.get(name)
            return function(*given) if failure is None else (failure,)

        return call

    def cuInit(self, _flags: int) -> Answer:
        return (OK,)

    def cuDeviceGetCount(self) -> Answer:
        return OK, len(UUIDS)

    def cuDeviceGet(self, ordinal: int) -> Answer:
        return OK, ordinal

    def cuDeviceGetUuid(self, device: int) -> Answer:
        return OK, SimpleNamespace(bytes=UUIDS[device])

    def cuDevicePrimaryCtxRetain(self, device: int) -> Answer:
        return OK, f"context of {device}"

    def cuCtxSetCurrent(self, context: str) -> Answer:
        self.context = context
        return (OK,)

    def cuMemAlloc(self, nbytes: int) -> Answer:
        return OK, self._take(nbytes)

    def cuMemAllocHost(self, nbytes: int) -> Answer:
        return OK, self._take(nbytes)

    def _take(self, nbytes: int) -> int:
        memory = ctypes.create_string_buffer(b"\xa5" * nbytes, nbytes)  # new memory is not zero
        self.held[ctypes.addressof(memory)] = memory
        return ctypes.addressof(memory)

    def cuMemFree(self, address: int) -> Answer:
        assert address not in self.opened  # CUDA leaves the result of that undefined
        del self.held[address]
        return (OK,)

    cuMemFreeHost = cuMemFree

    def cuMemsetD8(self, address: int, value: int, nbytes: int) -> Answer:
        ctypes.memset(address, value, nbytes)
        return (OK,)

    def cuMemcpyHtoD(self, to: int, raw: bytes, nbytes: int) -> Answer:
        ctypes.memmove(to, raw, nbytes)
        return (OK,)

    def cuMemcpyDtoHAsync(self, to: int, start: int, nbytes: int, _stream: str) -> Answer:
        self.copied.append(nbytes)
        ctypes.memmove(to, start, nbytes)
        return (OK,)

    def cuStreamCreate(self, flags: int) -> Answer:
        return OK, f"stream of kind {flags}"

    def cuStreamSynchronize(self, _stream: str) -> Answer:
        return (OK,)

    cuStreamDestroy = cuStreamSynchronize

    def cuEventCreate(self, flags: int) -> Answer:
        return OK, f"event of kind {flags}"

    def cuStreamWriteValue64(self, stream: str, address: int, value: int, flags: int) -> Answer:
        assert flags == 0  # with a barrier before the write
        self.ordered.append(f"{stream} writes {value}")
        ctypes.memmove(address, value.to_bytes(8, "little"), 8)
        return (OK,)

    def cuIpcGetMemHandle(self, address: int) -> Answer:
        return OK, Handle(address.to_bytes(8, "little"))

    def cuIpcOpenMemHandle(self, handle: Handle, _flags: int) -> Answer:
        address = int.from_bytes(handle.raw[:8], "little")
        if address not in self.held:
            return (CUresult.CUDA_ERROR_INVALID_HANDLE, None)
        self.opened.add(address)
        return OK, address

    def cuIpcCloseMemHandle(self, address: int) -> Answer:
        self.opened.remove(address)
        return (OK,)

    def cuPointerGetAttribute(self, _attribute: str, address: int) -> Answer:
        return OK, len(self.held[address])

    def cuMemHostRegister(self, address: int, nbytes: int, flags: int) -> Answer:
        assert flags == 3  # reachable from every context, and mapped
        self.held[address] = ctypes.create_string_buffer(nbytes)
        return (OK,)

    def cuMemHostGetDevicePointer(self, address: int, _flags: int) -> Answer:
        return OK, ctypes.addressof(self.held[address])

    cuMemHostUnregister = cuMemFree


def install(monkeypatch: pytest.MonkeyPatch) -> ToyDriver:
    """Use this driver until the test ends."""
    driver = ToyDriver()
    bindings = ModuleType("cuda.bindings")
    bindings.driver = driver  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "cuda", ModuleType("cuda"))
    monkeypatch.setitem(sys.modules, "cuda.bindings", bindings)
    monkeypatch.setitem(sys.modules, "cuda.bindings.driver", driver)
    return driver
