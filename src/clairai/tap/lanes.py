"""Takes work on a step's rows that nobody shall wait for; gives it a way past the forward.

On a CPU the work is done at once. On a GPU it runs on a stream of its own, behind the forward whose
rows it reads and before the forward that overwrites them; the host waits for neither.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Protocol

import torch

Wait = Callable[[], None]
Mark = Callable[[int, int], None]  # the driver's name of a stream, the number of a ticket


class Lane(Protocol):
    def begin(self) -> None:
        """A step begins: what the last one left may be overwritten from here on."""

    def side(self) -> Any:
        """A context: what is called in it runs beside the forward, and after the last one."""

    @property
    def handle(self) -> int:
        """The driver's own name of the stream; 0 where there is none."""

    def left(self) -> None:
        """Within: the forward's own memory has been read."""

    def done(self, number: int) -> Wait:
        """Within: all so far is the ticket of this number. A call that returns when it is done."""

    def drain(self) -> None:
        """Return when nothing is on its way any more."""


class HostLane:
    """Everything happens where it is called."""

    handle = 0

    def __init__(self, land: Callable[[int], None]) -> None:
        self._land = land

    def begin(self) -> None:
        pass

    @contextmanager
    def side(self) -> Iterator[None]:
        yield

    def left(self) -> None:
        pass

    def done(self, number: int) -> Wait:
        self._land(number)
        return _nothing

    def drain(self) -> None:
        pass


class CudaLane:
    """A stream beside the forward's."""

    def __init__(self, device: torch.device, mark: Mark | None) -> None:
        self._stream, self._mark = torch.cuda.Stream(device), mark
        self._forward = torch.cuda.Event()
        self._left = torch.cuda.Event()
        self._is_read = True
        self.handle = int(self._stream.cuda_stream)

    def begin(self) -> None:
        if not self._is_read:
            torch.cuda.current_stream(self._stream.device).wait_event(self._left)
            self._is_read = True

    @contextmanager
    def side(self) -> Iterator[None]:
        self._forward.record(torch.cuda.current_stream(self._stream.device))
        with torch.cuda.stream(self._stream):
            self._stream.wait_event(self._forward)
            yield

    def left(self) -> None:
        self._left.record(self._stream)
        self._is_read = False

    def done(self, number: int) -> Wait:
        if self._mark is not None:  # the device says so itself: nobody here waits
            self._mark(self.handle, number)
            return _nothing
        # Blocking: the thread that waits sleeps, and leaves the processor to the engine.
        event = torch.cuda.Event(blocking=True)
        event.record(self._stream)
        wait: Wait = event.synchronize
        return wait

    def drain(self) -> None:
        self._stream.synchronize()


def lane_for(device: torch.device, land: Callable[[int], None], mark: Mark | None) -> Lane:
    """`land` says on the host that a ticket has come, `mark` has a stream say it."""
    return CudaLane(device, mark) if device.type == "cuda" else HostLane(land)


def _nothing() -> None:
    pass
