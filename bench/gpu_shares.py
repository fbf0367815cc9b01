"""How much of every step is clairai's work on the worker's thread.

Each wrapped method is timed from outside, and what it wraps from inside: ours is the difference,
the launch and the copy of the row map included. What the timers themselves take of it is measured
too, around methods that nobody wraps.
"""

from __future__ import annotations

import inspect
import time
from collections.abc import Callable, Iterator
from typing import Any, Final

# compat/step_hooks.py: execute_model is left last, but for what comes with the sampling.
STEP: Final = "execute_model"
OF_RUNNER: Final = ("prepare_inputs", "_prepare_inputs", "sample_tokens", STEP)
OF_MODEL: Final = ("compute_logits",)


class Shares:
    """Seconds of our own work, of each step with so many requests that all decode."""

    def __init__(self, wrapped: list[tuple[Any, str, Any]]) -> None:
        self.seconds: dict[int, list[float]] = {}
        self.pending = 0.0
        self.wrapped = wrapped  # owners, names, and ours

    def end_step(self, scheduled: Any) -> None:
        num_requests = len(scheduled.num_scheduled_tokens)
        if scheduled.total_num_scheduled_tokens == num_requests:
            self.seconds.setdefault(num_requests, []).append(self.pending)
        self.pending = 0.0


def install(worker: Any) -> None:
    """Time our wrappers from now on; runs in the worker, like all here."""
    found = [(owner, name, vars(owner)[name]) for owner, name in _wrapped(worker.model_runner)]
    shares = worker.bench_shares = Shares(found)
    for owner, name, ours in found:
        inside = [0.0]
        _time_inside(ours, _timed_inside(_original(ours), inside))
        setattr(owner, name, _timed(ours, name, inside, shares))


def time_nothing(worker: Any) -> None:
    """From now on vLLM's own methods are timed: nothing is tapped any more."""
    shares = worker.bench_shares
    for owner, name, _ in shares.wrapped:
        inside, original = [0.0], getattr(type(owner), name).__get__(owner)
        setattr(owner, name, _timed(_timed_inside(original, inside), name, inside, shares))


def take(worker: Any) -> dict[int, list[float]]:
    """What was measured since the last time."""
    found: dict[int, list[float]] = worker.bench_shares.seconds
    worker.bench_shares.seconds = {}
    return found


def _wrapped(runner: Any) -> Iterator[tuple[Any, str]]:
    for owner, names in ((runner, OF_RUNNER), (runner.model, OF_MODEL)):
        yield from ((owner, name) for name in names if name in vars(owner))


def _original(ours: Any) -> Callable[..., Any]:
    """vLLM's own method, which ours wraps."""
    held: Any = getattr(ours, "__self__", None)
    found: Callable[..., Any] = held[0] if inspect.isbuiltin(ours) else ours.__wrapped__
    return found


def _time_inside(ours: Any, timed: Callable[..., Any]) -> None:
    """Have `timed` called where ours calls what it wraps: from C (step.c), and from Python."""
    in_python = ours
    if inspect.isbuiltin(ours):
        held: Any = ours.__self__  # original, otherwise, ...
        held[0], in_python = timed, held[1]
    cell = in_python.__closure__[in_python.__code__.co_freevars.index("original")]
    cell.cell_contents = timed


def _timed_inside(original: Callable[..., Any], inside: list[float]) -> Callable[..., Any]:
    def timed_inside(*args: Any, **kwargs: Any) -> Any:
        begin_s = time.perf_counter()
        result = original(*args, **kwargs)
        inside[0] = time.perf_counter() - begin_s
        return result

    return timed_inside


def _timed(ours: Any, name: str, inside: list[float], shares: Shares) -> Callable[..., Any]:
    def timed(*args: Any, **kwargs: Any) -> Any:
        begin_s = time.perf_counter()
        result = ours(*args, **kwargs)
        shares.pending += time.perf_counter() - begin_s - inside[0]
        if name == STEP:
            shares.end_step(args[0] if args else kwargs["scheduler_output"])
        return result

    return timed
