"""Takes a worker's model runner, V1 or V2; gives its steps to listeners, as it laid them out.

V1: v1/worker/gpu_model_runner.py, GPUModelRunner (CPUModelRunner derives from it)
V2: v1/worker/gpu/model_runner.py, GPUModelRunner
Both are wrapped on the instance, after the model is loaded; the classes stay as they are.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import numpy as np
import torch

from clairai.compat.amends import CARRIED
from clairai.compat.captures import read_order
from clairai.compat.requests import read_course, read_mark, read_sealed
from clairai.errors import UnsupportedError
from clairai.steer.course import Course
from clairai.tap.outlet import Inputs
from clairai.tap.rows import Batch
from clairai.tap.station import NewRequest


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

    def blank(self) -> None:
        """A forward of nobody's rows comes next."""


def connect(runner: Any, listeners: Sequence[Listener]) -> Callable[[], Inputs]:
    """Every real step of `runner` is told from now on; gives where its inputs lie."""
    if hasattr(runner, "prepare_inputs") and hasattr(runner, "req_states"):
        _wrap(runner, "prepare_inputs", lambda given: _after_v2(listeners, given))
        inputs = _Inputs(functools.partial(_inputs_v2, runner))
    elif hasattr(runner, "_prepare_inputs") and hasattr(runner, "input_batch"):
        _wrap(runner, "_prepare_inputs", lambda given: _after_v1(listeners, runner, given))
        inputs = _Inputs(functools.partial(_inputs_v1, runner))
    else:
        raise UnsupportedError(
            f"{type(runner).__module__}.{type(runner).__name__} is neither vLLM's V1 nor its V2 "
            f"model runner, so no row could be attributed; use one of those, or remove the "
            f"clairai key from additional_config"
        )
    _wrap(runner, "execute_model", lambda given: _around_step(listeners, inputs, given))
    _wrap(runner, "_dummy_run", lambda given: _before_dummy(listeners, given))
    return inputs


Given = tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any]]


def _wrap(runner: Any, name: str, around: Callable[[Given], Any]) -> None:
    original = getattr(runner, name)

    @functools.wraps(original)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        return around((original, args, kwargs))

    setattr(runner, name, wrapped)


def _around_step(listeners: Sequence[Listener], inputs: Callable[[], Inputs], given: Given) -> Any:
    """execute_model(scheduler_output, ...), V1 0.26:4111 0.32:3940, V2 0.26:1151 0.32:1719."""
    original, args, kwargs = given
    if kwargs.get("dummy_run"):  # V2 warms up and captures through the same method
        return original(*args, **kwargs)
    scheduled = args[0] if args else kwargs["scheduler_output"]
    new = [_new_request(one) for one in scheduled.scheduled_new_reqs]
    finished, carried = list(scheduled.finished_req_ids), _carried(scheduled)
    for listener in listeners:
        listener.begin(new, finished)
    if carried:
        _amend(listeners, carried)
    result = original(*args, **kwargs)
    for listener in listeners:
        listener.end(inputs)
    return result


def _carried(scheduled: Any) -> dict[str, Any] | None:
    """What compat/amends.py put there: requests that are steered otherwise from now on."""
    carried: dict[str, Any] | None = getattr(scheduled, CARRIED, None)
    return carried


def _amend(listeners: Sequence[Listener], carried: dict[str, Any]) -> None:
    for req_id, sealed in carried.items():
        course = read_sealed(sealed)
        for listener in listeners:
            listener.amend(req_id, course)


def _before_dummy(listeners: Sequence[Listener], given: Given) -> Any:
    """_dummy_run(num_tokens, ...), V1 0.26:5767 0.32:5508, V2 0.26:530 0.32:818."""
    original, args, kwargs = given
    for listener in listeners:
        listener.blank()
    return original(*args, **kwargs)


def _new_request(new: Any) -> NewRequest:
    """SchedulerOutput.scheduled_new_reqs: v1/core/sched/output.py NewRequestData, 0.26 and 0.32."""
    mark, request_id = read_mark(new.sampling_params, new.req_id)
    prompt_len = len(new.prompt_token_ids or ())
    course, order = read_course(new.sampling_params), read_order(new.sampling_params)
    return NewRequest(new.req_id, request_id, mark, prompt_len, course, order)


def _tell(listeners: Sequence[Listener], batch: Batch) -> None:
    for listener in listeners:
        listener.place(batch)


def _after_v1(listeners: Sequence[Listener], runner: Any, given: Given) -> Any:
    """_prepare_inputs(scheduler_output, num_scheduled_tokens), 0.26:1937 0.32:1920."""
    original, args, kwargs = given
    result = original(*args, **kwargs)
    counts_R = args[1] if len(args) > 1 else kwargs["num_scheduled_tokens"]
    batch = runner.input_batch
    num_reqs = batch.num_reqs
    _tell(
        listeners,
        Batch(
            req_ids=batch.req_ids[:num_reqs],
            counts_R=np.asarray(counts_R[:num_reqs], np.int32),
            starts_R=batch.num_computed_tokens_cpu[:num_reqs].copy(),
        ),
    )
    return result


def _after_v2(listeners: Sequence[Listener], given: Given) -> Any:
    """prepare_inputs(scheduler_output, ...) -> InputBatch, 0.26:874 0.32:1354.

    The returned batch is sorted by the runner, not by the scheduler: only its own order counts.
    """
    original, args, kwargs = given
    batch = original(*args, **kwargs)
    _tell(
        listeners,
        Batch(
            req_ids=batch.req_ids,
            counts_R=np.asarray(batch.num_scheduled_tokens, np.int32),
            starts_R=np.asarray(batch.num_computed_tokens_np, np.int32),
        ),
    )
    return batch


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
