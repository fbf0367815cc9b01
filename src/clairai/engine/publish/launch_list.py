"""Takes a step's launches, laid out; gives them to the driver, on a stream of their own.

By one call of C where there is a compiler (step.c): Python between two calls takes longer than the
calls do. Otherwise one by one.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

from clairai.engine.kernel_launch import CudaDriver, KernelLaunch
from clairai.engine.publish import step_library
from clairai.errors import RingError

ON_MAIN, ASIDE = -1, 0  # as in step.c


@dataclass(frozen=True)
class LaunchStreams:
    """Where launches run: behind what the engine's own stream was given, before what waits."""

    main: Callable[[], int]  # the engine's stream
    side: int  # another one
    begun: int  # events
    ended: int


class LaunchItem(ctypes.Structure):
    """struct item of step.c"""

    _fields_ = (
        ("function", ctypes.c_void_p),
        ("parameters", ctypes.c_void_p),
        ("grid", ctypes.c_uint32 * 3),
        ("threads", ctypes.c_uint32),
        ("shared", ctypes.c_uint32),
    )


@dataclass(frozen=True, eq=False)
class LaunchList:
    """Launches one after the other, laid out for C too; may be used again and again."""

    launches: tuple[KernelLaunch, ...]
    step_header: Any  # the argument of theirs that differs from step to step
    items: Any

    @classmethod
    def of(cls, launches: Sequence[KernelLaunch], step_header: Any) -> LaunchList:
        items = (LaunchItem * len(launches))()
        for item, one in zip(items, launches, strict=True):
            item.function, item.parameters = one.function, ctypes.addressof(one.parameters)
            item.grid[:] = one.grid
            item.threads, item.shared = one.threads, one.shared
        return cls(tuple(launches), step_header, items)


class StepLauncher(Protocol):
    """All launches of a step."""

    def use(self, launch_list: LaunchList) -> None:
        """These are the step's, until there are others."""

    def begin(self) -> None:
        """What the engine's stream is given next may overwrite what the last step left."""

    def note(self, ledger: int, step: int) -> bool:
        """Write the last brief of the ledger at this address once more; False: it was not."""

    def run(self, step_header: int, ledger: int) -> None:
        """All of them, for the brief at this address, which is the last of its ledger."""

    def noted(self) -> None:
        """The engine's stream itself publishes the brief that was written last."""

    def follow(self, stream: int) -> None:
        """Have this stream wait for the last step's."""


class PythonLauncher:
    """One by one."""

    def __init__(self, driver: CudaDriver, lane: LaunchStreams) -> None:
        self._driver, self._lane = driver, lane
        self._launches: tuple[KernelLaunch, ...] = ()
        self._brief: Any = None

    def use(self, launch_list: LaunchList) -> None:
        self._launches, self._brief = launch_list.launches, launch_list.step_header

    def begin(self) -> None:
        self.follow(self._lane.main())

    def note(self, ledger: int, step: int) -> bool:
        del ledger, step
        return False

    def run(self, step_header: int, ledger: int) -> None:
        del ledger
        lane, driver = self._lane, self._driver
        self._brief.value = step_header
        driver.record(lane.begun, lane.main())
        driver.wait(lane.side, lane.begun)
        for one in self._launches:
            one.run(driver, lane.side)
        driver.record(lane.ended, lane.side)

    def noted(self) -> None:
        self._driver.record(self._lane.ended, self._lane.main())

    def follow(self, stream: int) -> None:
        self._driver.wait(stream, self._lane.ended)


class NativeLaunchList(ctypes.Structure):
    """struct line of step.c"""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("record", "wait", "launch")),
        *((name, ctypes.c_void_p) for name in ("side", "begun", "ended")),
        ("items", ctypes.c_void_p),
        ("num_items", ctypes.c_uint64),
        ("step_header", ctypes.c_void_p),
    )


class NativeLauncher:
    """By one call. On the way of every step: what it calls, it calls without detours."""

    def __init__(self, driver: CudaDriver, lane: LaunchStreams, step: Any) -> None:
        """`step` is the module that step.c is."""
        calls = (driver.cuEventRecord, driver.cuStreamWaitEvent, driver.cuLaunchKernel)
        addresses = [ctypes.cast(call, ctypes.c_void_p) for call in calls]
        self._line = NativeLaunchList(*addresses, lane.side, lane.begun, lane.ended, None, 0, None)
        at = ctypes.addressof(self._line)
        self._run, self.note = partial(step.run, at), step.note
        self._driver, self._lane, self._main = driver, lane, lane.main
        self._where = ASIDE  # the last step's
        self._held: LaunchList | None = None  # it is read by C

    def use(self, launch_list: LaunchList) -> None:
        self._held, line = launch_list, self._line
        line.items, line.num_items = ctypes.addressof(launch_list.items), len(launch_list.items)
        line.step_header = ctypes.addressof(launch_list.step_header)

    def begin(self) -> None:
        if self._where != ON_MAIN:
            self._driver.wait(self._main(), self._lane.ended)

    def run(self, step_header: int, ledger: int) -> None:
        del step_header  # it is the ledger's last
        where = self._run(ledger, self._main())
        if where > 0:
            _raise_if_failed(where)
        self._where = where

    def noted(self) -> None:
        self._where = ON_MAIN

    def follow(self, stream: int) -> None:
        if self._where == ON_MAIN:
            self._driver.record(self._lane.ended, self._main())
        self._driver.wait(stream, self._lane.ended)


def make_launcher(driver: CudaDriver, lane: LaunchStreams) -> StepLauncher:
    """The faster ones, where there is a C compiler: Triton too is in need of one."""
    step = step_library.find_step_library()
    return PythonLauncher(driver, lane) if step is None else NativeLauncher(driver, lane, step)


def _raise_if_failed(status: int) -> None:
    if status:
        raise RingError(f"a launch failed on the GPU: CUDA error {status}; see the engine's log")
