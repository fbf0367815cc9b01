"""Leaves Python's lock to other threads between the steps of reading a large body.

A step is a call into C that keeps the lock for up to some milliseconds: an event loop that wants to
answer somebody waits for it. So whoever reads large bodies beside an event loop rests after each
step for several times as long as it took, and the loop meets one step at most.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from contextvars import ContextVar
from typing import Final, TypeVar

Result = TypeVar("Result")
REST: Final = 4.0  # times the processor time of a step
_LEAST_S: Final = 1e-3  # shorter steps count together with the next


class _Turns:
    """The processor time of one thread since it last rested."""

    def __init__(self) -> None:
        self._rested_s = time.thread_time()

    def rest(self) -> None:
        used_s = time.thread_time() - self._rested_s
        if used_s >= _LEAST_S:
            time.sleep(REST * used_s)
            self._rested_s = time.thread_time()


_TURNS: Final[ContextVar[_Turns | None]] = ContextVar("clairai_turns", default=None)


def run_in_turns(work: Callable[[], Result]) -> Result:
    """Do this work, in a thread of its own, so that `end_step` rests in it."""
    token = _TURNS.set(_Turns())
    try:
        return work()
    finally:
        _TURNS.reset(token)


def end_step() -> None:
    """A step that may have kept Python's lock for long is over."""
    turns = _TURNS.get()
    if turns is not None:
        turns.rest()
