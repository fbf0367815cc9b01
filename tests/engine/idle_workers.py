"""A vLLM plugin that lets workers of a test's engine sleep soon after they have done their work.

SpinCondition.__init__  distributed/device_communicators/shm_broadcast.py  0.32:133: whoever waits
for a message of another process of the engine calls sched_yield for a second before it sleeps. With
a worker on each of two CPUs, the test itself then does not run for that second, after each answer
and each call. It is found by an entry point, in every process of the engine.
"""

from __future__ import annotations

import functools
from typing import Any, Final

ENTRY: Final = "[vllm.general_plugins]\nidle_workers = tests.engine.idle_workers:register\n"
BUSY_S: Final = 0.01


def register() -> None:
    from vllm.distributed.device_communicators.shm_broadcast import SpinCondition

    if not hasattr(SpinCondition.__init__, "__wrapped__"):
        SpinCondition.__init__ = _with_less_spinning(SpinCondition.__init__)


def _with_less_spinning(original: Any) -> Any:
    @functools.wraps(original)
    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **kwargs)
        self.busy_loop_s = min(self.busy_loop_s, BUSY_S)

    return init
