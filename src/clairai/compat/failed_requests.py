"""Ends requests that a worker cannot serve as asked: with an error for their clients, and no other.

GPUModelRunner.sample_tokens        v1/worker/gpu_model_runner.py   0.26:4497   0.32:4304
                                    v1/worker/gpu/model_runner.py   0.26:1395   0.32:2088
AsyncModelRunnerOutput.get_output   v1/outputs.py                   0.26:300    0.32:356
Scheduler.update_from_output        v1/core/sched/scheduler.py      0.26:1589   0.32:2026
Scheduler.finish_requests           v1/core/sched/scheduler.py      0.26:2144   0.32:2649
KVCacheManager.evict_blocks         v1/core/kv_cache_manager.py     0.26:548    0.32:665

The worker attaches the failures to the output of the step, which vLLM carries to the scheduler from
its first rank, in this process or another, at once or asynchronously. All ranks see the same plans
and fail alike. Before the scheduler reads that output the requests are finished there, so that
nothing they sampled reaches a client, and their blocks leave the prefix cache: the KV of steered
positions is not what the blocks' hashes say.
Runs in: the worker (sending) and the engine core (the rest).
"""

from __future__ import annotations

import copy
import functools
import logging
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Final

from clairai.compat.extra_args import read_cache_keys
from clairai.errors import ClairaiError, RequestFailedError

FAILURES: Final = "clairai_failed_requests"  # of ModelRunnerOutput: reasons by request id
_IS_WATCHED: Final = "clairai_ends_failed_requests"
_SHARED: Final = (
    "its prompt was found in the prefix cache, where a request that steers alike had left it "
    "before it failed; ask again"
)
_log: Final = logging.getLogger("clairai.requests")

NoteFailure = Callable[[Any, ClairaiError], None]


def send_failures(runner: Any, failures: Mapping[str, str]) -> None:
    """Attach the failures to the output of this step: what `sample_tokens` returns next.

    It is wrapped for that one call, so that other steps pay nothing.
    """
    original, is_own = runner.sample_tokens, "sample_tokens" in vars(runner)

    @functools.wraps(original)
    def sample_tokens(*args: Any, **kwargs: Any) -> Any:
        if is_own:
            runner.sample_tokens = original
        else:
            del runner.sample_tokens
        output = original(*args, **kwargs)
        if output is None:  # vLLM has no output for this step
            send_failures(runner, failures)
        return attach_failures(output, failures)

    runner.sample_tokens = sample_tokens


def attach_failures(output: Any, failures: Mapping[str, str]) -> Any:
    """The output of a step, with the failures of its requests; None stays None."""
    if hasattr(output, "get_output"):  # vLLM asks for the real one when the device is done
        read = output.get_output
        output.get_output = lambda: attach_failures(read(), failures)
    elif output is not None:
        output = copy.copy(output)  # vLLM shares one empty output
        setattr(output, FAILURES, {**getattr(output, FAILURES, {}), **failures})
    return output


def watch_for_failures(core: Any, note: NoteFailure) -> None:
    """From now on look for failures in the output of every step.

    Called for every request, and not only for one with a plan: whatever a worker does for a request
    may fail, and a request that has failed must not be answered as if it had not.
    """
    scheduler = core.scheduler
    if _IS_WATCHED not in vars(scheduler):
        setattr(scheduler, _IS_WATCHED, True)
        scheduler.update_from_output = _wrap_update_from_output(scheduler, note)


def _wrap_update_from_output(scheduler: Any, note: NoteFailure) -> Any:
    """Wrap `update_from_output(scheduler_output, model_runner_output)`."""
    original = scheduler.update_from_output

    @functools.wraps(original)
    def update_from_output(scheduled: Any, output: Any) -> Any:
        failures = getattr(output, FAILURES, None)
        if failures is None:
            return original(scheduled, output)
        # First: the scheduler passes over requests that have finished meanwhile.
        failed = _finish_failed(scheduler, scheduled, failures)
        outputs = original(scheduled, output)
        for request, reason in failed:
            note(request, RequestFailedError(reason))
            _add_error_output(outputs, request, reason)
        return outputs

    return update_from_output


def _finish_failed(
    scheduler: Any, scheduled: Any, failures: Mapping[str, str]
) -> list[tuple[Any, str]]:
    """Finish the failed requests, and those that share blocks which they left wrong."""
    requests = scheduler.requests
    failed = {
        req_id: (requests[req_id], f"the worker could not serve this request: {reason}")
        for req_id, reason in failures.items()
        if req_id in requests and not requests[req_id].is_finished()
    }
    wrong = _evict_wrong_blocks(scheduler, scheduled, [request for request, _ in failed.values()])
    for req_id, request in requests.items() if wrong else ():
        if req_id not in failed and not wrong.isdisjoint(_block_ids(scheduler, req_id)):
            failed[req_id] = (request, _SHARED)
    if failed:
        status = type(next(iter(failed.values()))[0].status).FINISHED_ERROR
        scheduler.finish_requests(list(failed), status)
    for req_id, (_, reason) in failed.items():
        _log.error("request %s has failed: %s", req_id, reason)
    return list(failed.values())


def _evict_wrong_blocks(scheduler: Any, scheduled: Any, failed: Iterable[Any]) -> set[int]:
    """Take the blocks whose KV is not as asked out of the prefix cache."""
    starts = _read_starts(scheduled)
    wrong: set[int] = set()
    for request in failed:
        position = _first_wrong_position(request, starts.get(request.request_id, 0))
        if position is None:
            continue
        blocks = scheduler.kv_cache_manager.get_block_ids(request.request_id)
        for group, block_ids in zip(_block_sizes(scheduler), blocks, strict=True):
            wrong.update(block_ids[position // group :])
    wrong.discard(scheduler.kv_cache_manager.block_pool.null_block.block_id)
    if wrong:
        scheduler.kv_cache_manager.evict_blocks(wrong)
    return wrong


def _read_starts(scheduled: Any) -> dict[str, int]:
    """Where each request of a step began: v1/core/sched/output.py, 0.26 and 0.32."""
    cached = scheduled.scheduled_cached_reqs
    starts = dict(zip(cached.req_ids, cached.num_computed_tokens, strict=True))
    new = {one.req_id: one.num_computed_tokens for one in scheduled.scheduled_new_reqs}
    return starts | new


def _first_wrong_position(request: Any, start: int) -> int | None:
    """The first position from `start` on that should have been steered; None if there is none.

    Before it, and without steering, the KV is what it would be for everybody.
    """
    keys = read_cache_keys(request.sampling_params)
    if keys is None or keys.first is None or keys.first >= request.num_computed_tokens:
        return None
    return max(keys.first, start)


def _block_sizes(scheduler: Any) -> list[int]:
    """Tokens of a block in each group: v1/kv_cache_interface.py KVCacheConfig, 0.26 and 0.32."""
    groups = scheduler.kv_cache_config.kv_cache_groups
    return [int(group.kv_cache_spec.block_size) for group in groups]


def _block_ids(scheduler: Any, req_id: str) -> set[int]:
    blocks = scheduler.kv_cache_manager.get_block_ids(req_id)
    return {block_id for block_ids in blocks for block_id in block_ids}


def _add_error_output(outputs: dict[int, Any], request: Any, reason: str) -> None:
    """As the scheduler itself ends a request with an error: scheduler.py 0.32:2317."""
    from vllm.v1.engine import EngineCoreOutput, EngineCoreOutputs

    made = EngineCoreOutput(
        request_id=request.request_id,
        new_token_ids=[],
        finish_reason=request.get_finished_reason(),
        stop_reason=f"clairai: {reason}",
        events=request.take_events(),
        trace_headers=request.trace_headers,
    )
    client = request.client_index
    if client not in outputs:
        outputs[client] = EngineCoreOutputs()
    outputs[client].outputs.append(made)
