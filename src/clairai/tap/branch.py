"""Takes a piece of work that only reads; gives it a stream beside the forward pass, where it can.

A tap reads the residual stream and writes a buffer of its own, so nothing in the forward waits for
it except the next write to that residual. Inside a CUDA graph being captured, the work is put on a
second stream: the graph then holds a branch, which runs beside the projections that follow the tap.
Outside of capture there is nothing to gain: the work stays on the forward's own stream.
"""

from __future__ import annotations

from collections.abc import Iterator
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
