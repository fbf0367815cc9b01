"""Takes a worker with taps; gives how much of every step is our own work on its thread.

Each wrapped method of the runner is timed from outside, and what it wraps from inside: ours is the
difference, the launch and the copy of the row map included.
"""

from __future__ import annotations

import time
from typing import Any, Final

# compat/runner.py: the outer one is left last.
STEP: Final = "execute_model"
LAYOUT: Final = ("prepare_inputs", "_prepare_inputs")  # of the V2 and of the V1 runner


class Shares:
    """Seconds of our own work, of each step with so many requests that all decode."""

    def __init__(self) -> None:
        self.seconds: dict[int, list[float]] = {}
        self.pending = 0.0

    def end_step(self, scheduled: Any) -> None:
        num_requests = len(scheduled.num_scheduled_tokens)
        if scheduled.total_num_scheduled_tokens == num_requests:
            self.seconds.setdefault(num_requests, []).append(self.pending)
        self.pending = 0.0


def install(worker: Any) -> None:
    """Runs in the worker, like all here."""
    runner, shares = worker.model_runner, Shares()
    worker.bench_shares = shares
    for name in (*LAYOUT, STEP):
        if name in vars(runner):
            _time(runner, name, shares)


def take(worker: Any) -> dict[int, list[float]]:
    """What was measured since the last time."""
    found: dict[int, list[float]] = worker.bench_shares.seconds
    worker.bench_shares.seconds = {}
    return found


def _time(runner: Any, name: str, shares: Shares) -> None:
    ours = vars(runner)[name]
    cell = ours.__closure__[ours.__code__.co_freevars.index("original")]
    original, inside = cell.cell_contents, [0.0]

    def timed_inside(*args: Any, **kwargs: Any) -> Any:
        begin_s = time.perf_counter()
        result = original(*args, **kwargs)
        inside[0] = time.perf_counter() - begin_s
        return result

    def timed(*args: Any, **kwargs: Any) -> Any:
        begin_s = time.perf_counter()
        result = ours(*args, **kwargs)
        shares.pending += time.perf_counter() - begin_s - inside[0]
        if name == STEP:
            shares.end_step(args[0] if args else kwargs["scheduler_output"])
        return result

    cell.cell_contents = timed_inside
    vars(runner)[name] = timed
