"""Changed steering of running requests: from where on, for which ones, and nothing left behind."""

from __future__ import annotations

import gc
from enum import Enum
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from clairai.compat.change_steering import (
    CHANGES_ATTRIBUTE,
    change_request_steering,
    change_stream_steering,
)
from clairai.compat.extra_args import STEERING_KEY, decode_steering_plan, read_steering_plan
from clairai.engine.steer.steering_registry import SteeringLimits, SteeringRegistry
from clairai.engine.step import RequestMark
from clairai.errors import RequestError, VectorCapacityError
from clairai.fields.steer import SteerEntry, parse_entries
from clairai.points import Point
from clairai.probe.model import Probe
from clairai.vector.model import Vector

POINT = Point("post_block", 1)
PROMPT_LEN = 4


class Status(Enum):
    WAITING = 1
    RUNNING = 2
    FINISHED = 3


class Request:
    """The parts of vLLM's Request that are read."""

    def __init__(self, request_id: str, stream: int, choice: int = 0) -> None:
        self.request_id = request_id
        self.clairai_request_mark = RequestMark(stream, choice)
        self.num_prompt_tokens, self.num_tokens, self.num_computed_tokens = PROMPT_LEN, 6, 7
        self.sampling_params = SimpleNamespace(extra_args={})
        self.skip_reading_prefix_cache = False
        self.status = Status.RUNNING

    def is_finished(self) -> bool:
        return self.status is Status.FINISHED


def _core(*requests: Request) -> Any:
    held = {request.request_id: request for request in requests}
    return SimpleNamespace(scheduler=SimpleNamespace(requests=held, schedule=SimpleNamespace))


def _registry(programs: int = 8) -> SteeringRegistry:
    made = SteeringRegistry([POINT], 3, SteeringLimits(rows=8, programs=programs))
    made.put([Vector("v", {POINT: np.ones(3, np.float32)})])
    return made


def _entries(**more: Any) -> tuple[SteerEntry, ...]:
    return parse_entries([{"vector": "v", **more}], what="steer")


def _carried(core: Any) -> dict[str, Any]:
    found: dict[str, Any] = getattr(core.scheduler.schedule(), CHANGES_ATTRIBUTE, {})
    return found


def test_every_running_answer_of_the_stream_is_changed_and_no_other() -> None:
    mine, also, other = Request("a", 7), Request("b", 7, 1), Request("c", 8)
    core = _core(mine, also, other)
    assert change_stream_steering(core, _registry(), 7, _entries()) == [7, 7]
    carried = _carried(core)
    assert [*carried] == ["a", "b"]
    plan = decode_steering_plan(carried["a"])
    assert plan is not None
    assert plan.actions[0].ranges[0][0] == 7  # the first position that no step has computed
    assert read_steering_plan(mine.sampling_params) == plan
    assert other.sampling_params.extra_args == {}
    assert _carried(core) == {}  # once


def test_a_request_that_has_ended_is_left_out_of_the_next_step() -> None:
    """Workers would keep its plan for ever: they do not hear of its end again."""
    ended, going = Request("a", 7), Request("b", 7)
    core = _core(ended, going)
    change_stream_steering(core, _registry(), 7, _entries())
    del core.scheduler.requests["a"]
    assert [*_carried(core)] == ["b"]


def test_a_waiting_request_takes_its_plan_along() -> None:
    waiting = Request("a", 7)
    waiting.status = Status.WAITING
    core = _core(waiting)
    change_stream_steering(core, _registry(), 7, _entries())
    assert _carried(core) == {}
    assert read_steering_plan(waiting.sampling_params) is not None


def test_a_gate_with_memory_keeps_the_request_out_of_the_prefix_cache() -> None:
    request = Request("a", 7)
    registry = _registry()
    registry.set_probes({"p": Probe("p", POINT, np.ones(3, np.float32))})
    gate = {"probe": "p", "threshold": 0.0, "latch": True}
    change_request_steering(_core(request), registry, request, _entries(gate=gate))
    assert request.skip_reading_prefix_cache


def test_an_empty_list_ends_steering() -> None:
    request = Request("a", 7)
    core = _core(request)
    change_request_steering(core, _registry(), request, _entries())
    _carried(core)
    request.num_computed_tokens = request.num_tokens = 20
    change_request_steering(core, _registry(), request, ())
    plan = decode_steering_plan(_carried(core)["a"])
    assert plan is not None
    assert [action.ranges for action in plan.actions] == [((7, 20),)]


def test_a_change_that_does_not_fit_changes_and_claims_nothing() -> None:
    requests = [Request("a", 7), Request("b", 7)]
    core, registry = _core(*requests), _registry(programs=0)
    with pytest.raises(VectorCapacityError):
        change_stream_steering(core, registry, 7, _entries())
    assert all(STEERING_KEY not in request.sampling_params.extra_args for request in requests)
    assert registry.in_use() == (0, 0)
    with pytest.raises(RequestError, match="would not act"):
        change_stream_steering(core, registry, 7, _entries(when="prompt"))


def test_claims_end_with_the_request() -> None:
    request = Request("a", 7)
    core, registry = _core(request), _registry()
    change_request_steering(core, registry, request, _entries())
    assert registry.in_use() == (1, 1)
    core.scheduler.requests.clear()
    del request
    gc.collect()
    assert registry.in_use() == (0, 0)
