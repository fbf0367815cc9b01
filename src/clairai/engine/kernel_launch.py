"""Launches kernels that Triton compiled, through the CUDA driver, without releasing the GIL.

Runs in: the worker. Triton's launcher and cuda-bindings release Python's lock at every call. In an
engine's process another thread takes it then (the one that sends tokens out), and the step waits to
get it back. These calls keep it (ctypes.PyDLL): all they do is to put work in a queue.
"""

from __future__ import annotations

import ctypes
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from typing import Any, Final

from clairai.errors import RingError, UnsupportedError

CUDA_LIBRARY: Final = "libcuda.so.1"
POINTER_BYTES: Final = 8
WARP_THREADS: Final = 32
ARGUMENT_TYPES: Final[Mapping[str, Any]] = {"i32": ctypes.c_int32, "i64": ctypes.c_int64}
DRIVER_CALLS: Final[Mapping[str, tuple[Any, ...]]] = {
    "cuEventRecord": (ctypes.c_void_p, ctypes.c_void_p),
    "cuStreamWaitEvent": (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint),
    "cuFuncGetParamInfo": (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_void_p, ctypes.c_void_p),
    "cuLaunchKernel": (
        *(ctypes.c_void_p, *[ctypes.c_uint] * 7),
        *(ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p),
    ),
}


class CudaDriver:
    """The driver's functions, by their own names."""

    def __init__(self, library: Any = None) -> None:
        loaded = ctypes.PyDLL(CUDA_LIBRARY) if library is None else library
        for name, types in DRIVER_CALLS.items():
            function = getattr(loaded, name)
            function.argtypes, function.restype = types, ctypes.c_int
            setattr(self, name, function)

    cuEventRecord: Any
    cuStreamWaitEvent: Any
    cuFuncGetParamInfo: Any
    cuLaunchKernel: Any

    def record(self, event: int, stream: int) -> None:
        """The event happens when all that the stream was given is done; pairs with wait()."""
        status = self.cuEventRecord(event, stream)
        if status:
            raise _call_failed("cuEventRecord", status)

    def wait(self, stream: int, event: int) -> None:
        """What the stream is given from now on runs after the event; pairs with record()."""
        status = self.cuStreamWaitEvent(stream, event, 0)
        if status:
            raise _call_failed("cuStreamWaitEvent", status)


@dataclass(frozen=True, eq=False)
class KernelLaunch:
    """One launch of a kernel, laid out for the driver; it can run again and again."""

    function: int
    grid: tuple[int, int, int]
    threads: int
    shared: int
    parameters: Any  # addresses of the arguments
    held: tuple[Any, ...]  # the arguments

    def run(self, driver: CudaDriver, stream: int) -> None:
        block = (self.threads, 1, 1)
        status = driver.cuLaunchKernel(
            self.function, *self.grid, *block, self.shared, stream, self.parameters, None
        )
        if status:
            raise _call_failed("cuLaunchKernel", status)


class CompiledKernel:
    """A kernel and its arguments, laid out once; those in `cells` can be set before a launch."""

    def __init__(self, driver: CudaDriver, compiled: Any, given: Mapping[str, int]) -> None:
        """`compiled` is what `warmup` returned; `given` are its arguments by name, no constants."""
        load_kernel(compiled)
        self._driver, self._function = driver, int(compiled.function)
        metadata = compiled.metadata
        self._threads, self._shared = metadata.num_warps * WARP_THREADS, metadata.shared
        kinds = {name: kind for name, kind in compiled.src.signature.items() if name in given}
        self.cells = {
            name: _argument_type(kind)(given[name])
            for name, kind in kinds.items()
            if kind != "constexpr"
        }
        # Triton adds arguments of its own behind ours, for profiling and scratch: they are null.
        num_hidden = self._num_parameters() - len(self.cells)
        self._hidden = tuple(ctypes.c_uint64(0) for _ in range(num_hidden))

    def _num_parameters(self) -> int:
        """How many the driver says the kernel has; checks that ours have the same sizes."""
        sizes = [ctypes.sizeof(cell) for cell in self.cells.values()]
        offset, size, count = ctypes.c_size_t(), ctypes.c_size_t(), 0
        places = ctypes.addressof(offset), ctypes.addressof(size)
        while self._driver.cuFuncGetParamInfo(self._function, count, *places) == 0:
            expected = sizes[count] if count < len(sizes) else POINTER_BYTES
            if size.value != expected:
                raise _unknown_layout(
                    f"argument {count} has {size.value} bytes instead of {expected}"
                )
            count += 1
        if count < len(sizes):
            raise _unknown_layout(f"it has {count} arguments instead of at least {len(sizes)}")
        return count

    def launch(self, grid: tuple[int, int, int], **own: int) -> KernelLaunch:
        """It reads the cells when it runs, except for its `own` arguments, which are fixed here."""
        cells = {name: type(cell)(own[name]) if name in own else cell for name, cell in self._all()}
        addresses = [ctypes.addressof(cell) for cell in cells.values()]
        parameters = (ctypes.c_void_p * len(addresses))(*addresses)
        held = tuple(cells.values())
        return KernelLaunch(self._function, grid, self._threads, self._shared, parameters, held)

    def _all(self) -> list[tuple[str, Any]]:
        return [*self.cells.items(), *((str(at), cell) for at, cell in enumerate(self._hidden))]


def load_kernel(compiled: Any) -> None:
    """Have Triton load what `warmup` returned, and build its launcher, before the first launch.

    A launcher is C that Triton compiles when it is first needed (triton 3.8 compiler/compiler.py,
    `_init_handles`): 0.4 s in which the engine stands still. Its interpreter has nothing to load.
    """
    if compiled is not None:
        compiled[1, 1, 1]


def arguments_by_name(function: Any, given: Sequence[Any]) -> dict[str, int]:
    """The arguments of a Triton function by name; a tensor by its address."""
    named = zip(function.arg_names, given, strict=False)  # constants are not among them
    return {name: one.data_ptr() if hasattr(one, "data_ptr") else int(one) for name, one in named}


def _argument_type(kind: str) -> Any:
    return ctypes.c_uint64 if kind.startswith("*") else ARGUMENT_TYPES[kind]


def _call_failed(name: str, status: int) -> RingError:
    return RingError(f"{name} failed on the GPU: CUDA error {status}; see the engine's log")


def _unknown_layout(what: str) -> UnsupportedError:
    return UnsupportedError(
        f"Triton {version('triton')} lays out a kernel of clairai's in a way it does not know: "
        f"{what}; use the Triton that your vLLM release pins, or remove the clairai key"
    )
