"""Takes a worker's model runner, V1 or V2; gives its steps to listeners, as it laid them out.

V1: v1/worker/gpu_model_runner.py, GPUModelRunner (CPUModelRunner derives from it)
V2: v1/worker/gpu/model_runner.py, GPUModelRunner
Both are wrapped on the instance, after the model is loaded; the classes stay as they are.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch

from clairai.compat.amends import CARRIED
from clairai.compat.captures import read_order
from clairai.compat.requests import read_course, read_mark, read_sealed
from clairai.errors import UnsupportedError
from clairai.steer.course import Course
from clairai.tap.outlet import Inputs
from clairai.tap.rows import Batch
from clairai.tap.station import NewRequest
from clairai.tap.steady import Method, Steady


class Listener(Protocol):
    """Is told of every real step, in the order in which the engine does things."""

    def begin(self, new: Sequence[NewRequest], finished: Sequence[str]) -> None:
        """Requests come and go."""

    def amend(self, req_id: str, course: Course | None) -> None:
        """From now on this is what steers the request."""

    def place(self, batch: Batch) -> None:
        """The batch is laid out; the forward has not begun."""

    def end(self, inputs: Callable[[], Inputs]) -> None:
        """The forward is on its way."""

    def rests(self) -> bool:
        """Whether steps that are like this one need not be told: `Steady` does what is to do."""

    def blank(self) -> None:
        """A forward of nobody's rows comes next."""

    def blanked(self) -> None:
        """It is on its way."""


def connect(runner: Any, listeners: Sequence[Listener], steady: Steady) -> Callable[[], Inputs]:
    """Every real step of `runner` is told from now on; gives where its inputs lie."""
    if hasattr(runner, "prepare_inputs") and hasattr(runner, "req_states"):
        _wrap(runner, "prepare_inputs", functools.partial(_laid_out_v2, steady), listeners)
        inputs = _Inputs(functools.partial(_inputs_v2, runner))
    elif hasattr(runner, "_prepare_inputs") and hasattr(runner, "input_batch"):
        laid_out = functools.partial(_laid_out_v1, runner, steady)
        _wrap(runner, "_prepare_inputs", laid_out, listeners)
        inputs = _Inputs(functools.partial(_inputs_v1, runner))
    else:
        raise UnsupportedError(
            f"{type(runner).__module__}.{type(runner).__name__} is neither vLLM's V1 nor its V2 "
            f"model runner, so no row could be attributed; use one of those, or remove the "
            f"clairai key from additional_config"
        )
    _wrap(runner, "execute_model", functools.partial(_stepping, inputs, steady), listeners)
    _wrap(runner, "_dummy_run", _blanking, listeners)
    return inputs


def _wrap(
    runner: Any,
    name: str,
    around: Callable[[Method, Sequence[Listener]], Method],
    listeners: Sequence[Listener],
) -> None:
    setattr(runner, name, around(getattr(runner, name), listeners))


def _stepping(
    inputs: Callable[[], Inputs], steady: Steady, original: Method, listeners: Sequence[Listener]
) -> Method:
    """execute_model(scheduler_output, ...), V1 0.26:4111 0.32:3940, V2 0.26:1151 0.32:1719."""

    @functools.wraps(original)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        if kwargs.get("dummy_run"):  # V2 warms up and captures through the same method
            return original(*args, **kwargs)
        steady.is_on = False
        _begin(listeners, args[0] if args else kwargs["scheduler_output"])
        result = original(*args, **kwargs)
        steady.is_on = _end(listeners, inputs)
        return result

    names = ("scheduled_new_reqs", "finished_req_ids", CARRIED)
    return steady.stepping(original, wrapped, functools.partial(_end, listeners, inputs), names)


def _begin(listeners: Sequence[Listener], scheduled: Any) -> None:
    new = [_new_request(one) for one in scheduled.scheduled_new_reqs]
    finished = list(scheduled.finished_req_ids)
    for listener in listeners:
        listener.begin(new, finished)
    if CARRIED in vars(scheduled):
        _amend(listeners, scheduled)


def _end(listeners: Sequence[Listener], inputs: Callable[[], Inputs]) -> bool:
    """Whether all listeners rest."""
    for listener in listeners:
        listener.end(inputs)
    return all(listener.rests() for listener in listeners)


def _amend(listeners: Sequence[Listener], scheduled: Any) -> None:
    """What compat/amends.py put there: requests that are steered otherwise from now on."""
    for req_id, sealed in getattr(scheduled, CARRIED).items():
        course = read_sealed(sealed)
        for listener in listeners:
            listener.amend(req_id, course)


def _blanking(original: Method, listeners: Sequence[Listener]) -> Method:
    """_dummy_run(num_tokens, ...), V1 0.26:5767 0.32:5508, V2 0.26:530 0.32:818."""

    @functools.wraps(original)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        for listener in listeners:
            listener.blank()
        result = original(*args, **kwargs)
        for listener in listeners:
            listener.blanked()
        return result

    return wrapped


def _new_request(new: Any) -> NewRequest:
    """SchedulerOutput.scheduled_new_reqs: v1/core/sched/output.py NewRequestData, 0.26 and 0.32."""
    mark, request_id = read_mark(new.sampling_params, new.req_id)
    prompt_len = len(new.prompt_token_ids or ())
    course, order = read_course(new.sampling_params), read_order(new.sampling_params)
    return NewRequest(new.req_id, request_id, mark, prompt_len, course, order)


def _laid_out_v1(
    runner: Any, steady: Steady, original: Method, listeners: Sequence[Listener]
) -> Method:
    """_prepare_inputs(scheduler_output, num_scheduled_tokens), 0.26:1937 0.32:1920."""

    @functools.wraps(original)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        result = original(*args, **kwargs)
        counts_R = args[1] if len(args) > 1 else kwargs["num_scheduled_tokens"]
        batch = runner.input_batch
        num_reqs = batch.num_reqs
        starts_R = batch.num_computed_tokens_cpu[:num_reqs].copy()
        laid_out = (batch.req_ids[:num_reqs], counts_R[:num_reqs], starts_R)
        if not steady.is_on or not steady.again(*laid_out):
            _place(listeners, steady, Batch(*laid_out))
        return result

    return wrapped


def _laid_out_v2(steady: Steady, original: Method, listeners: Sequence[Listener]) -> Method:
    """prepare_inputs(scheduler_output, ...) -> InputBatch, 0.26:874 0.32:1354.

    The returned batch is sorted by the runner, not by the scheduler: only its own order counts.
    """

    def then(batch: Any) -> None:
        laid_out = Batch(batch.req_ids, batch.num_scheduled_tokens, batch.num_computed_tokens_np)
        _place(listeners, steady, laid_out)

    @functools.wraps(original)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        batch = original(*args, **kwargs)
        then(batch)
        return batch

    names = ("req_ids", "num_scheduled_tokens", "num_computed_tokens_np")
    return steady.laying(original, wrapped, then, names)


def _place(listeners: Sequence[Listener], steady: Steady, batch: Batch) -> None:
    steady.is_on = False
    for listener in listeners:
        listener.place(batch)


def _inputs_v1(runner: Any) -> tuple[torch.Tensor, torch.Tensor]:
    return runner.positions, runner.input_ids.gpu


def _inputs_v2(runner: Any) -> tuple[torch.Tensor, torch.Tensor]:
    buffers = runner.input_buffers
    return buffers.positions, buffers.input_ids


class _Inputs:
    """The runner's buffers; the same object for as long as they are the same."""

    def __init__(self, read: Callable[[], tuple[torch.Tensor, torch.Tensor]]) -> None:
        self._read, self._last = read, Inputs(*read())

    def __call__(self) -> Inputs:
        positions_T, token_ids_T = self._read()
        last = self._last
        if positions_T is not last.positions_T or token_ids_T is not last.token_ids_T:
            self._last = Inputs(positions_T, token_ids_T)
        return self._last
