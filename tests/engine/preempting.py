"""How often the scheduler of an engine in this process preempts a request."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


@contextmanager
def counted(llm: Any) -> Iterator[list[int]]:
    """One number for each preemption (Scheduler._preempt_request, v1/core/sched, 0.26 and 0.32)."""
    scheduler = llm.llm_engine.engine_core.engine_core.scheduler
    seen: list[int] = []
    original = scheduler._preempt_request

    def preempt(request: Any, *args: Any, **kwargs: Any) -> Any:
        seen.append(1)
        return original(request, *args, **kwargs)

    scheduler._preempt_request = preempt
    try:
        yield seen
    finally:
        del scheduler._preempt_request
