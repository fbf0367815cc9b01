"""Takes a piece of work that only reads; gives it a stream beside the forward pass, where it can.

A tap reads the residual stream and writes a buffer of its own, so nothing in the forward waits for
it except the next write to that residual. Inside a CUDA graph being captured, the work is put on a
second stream: the graph then holds a branch, which runs beside the projections that follow the tap.
Outside of capture there is nothing to gain: the work stays on the forward's own stream.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, Protocol

import torch


class GraphBranch(Protocol):
    def fork(self) -> AbstractContextManager[None]:
        """Within it, work runs beside the forward pass."""

    def join(self) -> None:
        """From here on the forward pass waits for all forked work."""


class NoSideStream:
    """For devices without streams: work runs where it stands."""

    def fork(self) -> AbstractContextManager[None]:
        return nullcontext()

    def join(self) -> None:
        pass


class SideStream:
    """A branch of the captured graph."""

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.Stream(device)
        self._is_forked = False

    @contextmanager
    def fork(self) -> Iterator[None]:
        if not torch.cuda.is_current_stream_capturing():
            yield
            return
        # Pairs with join(): a capture must not end with a branch that was never joined.
        self._is_forked = True
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            yield

    def join(self) -> None:
        if self._is_forked:
            torch.cuda.current_stream().wait_stream(self._stream)
            self._is_forked = False


class AfterTaps:
    """What a graph of a whole forward does when all taps have run, beside the rest or before it."""

    def __init__(self, branch: GraphBranch) -> None:
        self._branch = branch
        self._num_taps = 0  # the most that ran; a piece that is replayed runs none as Python
        self._num_ran = 0
        self._work: Callable[[int], None] | None = None
        self._is_done = False

    def stay_on_main_stream(self) -> None:
        """The graph gets no branch: what follows the taps waits."""
        self._branch = NoSideStream()

    def begin(self, work: Callable[[int], None] | None) -> None:
        """A forward begins; `work` is for the graph that is captured around it, if one is."""
        self._num_ran, self._work, self._is_done = 0, work, False

    def ran(self, num_tokens: int) -> None:
        """A tap of so many tokens ran."""
        self._num_ran += 1
        if self._work is None or self._num_ran != self._num_taps:
            return
        with self._branch.fork():
            self._work(num_tokens)
        self._is_done = True

    def end(self) -> bool:
        """The forward ends; whether its graph does the work, once every tap has run."""
        is_whole = self._is_done and self._num_ran == self._num_taps
        self._num_taps = max(self._num_taps, self._num_ran)
        self._branch.join()
        return is_whole


# MERGED
# Takes work on a step's rows that nobody shall wait for; gives it a way past the forward.
#
# On a CPU the work is done at once. On a GPU it runs on a stream of its own, behind the forward
# whose
# rows it reads and before the forward that overwrites them; the host waits for neither.


WaitFunction = Callable[[], None]
MarkDone = Callable[[int, int], None]  # the driver's name of a stream, the number of a ticket


class CaptureStream(Protocol):
    def begin(self) -> None:
        """A step begins: what the last one left may be overwritten from here on."""

    def side(self) -> Any:
        """A context: what is called in it runs beside the forward, and after the last one."""

    @property
    def handle(self) -> int:
        """The driver's own name of the stream; 0 where there is none."""

    def left(self) -> None:
        """Within: the forward's own memory has been read."""

    def done(self, number: int) -> WaitFunction:
        """Within: all so far is the ticket of this number. A call that returns when it is done."""

    def drain(self) -> None:
        """Return when nothing is on its way any more."""


class HostCaptureStream:
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

    def done(self, number: int) -> WaitFunction:
        self._land(number)
        return _do_nothing

    def drain(self) -> None:
        pass


class CudaCaptureStream:
    """A stream beside the forward's."""

    def __init__(self, device: torch.device, mark: MarkDone | None) -> None:
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

    def done(self, number: int) -> WaitFunction:
        if self._mark is not None:  # the device says so itself: nobody here waits
            self._mark(self.handle, number)
            return _do_nothing
        # Blocking: the thread that waits sleeps, and leaves the processor to the engine.
        event = torch.cuda.Event(blocking=True)
        event.record(self._stream)
        wait: WaitFunction = event.synchronize
        return wait

    def drain(self) -> None:
        self._stream.synchronize()


def open_capture_stream(
    device: torch.device, land: Callable[[int], None], mark: MarkDone | None
) -> CaptureStream:
    """`land` says on the host that a ticket has come, `mark` has a stream say it."""
    return CudaCaptureStream(device, mark) if device.type == "cuda" else HostCaptureStream(land)


def _do_nothing() -> None:
    pass
