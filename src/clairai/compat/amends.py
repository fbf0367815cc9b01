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

from clairai.compat.requests import COURSE, Sealed, read_course
from clairai.steer.amend import amended, check_acts
from clairai.steer.course import Course
from clairai.steer.registry import Registry
from clairai.steer.spec import Entry

CARRIED: Final = "clairai_amended"
_PENDING: Final = "clairai_amends"


def amend(core: Any, registry: Registry, stream: int, entries: Sequence[Entry]) -> list[int]:
    """From which position on each running answer of the stream is steered so; all, or an error."""
    changes = [_change(registry, request, entries) for request in _running(core, stream)]
    with ExitStack() as undo:
        for change in changes:
            if change.course is not None:
                claim = registry.claim(change.course)
                undo.callback(claim.release)
                finalize(change.request, claim.release)
        undo.pop_all()
    for change in changes:
        _install(core, change)
    return [change.position for change in changes]


def amend_one(core: Any, registry: Registry, request: Any, entries: Sequence[Entry]) -> None:
    """The same for one answer alone: what a rule does."""
    change = _change(registry, request, entries)
    if change.course is not None:
        finalize(request, registry.claim(change.course).release)
    _install(core, change)


@dataclass(frozen=True)
class _Change:
    request: Any  # vLLM's own
    course: Course | None
    position: int


def _running(core: Any, stream: int) -> Iterator[Any]:
    for request in core.scheduler.requests.values():
        seat = getattr(request, "clairai_seat", None)
        if seat is not None and seat[0] == stream and not request.is_finished():
            yield request


def _change(registry: Registry, request: Any, entries: Sequence[Entry]) -> _Change:
    """The tokens that are known have block hashes; those that are scheduled are on their way."""
    position = max(request.num_tokens, request.num_computed_tokens)
    prompt_len = request.num_prompt_tokens
    check_acts(entries, prompt_len, position)
    new = registry.resolve(entries, prompt_len=prompt_len)
    course = amended(read_course(request.sampling_params), new, position)
    return _Change(request, course, position)


def _install(core: Any, change: _Change) -> None:
    request, course = change.request, change.course
    extra_args = request.sampling_params.extra_args
    sealed = extra_args[COURSE] = None if course is None else Sealed.seal(course)
    # After a preemption a gate that remembers must see all of its tokens again.
    request.skip_reading_prefix_cache |= course is not None and course.is_stateful
    if request.status.name != "WAITING":  # one that no worker has seen takes it along
        _pending(core)[request.request_id] = sealed


def _pending(core: Any) -> dict[str, Any]:
    """What the next step carries; made, with the wrap that sends it, when first needed."""
    held: dict[str, Any] | None = vars(core).get(_PENDING)
    if held is None:
        held = vars(core)[_PENDING] = {}
        core.scheduler.schedule = _with_amends(core.scheduler, held)
    return held


def _with_amends(scheduler: Any, pending: dict[str, Any]) -> Any:
    original = scheduler.schedule

    @functools.wraps(original)
    def schedule(*args: Any, **kwargs: Any) -> Any:
        scheduled = original(*args, **kwargs)
        if pending:
            # One that has ended meanwhile was told to the workers before, or is in this output.
            live = {id_: held for id_, held in pending.items() if id_ in scheduler.requests}
            # An attribute of its own: SchedulerOutput is a plain dataclass, and travels whole.
            setattr(scheduled, CARRIED, live)
            pending.clear()
        return scheduled

    return schedule
