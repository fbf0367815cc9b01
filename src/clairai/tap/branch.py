"""Takes a piece of work that only reads; gives it a stream beside the forward pass, where it can.

A tap reads the residual stream and writes a buffer of its own, so nothing in the forward waits for
it except the next write to that residual. Inside a CUDA graph being captured, the work is put on a
second stream: the graph then holds a branch, which runs beside the projections that follow the tap.
Outside of capture there is nothing to gain: the work stays on the forward's own stream.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Protocol

import torch


class Branch(Protocol):
    def fork(self) -> AbstractContextManager[None]:
        """Within it, work runs beside the forward pass."""

    def join(self) -> None:
        """From here on the forward pass waits for all forked work."""


class OneStream:
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


class Tail:
    """What a graph of a whole forward does when all taps have run, beside the rest or before it."""

    def __init__(self, branch: Branch) -> None:
        self._branch = branch
        self._num_taps = 0  # the most that ran; a piece that is replayed runs none as Python
        self._num_ran = 0
        self._work: Callable[[int], None] | None = None
        self._is_done = False

    def stay_in_line(self) -> None:
        """The graph gets no branch: what follows the taps waits."""
        self._branch = OneStream()

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
