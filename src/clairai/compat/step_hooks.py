"""Takes a worker's model runner, V1 or V2; gives its steps to listeners, as it laid them out.

V1: v1/worker/gpu_model_runner.py, GPUModelRunner (CPUModelRunner derives from it)
V2: v1/worker/gpu/model_runner.py, GPUModelRunner
Both are wrapped on the instance, after the model is loaded; the classes stay as they are.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, Final

import torch

from clairai.compat.change_steering import CHANGES_ATTRIBUTE
from clairai.compat.extra_args import (
    decode_steering_plan,
    read_capture_plan,
    read_mark,
    read_steering_plan,
)
from clairai.engine.publish.publisher import ForwardListener
from clairai.engine.publish.repeat_path import RepeatPath, RunnerMethod
from clairai.engine.score.score_tables import ScoreTables
from clairai.engine.side_stream import AfterTaps
from clairai.engine.step import ForwardInputs, NewRequest, StepBatch, StepListener
from clairai.errors import UnsupportedError


def connect_listeners(
    runner: Any, listeners: Sequence[StepListener], repeat_path: RepeatPath
) -> Callable[[], ForwardInputs]:
    """Every real step of `runner` is told from now on; gives where its inputs lie."""
    if hasattr(runner, "prepare_inputs") and hasattr(runner, "req_states"):
        _replace_method(
            runner,
            "prepare_inputs",
            functools.partial(_wrap_prepare_inputs_v2, repeat_path),
            listeners,
        )
        inputs = _RunnerInputs(functools.partial(_read_inputs_v2, runner))
    elif hasattr(runner, "_prepare_inputs") and hasattr(runner, "input_batch"):
        laid_out = functools.partial(_wrap_prepare_inputs_v1, runner, repeat_path)
        _replace_method(runner, "_prepare_inputs", laid_out, listeners)
        inputs = _RunnerInputs(functools.partial(_read_inputs_v1, runner))
    else:
        raise UnsupportedError(
            f"{type(runner).__module__}.{type(runner).__name__} is neither vLLM's V1 nor its V2 "
            f"model runner, so no row could be attributed; use one of those, or remove the "
            f"clairai key from additional_config"
        )
    _replace_method(
        runner,
        "execute_model",
        functools.partial(_wrap_execute_model, inputs, repeat_path),
        listeners,
    )
    _replace_method(runner, "_dummy_run", _wrap_dummy_run, listeners)
    return inputs


def _replace_method(
    runner: Any,
    name: str,
    around: Callable[[RunnerMethod, Sequence[StepListener]], RunnerMethod],
    listeners: Sequence[StepListener],
) -> None:
    setattr(runner, name, around(getattr(runner, name), listeners))


def _wrap_execute_model(
    inputs: Callable[[], ForwardInputs],
    repeat_path: RepeatPath,
    original: RunnerMethod,
    listeners: Sequence[StepListener],
) -> RunnerMethod:
    """execute_model(scheduler_output, ...), V1 0.26:4111 0.32:3940, V2 0.26:1151 0.32:1719."""

    @functools.wraps(original)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        if kwargs.get("dummy_run"):  # V2 warms up and captures through the same method
            return original(*args, **kwargs)
        repeat_path.is_on = False
        _begin_step(listeners, args[0] if args else kwargs["scheduler_output"])
        result = original(*args, **kwargs)
        repeat_path.is_on = _end_step(listeners, inputs)
        return result

    names = ("scheduled_new_reqs", "finished_req_ids", CHANGES_ATTRIBUTE)
    return repeat_path.stepping(
        original, wrapped, functools.partial(_end_step, listeners, inputs), names
    )


def _begin_step(listeners: Sequence[StepListener], scheduled: Any) -> None:
    new = [_read_new_request(one) for one in scheduled.scheduled_new_reqs]
    finished = list(scheduled.finished_req_ids)
    for listener in listeners:
        listener.begin(new, finished)
    if CHANGES_ATTRIBUTE in vars(scheduled):
        _apply_steering_changes(listeners, scheduled)


def _end_step(listeners: Sequence[StepListener], inputs: Callable[[], ForwardInputs]) -> bool:
    """Whether all listeners rest."""
    for listener in listeners:
        listener.end(inputs)
    return all(listener.can_skip() for listener in listeners)


def _apply_steering_changes(listeners: Sequence[StepListener], scheduled: Any) -> None:
    """What compat/change_steering.py put there: requests that are steered otherwise from now on."""
    for req_id, sealed in getattr(scheduled, CHANGES_ATTRIBUTE).items():
        plan = decode_steering_plan(sealed)
        for listener in listeners:
            listener.amend(req_id, plan)


def _wrap_dummy_run(original: RunnerMethod, listeners: Sequence[StepListener]) -> RunnerMethod:
    """_dummy_run(num_tokens, ...), V1 0.26:5767 0.32:5508, V2 0.26:530 0.32:818."""

    @functools.wraps(original)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        for listener in listeners:
            listener.before_dummy_run()
        result = original(*args, **kwargs)
        for listener in listeners:
            listener.after_dummy_run()
        return result

    return wrapped


def _read_new_request(new: Any) -> NewRequest:
    """SchedulerOutput.scheduled_new_reqs: v1/core/sched/output.py NewRequestData, 0.26 and 0.32."""
    mark, request_id = read_mark(new.sampling_params, new.req_id)
    prompt_len = len(new.prompt_token_ids or ())
    plan, order = read_steering_plan(new.sampling_params), read_capture_plan(new.sampling_params)
    return NewRequest(new.req_id, request_id, mark, prompt_len, plan, order)


def _wrap_prepare_inputs_v1(
    runner: Any, repeat_path: RepeatPath, original: RunnerMethod, listeners: Sequence[StepListener]
) -> RunnerMethod:
    """_prepare_inputs(scheduler_output, num_scheduled_tokens), 0.26:1937 0.32:1920."""

    @functools.wraps(original)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        result = original(*args, **kwargs)
        counts_R = args[1] if len(args) > 1 else kwargs["num_scheduled_tokens"]
        batch = runner.input_batch
        num_reqs = batch.num_reqs
        starts_R = batch.num_computed_tokens_cpu[:num_reqs].copy()
        laid_out = (batch.req_ids[:num_reqs], counts_R[:num_reqs], starts_R)
        if not repeat_path.is_on or not repeat_path.again(*laid_out):
            _place_batch(listeners, repeat_path, StepBatch(*laid_out))
        return result

    return wrapped


def _wrap_prepare_inputs_v2(
    repeat_path: RepeatPath, original: RunnerMethod, listeners: Sequence[StepListener]
) -> RunnerMethod:
    """prepare_inputs(scheduler_output, ...) -> InputBatch, 0.26:874 0.32:1354.

    The returned batch is sorted by the runner, not by the scheduler: only its own order counts.
    """

    def then(batch: Any) -> None:
        laid_out = StepBatch(
            batch.req_ids, batch.num_scheduled_tokens, batch.num_computed_tokens_np
        )
        _place_batch(listeners, repeat_path, laid_out)

    @functools.wraps(original)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        batch = original(*args, **kwargs)
        then(batch)
        return batch

    names = ("req_ids", "num_scheduled_tokens", "num_computed_tokens_np")
    return repeat_path.laying(original, wrapped, then, names)


def _place_batch(
    listeners: Sequence[StepListener], repeat_path: RepeatPath, batch: StepBatch
) -> None:
    repeat_path.is_on = False
    for listener in listeners:
        listener.place(batch)


def _read_inputs_v1(runner: Any) -> tuple[torch.Tensor, torch.Tensor]:
    return runner.positions, runner.input_ids.gpu


def _read_inputs_v2(runner: Any) -> tuple[torch.Tensor, torch.Tensor]:
    buffers = runner.input_buffers
    return buffers.positions, buffers.input_ids


class _RunnerInputs:
    """The runner's buffers; the same object for as long as they are the same."""

    def __init__(self, read: Callable[[], tuple[torch.Tensor, torch.Tensor]]) -> None:
        self._read, self._last = read, ForwardInputs(*read())

    def __call__(self) -> ForwardInputs:
        positions_T, token_ids_T = self._read()
        last = self._last
        if positions_T is not last.positions_T or token_ids_T is not last.token_ids_T:
            self._last = ForwardInputs(positions_T, token_ids_T)
        return self._last


# MERGED
# Takes a worker's model and its taps; gives graphs of it that publish their own steps, if it
# pays.
#
# A graph of a whole forward is captured around the outermost module, whose hooks are Python's
# even
# where its inside is compiled: V1 compilation/cuda_graph.py CUDAGraphWrapper, V2
# v1/worker/gpu/cudagraph_utils.py capture(), 0.26. A piece of one begins and ends inside.


# Of weights. With fewer a step waits for the host, which launches a graph without branches sooner.
LARGE_MODEL_BYTES: Final = 8 << 30


def publish_in_graphs(
    runner: Any,
    inputs: Callable[[], ForwardInputs],
    tables: ScoreTables,
    forwards: ForwardListener,
    last: str,
) -> None:
    """`last` is the site behind the last block: nothing follows it that would hide our work."""
    model = runner.get_model()
    if _can_split_graphs(model):
        return
    if sum(one.nbytes for one in model.parameters()) < LARGE_MODEL_BYTES:
        tables.tail.stay_on_main_stream()
    elif last in tables.sites:
        return  # beside the logits it costs next to nothing, and the GPU is what is waited for
    watch_forwards(model, inputs, tables.tail, forwards)


def watch_forwards(
    model: torch.nn.Module,
    inputs: Callable[[], ForwardInputs],
    tail: AfterTaps,
    forwards: ForwardListener,
    is_capturing: Callable[[], bool] = torch.cuda.is_current_stream_capturing,
) -> None:
    """A forward that is a graph publishes its own step; any that runs as Python is told of."""

    def begins(*_: Any) -> None:
        tail.begin(forwards.captured if is_capturing() else None)

    def ends(*_: Any) -> None:
        is_whole = tail.end()
        if not is_capturing():
            forwards.forwarded(inputs)
        elif not is_whole:
            forwards.disable_graphs()

    model.register_forward_pre_hook(begins)
    model.register_forward_hook(ends)


def _can_split_graphs(model: torch.nn.Module) -> bool:
    """Whether a graph may end inside of a forward, or a compiler would take our hooks for vLLM's.

    compilation/breakable_cudagraph.py; GPUModelRunner.load_model calls Module.compile, 0.26:5385.
    """
    from vllm import envs

    is_breakable = bool(getattr(envs, "VLLM_USE_BREAKABLE_CUDAGRAPH", False))
    return is_breakable or model._compiled_call_impl is not None
