"""A second CUDA stream for work that the forward pass does not wait for.

Runs in: the worker. Scoring, publishing and capturing read what the forward has left and write
buffers of their own, so nothing waits for them except the next write to what they read. `fork()`
queues such work behind what the current stream was given so far; `join()` has the current stream
wait until that work has read what it needs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch


class NoSideStream:
    """For devices without streams: forked work runs at once, so there is nothing to wait for."""

    handle = 0

    @contextmanager
    def fork(self) -> Iterator[None]:
        yield

    def release(self) -> None:
        pass

    def join(self) -> None:
        pass

    def synchronize(self) -> None:
        pass


class SideStream:
    """One stream beside the engine's own."""

    def __init__(self, device: torch.device, *, only_in_graphs: bool = False) -> None:
        """`only_in_graphs`: fork only while a CUDA graph is captured, which then has a branch.

        Outside of a graph, forking such short work would cost more than it saves.
        """
        self._stream, self._device = torch.cuda.Stream(device), device
        self._only_in_graphs = only_in_graphs
        self._forked, self._released = torch.cuda.Event(), torch.cuda.Event()
        self._is_forked = False
        self._is_released = False  # and not joined since

    @property
    def handle(self) -> int:
        """The stream as the CUDA driver knows it."""
        return int(self._stream.cuda_stream)

    def driver_handles(self) -> tuple[int, int, int]:
        """The stream, what fork() records and what release() records, for calls of the driver."""
        for event in (self._forked, self._released):
            event.record(self._stream)  # torch makes an event when it is first recorded
        return self.handle, int(self._forked.cuda_event), int(self._released.cuda_event)

    @contextmanager
    def fork(self) -> Iterator[None]:
        """Work queued within runs here, after all that the current stream was given so far."""
        if self._only_in_graphs and not torch.cuda.is_current_stream_capturing():
            yield
            return
        self._forked.record(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream):
            self._stream.wait_event(self._forked)
            self._is_forked = True
            yield
            self._is_forked = False

    def release(self) -> None:
        """Within fork(): join() waits for the work queued so far, and for nothing after it."""
        if self._is_forked:
            self._released.record(self._stream)
            self._is_released = True

    def join(self) -> None:
        """The current stream waits for what was released; a captured graph needs this to end."""
        if self._is_released:
            torch.cuda.current_stream(self._device).wait_event(self._released)
            self._is_released = False

    def synchronize(self) -> None:
        """Return when nothing is queued here any more."""
        self._stream.synchronize()


def open_side_stream(device: torch.device) -> SideStream | NoSideStream:
    return SideStream(device) if device.type == "cuda" else NoSideStream()


class AfterTaps:
    """Work that a captured graph of a whole forward does once all of its taps have run."""

    def __init__(self, branch: SideStream | NoSideStream) -> None:
        """The work runs on `branch`, beside the rest of the forward."""
        self._branch = branch
        self._num_taps = 0  # the most that ran; a piece that is replayed runs none as Python
        self._num_ran = 0
        self._work: Callable[[int], None] | None = None
        self._is_done = False

    def stay_on_main_stream(self) -> None:
        """The graph gets no branch: the rest of the forward waits for the work."""
        self._branch = NoSideStream()

    def begin(self, work: Callable[[int], None] | None) -> None:
        """A forward begins; `work` is for the graph that is captured around it, if one is."""
        self._num_ran, self._work, self._is_done = 0, work, False

    def tap_ran(self, num_tokens: int) -> None:
        """A tap of so many tokens ran."""
        self._num_ran += 1
        if self._work is None or self._num_ran != self._num_taps:
            return
        with self._branch.fork():
            self._work(num_tokens)
            self._branch.release()
        self._is_done = True

    def end(self) -> bool:
        """The forward ends; True if every tap has run and its graph does the work."""
        is_whole = self._is_done and self._num_ran == self._num_taps
        self._num_taps = max(self._num_taps, self._num_ran)
        self._branch.join()
        return is_whole
