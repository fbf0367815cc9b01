"""Tells listeners of every step of a worker's model runner, V1 or V2, as the runner laid it out.

V1: v1/worker/gpu_model_runner.py, GPUModelRunner (CPUModelRunner derives from it)
V2: v1/worker/gpu/model_runner.py, GPUModelRunner

Both are wrapped on the instance, after the model is loaded; the classes stay as they are. On a GPU
hooks around the model's forward let its CUDA graphs publish their own steps. Runs in: the worker.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, Final

import numpy as np
import torch
from numpy.typing import NDArray

from clairai.compat.change_steering import CHANGES_ATTRIBUTE
from clairai.compat.extra_args import (
    decode_steering_plan,
    read_capture_plan,
    read_mark,
    read_steering_plan,
)
from clairai.compat.failed_requests import attach_failures, send_failures
from clairai.engine.publish.publisher import ForwardListener
from clairai.engine.publish.repeat_path import RepeatPath, RunnerMethod
from clairai.engine.score.score_tables import ScoreTables
from clairai.engine.side_stream import AfterTaps
from clairai.engine.step import (
    ForwardInputs,
    JudgedDrafts,
    NewRequest,
    StepBatch,
    StepListener,
)
from clairai.engine.step_guard import StepGuard
from clairai.errors import UnsupportedError
from clairai.wire import ring_messages

# By vLLM's modality.
MEDIA: Final = {
    "image": ring_messages.IMAGE,
    "audio": ring_messages.AUDIO,
    "video": ring_messages.VIDEO,
}
# With fewer bytes of weights a step waits for the host, which launches a graph without a side
# stream sooner.
LARGE_MODEL_BYTES: Final = 8 << 30


def connect_listeners(
    runner: Any, listeners: Sequence[StepListener], repeat_path: RepeatPath
) -> Callable[[], ForwardInputs]:
    """Call the listeners at every step of `runner`; gives a reader of its input buffers."""
    guard = StepGuard(listeners)
    if getattr(runner, "speculative_config", None) is not None:
        is_v2 = hasattr(runner, "prepare_inputs") and hasattr(runner, "req_states")
        return (_connect_drafts_v2 if is_v2 else _connect_drafts_v1)(runner, guard)
    if hasattr(runner, "prepare_inputs") and hasattr(runner, "req_states"):
        runner.prepare_inputs = _wrap_prepare_inputs_v2(runner.prepare_inputs, guard, repeat_path)
        inputs = _RunnerInputs(functools.partial(_read_inputs_v2, runner))
    elif hasattr(runner, "_prepare_inputs") and hasattr(runner, "input_batch"):
        runner._prepare_inputs = _wrap_prepare_inputs_v1(runner, guard, repeat_path)
        inputs = _RunnerInputs(functools.partial(_read_inputs_v1, runner))
    else:
        raise UnsupportedError(
            f"{type(runner).__module__}.{type(runner).__name__} is neither vLLM's V1 nor its V2 "
            f"model runner, so no row could be attributed; use one of those, or remove the "
            f"clairai key from additional_config"
        )
    runner.execute_model = _wrap_execute_model(runner, guard, inputs, repeat_path)
    runner._dummy_run = _wrap_dummy_run(runner._dummy_run, guard)
    return inputs


def _wrap_execute_model(
    runner: Any,
    guard: StepGuard,
    inputs: Callable[[], ForwardInputs],
    repeat_path: RepeatPath,
) -> RunnerMethod:
    """execute_model(scheduler_output, ...), V1 0.26:4111 0.32:3940, V2 0.26:1151 0.32:1719."""
    original: RunnerMethod = runner.execute_model

    @functools.wraps(original)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        if kwargs.get("dummy_run"):  # V2 warms up and captures through the same method
            return original(*args, **kwargs)
        repeat_path.is_on = False
        _begin_step(guard, args[0] if args else kwargs["scheduler_output"])
        result = original(*args, **kwargs)
        repeat_path.is_on = _end_step(runner, guard, inputs)
        return result

    names = ("scheduled_new_reqs", "finished_req_ids", CHANGES_ATTRIBUTE)
    return repeat_path.wrap_execute_model(
        original, wrapped, functools.partial(_end_step, runner, guard, inputs), names
    )


def _connect_drafts_v1(runner: Any, guard: StepGuard) -> Callable[[], ForwardInputs]:
    """Call the listeners at every step of a runner, V1 on a CPU, whose last tokens may be drafts.

    A step ends behind its sampler, which says how many drafts stand, and before the drafter, whose
    model has no taps and buffers of its own (v1/spec_decode/llm_base_proposer.py, 0.32:185).
    """
    inputs = _RunnerInputs(functools.partial(_read_inputs_v1, runner))
    runner._prepare_inputs = _wrap_prepare_drafts(runner, guard, inputs)
    runner._sample = _wrap_sample(runner, guard, inputs)
    runner.sample_tokens = _wrap_sample_tokens(runner.sample_tokens, guard)
    runner.execute_model = _wrap_execute_drafts(runner.execute_model, guard, inputs)
    runner._dummy_run = _wrap_dummy_run(runner._dummy_run, guard)
    return inputs


def _connect_drafts_v2(runner: Any, guard: StepGuard) -> Callable[[], ForwardInputs]:
    """As V1, on a GPU: which drafts are rejected is known there, and nobody waits for it.

    The drafter has buffers of its own (v1/worker/gpu/spec_decode/speculator.py, 0.32:149).
    """
    inputs = _JudgedInputs(_RunnerInputs(functools.partial(_read_inputs_v2, runner)))
    runner.prepare_inputs = _wrap_prepare_drafts_v2(runner, guard)
    runner.sample = _wrap_sample_v2(runner.sample, guard, inputs)
    runner.sample_tokens = _wrap_sample_tokens(runner.sample_tokens, guard)
    runner.execute_model = _wrap_execute_drafts(runner.execute_model, guard, inputs)
    runner._dummy_run = _wrap_dummy_run(runner._dummy_run, guard)
    return inputs


def _wrap_prepare_drafts_v2(runner: Any, guard: StepGuard) -> RunnerMethod:
    """prepare_inputs(scheduler_output, ...) -> InputBatch, 0.32:1354.

    InputBatch.num_computed_tokens_np is an upper bound (v1/worker/gpu/states.py, 0.32:64).
    """
    original: RunnerMethod = runner.prepare_inputs
    max_rejected = count_undecided_drafts(runner.vllm_config)

    @functools.wraps(original)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        batch = original(*args, **kwargs)
        drafts_R = batch.num_draft_tokens_per_req
        if drafts_R is None:
            drafts_R = np.zeros(len(batch.req_ids), np.int32)
        starts_R = batch.num_computed_tokens_np
        lowest_R = find_lowest_starts(starts_R, batch.prefill_len_np, max_rejected)
        counts_R = batch.num_scheduled_tokens
        guard.place(StepBatch(batch.req_ids, counts_R, starts_R, drafts_R, lowest_R))
        return batch

    return wrapped


def count_undecided_drafts(config: Any) -> int:
    """How many drafts of a request the scheduler may count that the sampler has rejected.

    It has heard of all steps but those in flight, when it lays out another
    (EngineCore.step_with_batch_queue, v1/engine/core.py, 0.32:720; VllmConfig
    max_concurrent_batches, config/vllm.py, 0.32:577).
    """
    num_in_flight = int(config.max_concurrent_batches) - 1
    return num_in_flight * int(config.speculative_config.num_speculative_tokens)


def find_lowest_starts(
    starts_R: NDArray[np.int32], prefill_len_R: NDArray[np.int32], max_rejected: int
) -> NDArray[np.int32]:
    """The least that each request's first position can be.

    No draft lies among the tokens that a request came with (InputBatch.prefill_len_np, 0.32).
    """
    lowest_R: NDArray[np.int32] = np.maximum(starts_R - max_rejected, prefill_len_R)
    return np.minimum(starts_R, lowest_R)


def _wrap_sample_v2(
    original: RunnerMethod, guard: StepGuard, inputs: _JudgedInputs
) -> RunnerMethod:
    """sample(hidden_states, input_batch, grammar_output) -> (output, num_sampled, num_rejected).

    0.32:1597. Of a request's tokens in the step all but `num_rejected` count as computed
    (v1/worker/gpu/input_batch.py `_post_update_kernel`, 0.32:609): those have rows.
    """

    @functools.wraps(original)
    def wrapped(hidden_states: Any, input_batch: Any, *args: Any, **kwargs: Any) -> Any:
        result = original(hidden_states, input_batch, *args, **kwargs)
        if guard.batch is not None:
            inputs.drafts = JudgedDrafts(input_batch.query_start_loc, result[2])
            guard.end(inputs)
            inputs.drafts = None
        return result

    return wrapped


def _wrap_execute_drafts(
    original: RunnerMethod, guard: StepGuard, inputs: Callable[[], ForwardInputs]
) -> RunnerMethod:
    @functools.wraps(original)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        if kwargs.get("dummy_run"):  # V2 warms up and captures through the same method
            return original(*args, **kwargs)
        _begin_step(guard, args[0] if args else kwargs["scheduler_output"])
        result = original(*args, **kwargs)
        if guard.batch is None:  # nothing was forwarded, and nothing will be sampled
            guard.end(inputs)
        return result

    return wrapped


def _wrap_prepare_drafts(
    runner: Any, guard: StepGuard, inputs: Callable[[], ForwardInputs]
) -> RunnerMethod:
    """_prepare_inputs(scheduler_output, num_scheduled_tokens), 0.32:1920.

    An engine that schedules ahead does not know here how many drafts of the last step stand, and
    counts all of them (num_computed_tokens_cpu); the positions that the forward reads are right.
    SchedulerOutput.scheduled_spec_decode_tokens: v1/core/sched/output.py, 0.32.
    """
    original: RunnerMethod = runner._prepare_inputs

    @functools.wraps(original)
    def wrapped(scheduler_output: Any, num_scheduled_tokens: Any, *args: Any, **kwargs: Any) -> Any:
        result = original(scheduler_output, num_scheduled_tokens, *args, **kwargs)
        num_reqs = runner.input_batch.num_reqs
        req_ids = runner.input_batch.req_ids[:num_reqs]
        counts_R = num_scheduled_tokens[:num_reqs].astype(np.int32)
        drafts = scheduler_output.scheduled_spec_decode_tokens
        drafts_R = np.array([len(drafts.get(req_id, ())) for req_id in req_ids], np.int32)
        positions_T = inputs().positions_T.numpy()
        starts_R = positions_T[np.cumsum(counts_R) - counts_R].astype(np.int32)
        guard.place(StepBatch(req_ids, counts_R, starts_R, drafts_R))
        return result

    return wrapped


def _wrap_sample(
    runner: Any, guard: StepGuard, inputs: Callable[[], ForwardInputs]
) -> RunnerMethod:
    """_sample(logits, spec_decode_metadata) -> SamplerOutput, 0.32:3437."""
    original: RunnerMethod = runner._sample

    @functools.wraps(original)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        output = original(*args, **kwargs)
        batch = guard.batch
        if batch is not None and batch.drafts_R is not None:
            sampled_RK = output.sampled_token_ids.numpy()
            rejected_R = count_rejected(batch.drafts_R, sampled_RK, runner.input_batch.vocab_size)
            if rejected_R.any():
                guard.reject(rejected_R)
            guard.end(inputs)
        return output

    return wrapped


def count_rejected(
    drafts_R: NDArray[np.int32], sampled_RK: NDArray[np.integer], vocabulary: int
) -> NDArray[np.int32]:
    """How many drafts of each request the sampler rejects.

    For each draft that stands, and then once, it gives a token; the rest of a request's row is
    filled up (v1/sample/rejection_sampler.py parse_output, 0.32:268). A request without drafts may
    have no token at all, or one that is discarded.
    """
    num_sampled_R = ((sampled_RK >= 0) & (sampled_RK < vocabulary)).sum(axis=1, dtype=np.int32)
    rejected_R: NDArray[np.int32] = np.clip(drafts_R + 1 - num_sampled_R, 0, drafts_R)
    return rejected_R


def _wrap_sample_tokens(original: RunnerMethod, guard: StepGuard) -> RunnerMethod:
    """sample_tokens(grammar_output), 0.32:4304: with the step's output leave its failures."""

    @functools.wraps(original)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        output = original(*args, **kwargs)
        failures = {} if output is None else guard.take_failures()
        return attach_failures(output, failures) if failures else output

    return wrapped


def _begin_step(guard: StepGuard, scheduled: Any) -> None:
    read = [
        guard.read(one.req_id, functools.partial(_read_new_request, one))
        for one in scheduled.scheduled_new_reqs
    ]
    guard.begin([one for one in read if one is not None], list(scheduled.finished_req_ids))
    if CHANGES_ATTRIBUTE in vars(scheduled):
        for req_id, encoded in getattr(scheduled, CHANGES_ATTRIBUTE).items():
            guard.amend(req_id, functools.partial(_apply_steering_change, req_id, encoded))


def _end_step(runner: Any, guard: StepGuard, inputs: Callable[[], ForwardInputs]) -> bool:
    """True if all listeners can skip a step with the same batch."""
    can_skip = guard.end(inputs)
    failures = guard.take_failures()
    if failures:
        send_failures(runner, failures)
    return can_skip


def _apply_steering_change(req_id: str, encoded: bytes | None, listener: StepListener) -> None:
    """Apply what change_steering.py attached to the scheduler's output."""
    listener.amend(req_id, decode_steering_plan(encoded))


def _wrap_dummy_run(original: RunnerMethod, guard: StepGuard) -> RunnerMethod:
    """_dummy_run(num_tokens, ...), V1 0.26:5767 0.32:5508, V2 0.26:530 0.32:818."""

    @functools.wraps(original)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        guard.before_dummy_run()
        result = original(*args, **kwargs)
        guard.after_dummy_run()
        return result

    return wrapped


def _read_new_request(new: Any) -> NewRequest:
    """SchedulerOutput.scheduled_new_reqs: v1/core/sched/output.py NewRequestData, 0.26 and 0.32."""
    mark, request_id = read_mark(new.sampling_params, new.req_id)
    prompt_len = len(new.prompt_token_ids or ())
    steering = read_steering_plan(new.sampling_params)
    capture = read_capture_plan(new.sampling_params)
    media = _read_media(new.mm_features) if new.mm_features else None
    # Of V2, where a request that was preempted comes back as a new one.
    num_known = len(getattr(new, "prefill_token_ids", None) or ())
    return NewRequest(new.req_id, request_id, mark, prompt_len, steering, capture, media, num_known)


def _read_media(features: Sequence[Any]) -> NDArray[np.uint8] | None:
    """MultiModalFeatureSpec and PlaceholderRange, multimodal/inputs.py, 0.26:302 0.32:344.

    Not all of a feature's positions get an embedding: `is_embed` leaves out the text tokens that
    a processor puts between the rows or tiles of an image.
    """
    places = [feature.mm_position for feature in features]
    media_N = np.zeros(max(place.offset + place.length for place in places), np.uint8)
    for feature, place in zip(features, places, strict=True):
        part_N = media_N[place.offset : place.offset + place.length]
        is_embed = slice(None) if place.is_embed is None else place.is_embed.numpy()
        part_N[is_embed] = MEDIA.get(feature.modality, ring_messages.OTHER_MEDIA)
    return media_N if media_N.any() else None


def _wrap_prepare_inputs_v1(runner: Any, guard: StepGuard, repeat_path: RepeatPath) -> RunnerMethod:
    """_prepare_inputs(scheduler_output, num_scheduled_tokens), 0.26:1937 0.32:1920."""
    original: RunnerMethod = runner._prepare_inputs

    @functools.wraps(original)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        result = original(*args, **kwargs)
        counts_R = args[1] if len(args) > 1 else kwargs["num_scheduled_tokens"]
        batch = runner.input_batch
        num_reqs = batch.num_reqs
        starts_R = batch.num_computed_tokens_cpu[:num_reqs].copy()
        layout = (batch.req_ids[:num_reqs], counts_R[:num_reqs], starts_R)
        if not repeat_path.is_on or not repeat_path.repeat(*layout):
            _place_batch(guard, repeat_path, StepBatch(*layout))
        return result

    return wrapped


def _wrap_prepare_inputs_v2(
    original: RunnerMethod, guard: StepGuard, repeat_path: RepeatPath
) -> RunnerMethod:
    """prepare_inputs(scheduler_output, ...) -> InputBatch, 0.26:874 0.32:1354.

    The runner sorts the batch that it returns: only that order counts, not the scheduler's.
    """

    def then(batch: Any) -> None:
        starts_R = batch.num_computed_tokens_np
        step = StepBatch(batch.req_ids, batch.num_scheduled_tokens, starts_R)
        _place_batch(guard, repeat_path, step)

    @functools.wraps(original)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        batch = original(*args, **kwargs)
        then(batch)
        return batch

    names = ("req_ids", "num_scheduled_tokens", "num_computed_tokens_np")
    return repeat_path.wrap_prepare_inputs(original, wrapped, then, names)


def _place_batch(guard: StepGuard, repeat_path: RepeatPath, batch: StepBatch) -> None:
    repeat_path.is_on = False
    guard.place(batch)


def _read_inputs_v1(runner: Any) -> tuple[torch.Tensor, torch.Tensor]:
    return runner.positions, runner.input_ids.gpu


def _read_inputs_v2(runner: Any) -> tuple[torch.Tensor, torch.Tensor]:
    buffers = runner.input_buffers
    return buffers.positions, buffers.input_ids


class _RunnerInputs:
    """Reads the runner's input buffers; the same object while the buffers are the same."""

    def __init__(self, read: Callable[[], tuple[torch.Tensor, torch.Tensor]]) -> None:
        self._read, self._last = read, ForwardInputs(*read())

    def __call__(self) -> ForwardInputs:
        positions_T, token_ids_T = self._read()
        last = self._last
        if positions_T is not last.positions_T or token_ids_T is not last.token_ids_T:
            self._last = ForwardInputs(positions_T, token_ids_T)
        return self._last


class _JudgedInputs:
    """The runner's input buffers, and in a step of which it is known, what became of its drafts."""

    def __init__(self, read: Callable[[], ForwardInputs]) -> None:
        self._read = read
        self.drafts: JudgedDrafts | None = None

    def __call__(self) -> ForwardInputs:
        found = self._read()
        return found if self.drafts is None else replace(found, drafts=self.drafts)


def publish_in_graphs(
    runner: Any,
    inputs: Callable[[], ForwardInputs],
    tables: ScoreTables,
    forwards: ForwardListener,
    last: str,
) -> None:
    """Have CUDA graphs of whole forwards publish their own steps, where that saves time.

    A graph of a whole forward is captured around the outermost module, whose hooks run in Python
    even where its inside is compiled: V1 compilation/cuda_graph.py CUDAGraphWrapper, V2
    v1/worker/gpu/cudagraph_utils.py capture(), 0.26. A graph of a piece begins and ends inside.
    `last` is the site behind the last block: nothing follows a tap there that would hide its work.
    """
    model = runner.get_model()
    if _can_split_graphs(model):
        return
    if sum(one.nbytes for one in model.parameters()) < LARGE_MODEL_BYTES:
        tables.tail.stay_on_main_stream()
    elif last in tables.sites:
        return  # publishing then runs beside the logits; the GPU, not the host, sets the pace
    watch_forwards(model, inputs, tables.tail, forwards)


def watch_forwards(
    model: torch.nn.Module,
    inputs: Callable[[], ForwardInputs],
    tail: AfterTaps,
    forwards: ForwardListener,
    is_capturing: Callable[[], bool] = torch.cuda.is_current_stream_capturing,
) -> None:
    """Add publishing to each graph that is captured, and report forwards that run in Python."""

    def before_forward(*_: Any) -> None:
        tail.begin(forwards.capture_publish if is_capturing() else None)

    def after_forward(*_: Any) -> None:
        is_whole = tail.end()
        if not is_capturing():
            forwards.forward_ran(inputs)
        elif not is_whole:
            forwards.disable_graphs()

    model.register_forward_pre_hook(before_forward)
    model.register_forward_hook(after_forward)


def _can_split_graphs(model: torch.nn.Module) -> bool:
    """True if a graph may end inside a forward, or if a compiler would trace our hooks.

    compilation/breakable_cudagraph.py; GPUModelRunner.load_model calls Module.compile, 0.26:5385.
    """
    from vllm import envs

    is_breakable = bool(getattr(envs, "VLLM_USE_BREAKABLE_CUDAGRAPH", False))
    return is_breakable or model._compiled_call_impl is not None
