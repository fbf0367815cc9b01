"""Takes a running request and what is to steer it; gives it the new course from its next step on.

Scheduler.schedule   v1/core/sched/scheduler.py   0.26:425   0.32:591
Scheduler.requests   same file: request id to Request

The scheduler's own output carries the change to every worker, so that all take it up in the same
step. It acts from the first position that no step has computed and no block hash has counted in.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any, Final
from weakref import finalize

from clairai.compat.admission import STEERING_KEY, EncodedSteeringPlan, read_steering_plan
from clairai.engine.steer.resolve_steering import amend_plan, check_entries_act
from clairai.engine.steer.steering_plan import SteeringPlan
from clairai.engine.steer.steering_registry import SteeringRegistry
from clairai.fields.steer import SteerEntry

CHANGES_ATTRIBUTE: Final = "clairai_changed_steering"
_PENDING: Final = "clairai_steering_changes"


def change_stream_steering(
    core: Any, registry: SteeringRegistry, stream: int, entries: Sequence[SteerEntry]
) -> list[int]:
    """From which position on each running answer of the stream is steered so; all, or an error."""
    changes = [
        _prepare_change(registry, request, entries) for request in _list_running(core, stream)
    ]
    with ExitStack() as undo:
        for change in changes:
            if change.plan is not None:
                claim = registry.claim(change.plan)
                undo.callback(claim.release)
                finalize(change.request, claim.release)
        undo.pop_all()
    for change in changes:
        _apply_change(core, change)
    return [change.position for change in changes]


def change_request_steering(
    core: Any, registry: SteeringRegistry, request: Any, entries: Sequence[SteerEntry]
) -> None:
    """The same for one answer alone: what a rule does."""
    change = _prepare_change(registry, request, entries)
    if change.plan is not None:
        finalize(request, registry.claim(change.plan).release)
    _apply_change(core, change)


@dataclass(frozen=True)
class _SteeringChange:
    request: Any  # vLLM's own
    plan: SteeringPlan | None
    position: int


def _list_running(core: Any, stream: int) -> Iterator[Any]:
    for request in core.scheduler.requests.values():
        seat = getattr(request, "clairai_request_mark", None)
        if seat is not None and seat[0] == stream and not request.is_finished():
            yield request


def _prepare_change(
    registry: SteeringRegistry, request: Any, entries: Sequence[SteerEntry]
) -> _SteeringChange:
    """The tokens that are known have block hashes; those that are scheduled are on their way."""
    position = max(request.num_tokens, request.num_computed_tokens)
    prompt_len = request.num_prompt_tokens
    check_entries_act(entries, prompt_len, position)
    new = registry.resolve(entries, prompt_len=prompt_len)
    plan = amend_plan(read_steering_plan(request.sampling_params), new, position)
    return _SteeringChange(request, plan, position)


def _apply_change(core: Any, change: _SteeringChange) -> None:
    request, plan = change.request, change.plan
    extra_args = request.sampling_params.extra_args
    sealed = extra_args[STEERING_KEY] = None if plan is None else EncodedSteeringPlan.seal(plan)
    # After a preemption a gate that remembers must see all of its tokens again.
    request.skip_reading_prefix_cache |= plan is not None and plan.is_stateful
    if request.status.name != "WAITING":  # one that no worker has seen takes it along
        _get_pending(core)[request.request_id] = sealed


def _get_pending(core: Any) -> dict[str, Any]:
    """What the next step carries; made, with the wrap that sends it, when first needed."""
    held: dict[str, Any] | None = vars(core).get(_PENDING)
    if held is None:
        held = vars(core)[_PENDING] = {}
        core.scheduler.schedule = _wrap_schedule(core.scheduler, held)
    return held


def _wrap_schedule(scheduler: Any, pending: dict[str, Any]) -> Any:
    original = scheduler.schedule

    @functools.wraps(original)
    def schedule(*args: Any, **kwargs: Any) -> Any:
        scheduled = original(*args, **kwargs)
        if pending:
            # One that has ended meanwhile was told to the workers before, or is in this output.
            live = {id_: held for id_, held in pending.items() if id_ in scheduler.requests}
            # An attribute of its own: SchedulerOutput is a plain dataclass, and travels whole.
            setattr(scheduled, CHANGES_ATTRIBUTE, live)
            pending.clear()
        return scheduled

    return schedule
