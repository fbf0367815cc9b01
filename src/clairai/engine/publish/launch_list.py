"""Launches the kernels of a step that no graph publishes, on a side stream or the engine's own.

Runs in: the worker. One call of C does it where there is a compiler (step.c): Python between two
calls of the driver takes longer than the calls do.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from clairai.engine.kernel_launch import CudaDriver, KernelLaunch
from clairai.engine.publish.step_header import StepHeaders
from clairai.errors import RingError

ON_MAIN, ON_SIDE = -1, 0  # as in step.c


class CLaunch(ctypes.Structure):
    """struct launch of step.c"""

    _fields_ = (
        ("function", ctypes.c_void_p),
        ("parameters", ctypes.c_void_p),
        ("grid", ctypes.c_uint32 * 3),
        ("threads", ctypes.c_uint32),
        ("shared", ctypes.c_uint32),
    )


class CLaunchList(ctypes.Structure):
    """struct launch_list of step.c"""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("record", "wait", "launch")),
        *((name, ctypes.c_void_p) for name in ("side", "forked", "joined")),
        ("launches", ctypes.c_void_p),
        ("num_launches", ctypes.c_uint64),
        ("header", ctypes.c_void_p),
    )


@dataclass(frozen=True, eq=False)
class LaunchList:
    """Launches one after the other, laid out for C too; may be used again and again."""

    launches: tuple[KernelLaunch, ...]
    header: Any  # the argument of theirs that differs from step to step
    for_c: Any

    @classmethod
    def of(cls, launches: Sequence[KernelLaunch], header: Any) -> LaunchList:
        for_c = (CLaunch * len(launches))()
        for laid_out, one in zip(for_c, launches, strict=True):
            laid_out.function, laid_out.parameters = one.function, ctypes.addressof(one.parameters)
            laid_out.grid[:] = one.grid
            laid_out.threads, laid_out.shared = one.threads, one.shared
        return cls(tuple(launches), header, for_c)


@dataclass(frozen=True)
class LaunchStreams:
    """Where launches run, by the driver's own handles."""

    main: Callable[[], int]  # the engine's stream
    side: int
    forked: int  # event: what the side stream waits for
    joined: int  # event: what waits for the side stream


class StepLauncher:
    """All launches of a step. In every such step: what it calls, it calls without detours."""

    def __init__(self, driver: CudaDriver, streams: LaunchStreams, extension: Any) -> None:
        """`extension` is the module that step.c is; without it Python does the same."""
        calls = (driver.cuEventRecord, driver.cuStreamWaitEvent, driver.cuLaunchKernel)
        addresses = [ctypes.cast(call, ctypes.c_void_p) for call in calls]
        handles = (streams.side, streams.forked, streams.joined)
        self._for_c = CLaunchList(*addresses, *handles, None, 0, None)
        self._driver, self._streams, self._main = driver, streams, streams.main
        self._launch = None if extension is None else extension.launch
        self._where = ON_SIDE  # the last step's launches
        self._list: LaunchList | None = None  # C reads it

    def use(self, launch_list: LaunchList) -> None:
        """These are the step's, until there are others."""
        self._list, for_c = launch_list, self._for_c
        for_c.launches = ctypes.addressof(launch_list.for_c)
        for_c.num_launches = len(launch_list.for_c)
        for_c.header = ctypes.addressof(launch_list.header)

    def begin_step(self) -> None:
        """What the engine's stream is given next may overwrite what the last step left."""
        if self._where != ON_MAIN:
            self._driver.wait(self._main(), self._streams.joined)

    def run(self, headers: StepHeaders) -> None:
        """All launches, for the header that was written last."""
        if self._launch is None:
            self._where = self._run(headers)
            return
        counters = ctypes.addressof(headers.counters)
        where = self._launch(ctypes.addressof(self._for_c), counters, self._main())
        if where > 0:
            raise RingError(f"a launch failed on the GPU: CUDA error {where}; see the engine's log")
        self._where = where

    def _run(self, headers: StepHeaders) -> int:
        """The twin of launch() in step.c."""
        launch_list, streams, driver = self._list, self._streams, self._driver
        assert launch_list is not None
        launch_list.header.value = headers.last().address
        main = self._main()
        is_idle = headers.last(1).is_published
        if not is_idle:
            driver.record(streams.forked, main)
            driver.wait(streams.side, streams.forked)
        for one in launch_list.launches:
            one.run(driver, main if is_idle else streams.side)
        if not is_idle:
            driver.record(streams.joined, streams.side)
        return ON_MAIN if is_idle else ON_SIDE

    def published_by_graph(self) -> None:
        """The engine's stream itself publishes the header that was written last."""
        self._where = ON_MAIN

    def make_wait(self, stream: int) -> None:
        """Have this stream wait until the last step is published."""
        if self._where == ON_MAIN:
            self._driver.record(self._streams.joined, self._main())
        self._driver.wait(stream, self._streams.joined)
