"""Changes the steering of running requests, from their next step on.

Scheduler.schedule   v1/core/sched/scheduler.py   0.26:425   0.32:591
Scheduler.requests   same file: request id to Request

The scheduler's own output carries the change to every worker, so that all of them apply it in the
same step. It acts from the first position that no step has computed and no block hash includes.
Runs in: the engine core.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from contextlib import ExitStack
from typing import Any, Final
from weakref import finalize

from clairai.compat.extra_args import STEERING_KEY, EncodedSteeringPlan, read_steering_plan
from clairai.engine.steer.resolve_steering import amend_plan, check_entries_act
from clairai.engine.steer.steering_plan import SteeringPlan
from clairai.engine.steer.steering_registry import SteeringRegistry
from clairai.fields.steer import SteerEntry

CHANGES_ATTRIBUTE: Final = "clairai_changed_steering"  # of SchedulerOutput
_PENDING: Final = "clairai_steering_changes"


def change_stream_steering(
    core: Any, registry: SteeringRegistry, stream: int, entries: Sequence[SteerEntry]
) -> list[int]:
    """Change every running choice of the stream, or raise and change none.

    Gives the position from which each of them is steered anew.
    """
    requests = [
        request
        for request in core.scheduler.requests.values()
        if _has_stream(request, stream) and not request.is_finished()
    ]
    changes = [_prepare_change(registry, request, entries) for request in requests]
    with ExitStack() as undo:
        for request, (plan, _) in zip(requests, changes, strict=True):
            if plan is not None:
                claim = registry.claim(plan)
                undo.callback(claim.release)
                finalize(request, claim.release)
        undo.pop_all()
    for request, (plan, _) in zip(requests, changes, strict=True):
        _apply_change(core, request, plan)
    return [position for _, position in changes]


def change_request_steering(
    core: Any, registry: SteeringRegistry, request: Any, entries: Sequence[SteerEntry]
) -> None:
    """Change one choice: what a rule with the action `steer` does."""
    plan, _ = _prepare_change(registry, request, entries)
    if plan is not None:
        finalize(request, registry.claim(plan).release)
    _apply_change(core, request, plan)


def _has_stream(request: Any, stream: int) -> bool:
    mark = getattr(request, "clairai_request_mark", None)
    return mark is not None and mark.stream == stream


def _prepare_change(
    registry: SteeringRegistry, request: Any, entries: Sequence[SteerEntry]
) -> tuple[SteeringPlan | None, int]:
    """The request's new plan, and the first position that it can still change.

    Block hashes exist for all known tokens, and scheduled tokens are already being computed.
    """
    position = max(request.num_tokens, request.num_computed_tokens)
    prompt_len = request.num_prompt_tokens
    check_entries_act(entries, prompt_len, position)
    new = registry.resolve(entries, prompt_len=prompt_len)
    return amend_plan(read_steering_plan(request.sampling_params), new, position), position


def _apply_change(core: Any, request: Any, plan: SteeringPlan | None) -> None:
    encoded = None if plan is None else EncodedSteeringPlan.encode(plan)
    request.sampling_params.extra_args[STEERING_KEY] = encoded
    # After a preemption a gate with memory must see all of its tokens again.
    request.skip_reading_prefix_cache |= plan is not None and plan.is_stateful
    if request.status.name != "WAITING":  # a waiting request takes its plan along when it starts
        _get_pending(core)[request.request_id] = encoded


def _get_pending(core: Any) -> dict[str, Any]:
    """Changes that the next step carries; made, with the wrap that sends it, when first needed."""
    pending: dict[str, Any] | None = vars(core).get(_PENDING)
    if pending is None:
        pending = vars(core)[_PENDING] = {}
        core.scheduler.schedule = _wrap_schedule(core.scheduler, pending)
    return pending


def _wrap_schedule(scheduler: Any, pending: dict[str, Any]) -> Any:
    original = scheduler.schedule

    @functools.wraps(original)
    def schedule(*args: Any, **kwargs: Any) -> Any:
        scheduled = original(*args, **kwargs)
        if pending:
            # Workers already know of those that ended meanwhile, or learn it from this output.
            live = {id_: plan for id_, plan in pending.items() if id_ in scheduler.requests}
            # SchedulerOutput is a plain dataclass: an attribute of our own travels with it.
            setattr(scheduled, CHANGES_ATTRIBUTE, live)
            pending.clear()
        return scheduled

    return schedule
