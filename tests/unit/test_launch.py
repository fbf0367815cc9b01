"""A launch gives the driver each argument as the kernel has it; the library here only looks."""

from __future__ import annotations

import ctypes
from types import SimpleNamespace
from typing import Any

import pytest

from clairai.errors import RingError, UnsupportedError
from clairai.tap.launch import Driver, Kernel, by_name

SIGNATURE = {"ring_ptr": "*i64", "SLOTS": "i32", "one": "constexpr", "wide": "i64", "T": "i32"}


class Function:
    """One function of a library; what it was called with last."""

    def __init__(self, act: Any) -> None:
        self.argtypes: Any = None
        self.restype: Any = None
        self._act = act

    def __call__(self, *given: Any) -> int:
        assert len(given) == len(self.argtypes)
        return int(self._act(*given))


class Library:
    """Knows a kernel whose parameters have these sizes, and reads what it is launched with."""

    def __init__(self, sizes: list[int], status: int = 0) -> None:
        self.sizes, self.status = sizes, status
        self.launched: list[tuple[Any, ...]] = []
        self.queued: list[tuple[Any, ...]] = []
        self.cuEventRecord = Function(lambda *given: self._queue("record", *given))
        self.cuStreamWaitEvent = Function(lambda *given: self._queue("wait", *given))
        self.cuFuncGetParamInfo = Function(self._size)
        self.cuLaunchKernel = Function(self._launch)

    def _queue(self, *given: Any) -> int:
        self.queued.append(given)
        return self.status

    def _size(self, _function: int, index: int, _offset: int, size: int) -> int:
        if index >= len(self.sizes):
            return 1
        ctypes.c_size_t.from_address(size).value = self.sizes[index]
        return 0

    def _launch(self, function: int, *given: Any) -> int:
        *shape, parameters, extra = given
        values = [
            int.from_bytes(ctypes.string_at(at, size), "little")
            for at, size in zip(parameters, self.sizes, strict=True)
        ]
        self.launched.append((function, tuple(shape), values))
        assert extra is None
        return self.status


class Compiled:
    """What Triton's warmup gives, as far as a launch looks at it."""

    function: int | None = None
    metadata = SimpleNamespace(num_warps=4, shared=96)
    src = SimpleNamespace(signature=SIGNATURE)

    def __getitem__(self, grid: tuple[int, int, int]) -> None:
        self.function = 77


GIVEN = {"ring_ptr": 1 << 40, "SLOTS": 5, "one": 1, "wide": 1 << 35, "T": 9}


def kernel(library: Library) -> Kernel:
    return Kernel(Driver(library), Compiled(), GIVEN)


@pytest.mark.parametrize("num_hidden", [0, 1, 2])
def test_arguments_come_in_order_without_constants_and_what_triton_adds_is_null(
    num_hidden: int,
) -> None:
    library = Library([8, 4, 8, 4] + [8] * num_hidden)
    launch = kernel(library)
    launch((3, 2, 1), 55)
    launch.cells["T"].value = 11
    launch((1, 1, 1), 56)
    first, second = library.launched
    assert first == (77, (3, 2, 1, 128, 1, 1, 96, 55), [1 << 40, 5, 1 << 35, 9] + [0] * num_hidden)
    assert second[1:] == (
        (1, 1, 1, 128, 1, 1, 96, 56),
        [1 << 40, 5, 1 << 35, 11] + [0] * num_hidden,
    )


@pytest.mark.parametrize("sizes", [[8, 8, 8, 4], [8, 4, 8], [8, 4, 8, 4, 4]])
def test_a_kernel_laid_out_in_another_way_is_refused(sizes: list[int]) -> None:
    with pytest.raises(UnsupportedError, match="use the Triton that your vLLM release pins"):
        kernel(Library(sizes))


def test_what_the_driver_refuses_is_an_error() -> None:
    library = Library([8, 4, 8, 4], status=700)
    driver = Driver(library)
    with pytest.raises(RingError, match="cuLaunchKernel failed on the GPU: CUDA error 700"):
        kernel(library)((1, 1, 1), 0)
    with pytest.raises(RingError, match="cuEventRecord"):
        driver.record(1, 2)
    with pytest.raises(RingError, match="cuStreamWaitEvent"):
        driver.wait(2, 1)


def test_events_name_the_stream_they_are_of() -> None:
    library = Library([])
    driver = Driver(library)
    driver.record(7, 100)
    driver.wait(200, 7)
    assert library.queued == [("record", 7, 100), ("wait", 200, 7, 0)]


def test_arguments_are_named_in_the_order_of_the_function() -> None:
    function = SimpleNamespace(arg_names=["a", "b", "CONSTANT"])
    tensor = SimpleNamespace(data_ptr=lambda: 4096)
    assert by_name(function, (tensor, 3)) == {"a": 4096, "b": 3}
