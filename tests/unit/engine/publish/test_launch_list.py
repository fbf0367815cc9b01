"""A launch passes each argument to the driver as the kernel expects it."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from clairai.engine.kernel_launch import DRIVER_CALLS, CompiledKernel, CudaDriver, arguments_by_name
from clairai.engine.publish.launch_list import LaunchList, LaunchStreams, StepLauncher
from clairai.engine.publish.step_extension import load_step_extension
from clairai.engine.publish.step_header import StepHeaders
from clairai.errors import RingError, UnsupportedError

SIGNATURE = {"ring_ptr": "*i64", "SLOTS": "i32", "one": "constexpr", "wide": "i64", "T": "i32"}


RECORD = ctypes.CFUNCTYPE(ctypes.c_int, *DRIVER_CALLS["cuEventRecord"])
WAIT = ctypes.CFUNCTYPE(ctypes.c_int, *DRIVER_CALLS["cuStreamWaitEvent"])
SIZE = ctypes.CFUNCTYPE(ctypes.c_int, *DRIVER_CALLS["cuFuncGetParamInfo"])
LAUNCH = ctypes.CFUNCTYPE(ctypes.c_int, *DRIVER_CALLS["cuLaunchKernel"])


class Library:
    """A driver library with one kernel, whose parameters have these sizes; records what it gets."""

    def __init__(self, sizes: list[int], fault: str | None = None) -> None:
        self.sizes, self._fault = sizes, fault
        self.launched: list[tuple[Any, ...]] = []
        self.queued: list[tuple[Any, ...]] = []
        # Real functions of C, with addresses that other C can call.
        self.cuEventRecord = RECORD(lambda *given: self._queue("record", *given))
        self.cuStreamWaitEvent = WAIT(lambda *given: self._queue("wait", *given))
        self.cuFuncGetParamInfo = SIZE(self._size)
        self.cuLaunchKernel = LAUNCH(self._launch)

    def _queue(self, *given: Any) -> int:
        self.queued.append(given)
        return 700 if given[0] == self._fault else 0

    def _size(self, _function: int, index: int, _offset: int, size: int) -> int:
        if index >= len(self.sizes):
            return 1
        ctypes.c_size_t.from_address(size).value = self.sizes[index]
        return 0

    def _launch(self, function: int, *given: Any) -> int:
        *shape, parameters, _extra = given
        addresses = (ctypes.c_void_p * len(self.sizes)).from_address(parameters)
        values = [
            int.from_bytes(ctypes.string_at(at, size), "little")
            for at, size in zip(addresses, self.sizes, strict=True)
        ]
        self.launched.append((function, tuple(shape), values))
        return self._queue("launch")


class Compiled:
    """What Triton's warmup returns, as far as a launch needs it."""

    function: int | None = None
    metadata = SimpleNamespace(num_warps=4, shared=96)
    src = SimpleNamespace(signature=SIGNATURE)

    def __getitem__(self, grid: tuple[int, int, int]) -> None:
        self.function = 77


GIVEN = {"ring_ptr": 1 << 40, "SLOTS": 5, "one": 1, "wide": 1 << 35, "T": 9}
SIDE, FORKED, JOINED, MAIN = 50, 60, 61, 40


def kernel(library: Library) -> CompiledKernel:
    return CompiledKernel(CudaDriver(library), Compiled(), GIVEN)


STREAMS = LaunchStreams(lambda: MAIN, SIDE, FORKED, JOINED)
HEADER = ctypes.c_uint64(0)


def headers_after(*, is_published: bool) -> StepHeaders:
    """Two were written; the GPU has published the first of them, or not."""
    made = StepHeaders(1, 1)
    made.counters.sent, made.all[0].head.number = 2, 1
    made.all[0].head.done = int(is_published)
    return made


BUSY, IDLE = headers_after(is_published=False), headers_after(is_published=True)


@pytest.fixture(params=["python", "c"])
def make(request: pytest.FixtureRequest) -> Callable[[Library], StepLauncher]:
    extension = load_step_extension() if request.param == "c" else None
    return lambda library: StepLauncher(CudaDriver(library), STREAMS, extension)


@pytest.mark.parametrize("num_hidden", [0, 1, 2])
def test_arguments_come_in_order_without_constants_and_what_triton_adds_is_null(
    num_hidden: int, make: Callable[[Library], StepLauncher]
) -> None:
    library = Library([8, 4, 8, 4] + [8] * num_hidden)
    made, step = kernel(library), make(library)
    step.use(LaunchList.of([made.launch((3, 2, 1))], HEADER))
    made.cells["T"].value = 11
    step.run(BUSY)
    hidden = [0] * num_hidden
    assert library.launched == [
        (77, (3, 2, 1, 128, 1, 1, 96, SIDE), [1 << 40, 5, 1 << 35, 11, *hidden])
    ]


def test_a_step_waits_for_its_forward_and_runs_its_launches_in_order(
    make: Callable[[Library], StepLauncher],
) -> None:
    library = Library([8, 4, 8, 4])
    made, step = kernel(library), make(library)
    step.use(LaunchList.of([made.launch((1, 1, 1), T=part) for part in range(3)], HEADER))
    step.run(BUSY)
    assert library.queued == [
        ("record", FORKED, MAIN),
        ("wait", SIDE, FORKED, 0),
        *[("launch",)] * 3,
        ("record", JOINED, SIDE),
    ]
    assert [values[3] for _, _, values in library.launched] == [0, 1, 2]
    assert made.cells["T"].value == 9  # an argument of its own is a launch's alone


def test_launches_can_be_run_again_and_replaced(
    make: Callable[[Library], StepLauncher],
) -> None:
    library = Library([8, 4, 8, 4])
    made, step = kernel(library), make(library)
    step.use(LaunchList.of([made.launch((1, 1, 1)), made.launch((2, 1, 1))], HEADER))
    step.run(BUSY)
    step.run(BUSY)
    step.use(LaunchList.of([made.launch((4, 1, 1))], HEADER))
    step.run(BUSY)
    assert [shape[0] for _, shape, _ in library.launched] == [1, 2, 1, 2, 4]


@pytest.mark.parametrize("sizes", [[8, 8, 8, 4], [8, 4, 8], [8, 4, 8, 4, 4]])
def test_a_kernel_laid_out_in_another_way_is_refused(sizes: list[int]) -> None:
    with pytest.raises(UnsupportedError, match="use the Triton that your vLLM release pins"):
        kernel(Library(sizes))


@pytest.mark.parametrize("fault", ["record", "wait", "launch"])
def test_what_the_driver_refuses_is_an_error_and_nothing_comes_after_it(
    fault: str, make: Callable[[Library], StepLauncher]
) -> None:
    library = Library([8, 4, 8, 4], fault=fault)
    step = make(library)
    step.use(LaunchList.of([kernel(library).launch((1, 1, 1))], HEADER))
    with pytest.raises(RingError, match="failed on the GPU: CUDA error 700"):
        step.run(BUSY)
    assert library.queued[-1][0] == fault


def test_a_stream_waits_for_an_event() -> None:
    library = Library([])
    CudaDriver(library).wait(200, 7)
    assert library.queued == [("wait", 200, 7, 0)]


def test_arguments_are_named_in_the_order_of_the_function() -> None:
    function = SimpleNamespace(arg_names=["a", "b", "CONSTANT"])
    tensor = SimpleNamespace(data_ptr=lambda: 4096)
    assert arguments_by_name(function, (tensor, 3)) == {"a": 4096, "b": 3}


def test_the_next_step_waits_for_the_last_one(make: Callable[[Library], StepLauncher]) -> None:
    library = Library([8, 4, 8, 4])
    step = make(library)
    step.use(LaunchList.of([kernel(library).launch((1, 1, 1))], HEADER))
    step.run(BUSY)
    library.queued.clear()
    step.begin_step()
    step.make_wait(200)
    assert library.queued == [("wait", MAIN, JOINED, 0), ("wait", 200, JOINED, 0)]


def test_an_idle_gpu_gets_the_launches_on_the_engines_own_stream_without_events(
    make: Callable[[Library], StepLauncher],
) -> None:
    library = Library([8, 4, 8, 4])
    step = make(library)
    step.use(LaunchList.of([kernel(library).launch((1, 1, 1))], HEADER))
    step.run(IDLE)
    assert HEADER.value == IDLE.all[1].address
    step.begin_step()
    assert library.queued == [("launch",)]
    step.make_wait(200)
    assert library.queued[1:] == [("record", JOINED, MAIN), ("wait", 200, JOINED, 0)]
