"""A failed request ends with an error and leaves no wrong block; vLLM's scheduler here is a toy.

tests/engine has vLLM's own.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest

from clairai.compat import failed_requests
from clairai.compat.extra_args import with_plans
from clairai.compat.failed_requests import FAILURES, send_failures, watch_for_failures
from clairai.compat.stop_rules import wrap_add_request
from clairai.engine.step import RequestMark
from clairai.errors import ClairaiError
from tests.support.steering_plans import action, plan

BLOCK = 4
EMPTY = SimpleNamespace(req_ids=())


@dataclass
class Output:
    req_ids: list[str] = field(default_factory=list)


class AsyncOutput:
    def __init__(self, output: Output) -> None:
        self._output = output

    def get_output(self) -> Output:
        return self._output


class Runner:
    def __init__(self, *outputs: Any) -> None:
        self.outputs = list(outputs)

    def sample_tokens(self, _: Any) -> Any:
        return self.outputs.pop(0)


def carried(output: Any) -> Any:
    return getattr(output, FAILURES, None)


def test_failures_travel_with_the_output_of_their_step_alone() -> None:
    runner = Runner(Output(["a"]), Output(["a"]))
    send_failures(runner, {"a": "why"})
    assert carried(runner.sample_tokens(None)) == {"a": "why"}
    assert carried(runner.sample_tokens(None)) is None
    assert "sample_tokens" not in vars(runner)  # later steps pay nothing


def test_they_reach_another_process() -> None:
    """vLLM sends outputs between its own processes by pickle: instance attributes travel."""
    runner = Runner(Output(["a"]))
    send_failures(runner, {"a": "why"})
    _, _, state, *_ = runner.sample_tokens(None).__reduce_ex__(5)
    assert state[FAILURES] == {"a": "why"}


def test_they_travel_with_an_output_that_comes_later() -> None:
    runner = Runner(AsyncOutput(Output(["a"])))
    send_failures(runner, {"a": "why"})
    output = runner.sample_tokens(None)
    assert isinstance(output, AsyncOutput)
    assert carried(output.get_output()) == {"a": "why"}


def test_an_output_that_vllm_shares_is_not_changed() -> None:
    runner = Runner(EMPTY)
    send_failures(runner, {"a": "why"})
    assert carried(runner.sample_tokens(None)) == {"a": "why"}
    assert carried(EMPTY) is None


def test_a_step_without_an_output_passes_them_on_to_the_next() -> None:
    runner = Runner(None, Output())
    send_failures(runner, {"a": "why"})
    assert runner.sample_tokens(None) is None
    assert carried(runner.sample_tokens(None)) == {"a": "why"}


def test_failures_of_two_steps_can_travel_together() -> None:
    runner = Runner(Output())
    send_failures(runner, {"a": "why"})
    send_failures(runner, {"b": "too"})
    assert carried(runner.sample_tokens(None)) == {"a": "why", "b": "too"}


class Status(enum.Enum):
    RUNNING = 1
    FINISHED_ERROR = 2


class Request:
    client_index, trace_headers = 0, None

    def __init__(self, req_id: str, steered_from: int | None, num_computed: int) -> None:
        self.request_id, self.num_computed_tokens = req_id, num_computed
        self.status = Status.RUNNING
        made = None if steered_from is None else plan(action((steered_from, 1000)))
        extra = with_plans({}, RequestMark(7), req_id, made, None)
        self.sampling_params = SimpleNamespace(extra_args=extra)

    def is_finished(self) -> bool:
        return self.status is not Status.RUNNING

    def get_finished_reason(self) -> str:
        return "error"

    def take_events(self) -> None:
        return None


class Scheduler:
    """Two groups of blocks; the second has blocks twice as long."""

    def __init__(self, *requests: Request) -> None:
        self.requests = {one.request_id: one for one in requests}
        self.blocks: dict[str, tuple[list[int], list[int]]] = {}
        self.evicted: set[int] = set()
        self.served: list[str] = []
        groups = [SimpleNamespace(kv_cache_spec=SimpleNamespace(block_size=n)) for n in (4, 8)]
        self.kv_cache_config = SimpleNamespace(kv_cache_groups=groups)
        self.kv_cache_manager = SimpleNamespace(
            get_block_ids=lambda req_id: self.blocks.get(req_id, ([], [])),
            evict_blocks=self.evicted.update,
            block_pool=SimpleNamespace(null_block=SimpleNamespace(block_id=0)),
        )

    def finish_requests(self, req_ids: list[str], status: Status) -> None:
        for req_id in req_ids:
            self.requests.pop(req_id).status = status

    def update_from_output(self, _: Any, output: Any) -> dict[int, Any]:
        self.served = [one for one in output.req_ids if one in self.requests]
        return {}


@pytest.fixture
def notes(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, str]]:
    monkeypatch.setattr(failed_requests, "_add_error_output", _add_error_output)
    return []


def _add_error_output(outputs: dict[int, Any], request: Any, reason: str) -> None:
    outputs.setdefault(request.client_index, []).append((request.request_id, reason))


def step(
    scheduler: Scheduler, starts: dict[str, int], failures: dict[str, str], notes: list[Any]
) -> dict[int, Any]:
    def note(request: Any, error: ClairaiError) -> None:
        notes.append((request.request_id, error.code))

    watch_for_failures(SimpleNamespace(scheduler=scheduler), note)
    output = Output([*starts])
    if failures:
        setattr(output, FAILURES, failures)
    cached = SimpleNamespace(req_ids=[*starts], num_computed_tokens=[*starts.values()])
    scheduled = SimpleNamespace(scheduled_cached_reqs=cached, scheduled_new_reqs=[])
    return scheduler.update_from_output(scheduled, output)


def test_a_failed_request_ends_with_an_error_and_the_others_are_served(notes: list[Any]) -> None:
    scheduler = Scheduler(Request("a", 0, 3), Request("b", None, 3), Request("c", 0, 3))
    outputs = step(scheduler, {"a": 0, "b": 0, "c": 0}, {"a": "no room"}, notes)
    assert outputs == {0: [("a", "the worker could not serve this request: no room")]}
    assert scheduler.served == ["b", "c"]
    assert notes == [("a", "request-failed")]


def test_a_step_without_failures_is_vllms_own(notes: list[Any]) -> None:
    scheduler = Scheduler(Request("a", 0, 3))
    assert step(scheduler, {"a": 0}, {}, notes) == {}
    assert scheduler.served == ["a"]


def test_a_request_that_has_ended_meanwhile_is_passed_over(notes: list[Any]) -> None:
    scheduler = Scheduler(Request("a", 0, 3))
    assert step(scheduler, {"a": 0}, {"gone": "why"}, notes) == {}
    assert not notes


def test_only_blocks_that_should_have_been_steered_in_this_step_leave_the_cache(
    notes: list[Any],
) -> None:
    scheduler = Scheduler(Request("a", 6, 20))
    scheduler.blocks["a"] = ([0, 11, 12, 13, 14], [21, 22, 23])
    step(scheduler, {"a": 9}, {"a": "why"}, notes)
    assert scheduler.evicted == {12, 13, 14, 22, 23}  # from position 9 on


def test_blocks_of_positions_before_the_first_steered_one_stay_cached(notes: list[Any]) -> None:
    scheduler = Scheduler(Request("a", 16, 20), Request("b", None, 9))
    scheduler.blocks |= {"a": ([1, 2, 3, 4, 5], [21, 22, 23]), "b": ([1, 2, 6], [21, 24])}
    step(scheduler, {"a": 0, "b": 8}, {"a": "why"}, notes)
    assert scheduler.evicted == {5, 23}
    assert scheduler.served == ["b"]


def test_a_request_that_is_not_steered_yet_leaves_every_block(notes: list[Any]) -> None:
    scheduler = Scheduler(Request("a", 30, 20))
    scheduler.blocks["a"] = ([1, 2, 3, 4, 5], [21, 22, 23])
    step(scheduler, {"a": 0}, {"a": "why"}, notes)
    assert not scheduler.evicted


@pytest.mark.attack(104)
def test_a_request_that_found_such_a_block_fails_too(notes: list[Any]) -> None:
    scheduler = Scheduler(Request("a", 0, 8), Request("b", 0, 8), Request("c", 0, 8))
    scheduler.blocks |= {"a": ([1, 2], [21]), "b": ([1, 2, 3], [21]), "c": ([4], [0])}
    outputs = step(scheduler, {"a": 0, "b": 8, "c": 0}, {"a": "why"}, notes)
    assert [req_id for req_id, _ in outputs[0]] == ["a", "b"]
    assert "found in the prefix cache" in outputs[0][1][1]
    assert scheduler.served == ["c"]


@pytest.mark.usefixtures("notes")
def test_a_request_without_a_plan_that_fails_first_ends_with_an_error_too() -> None:
    """Through the hook that every request passes, of an engine that has seen no plan yet."""
    scheduler = Scheduler(Request("a", None, 3), Request("b", None, 3))
    refusals: list[tuple[int, str]] = []
    control = SimpleNamespace(note_refusal=lambda stream, error: refusals.append((stream, error)))
    core = SimpleNamespace(scheduler=scheduler, clairai_core_control=control)
    added: list[Any] = []
    add_request = wrap_add_request(lambda _, request: added.append(request))
    for number, request in enumerate(scheduler.requests.values()):
        request.clairai_request_mark = RequestMark(number)  # type: ignore[attr-defined]
        add_request(core, request)
    assert len(added) == 2
    output = Output(["a", "b"])
    setattr(output, FAILURES, {"b": "no room"})
    cached = SimpleNamespace(req_ids=["a", "b"], num_computed_tokens=[0, 0])
    scheduled = SimpleNamespace(scheduled_cached_reqs=cached, scheduled_new_reqs=[])
    outputs = scheduler.update_from_output(scheduled, output)
    assert outputs == {0: [("b", "the worker could not serve this request: no room")]}
    assert scheduler.served == ["a"]
    assert [stream for stream, _ in refusals] == [1]


def test_a_scheduler_is_watched_once_however_many_requests_come() -> None:
    scheduler = Scheduler(Request("a", None, 8))
    core = SimpleNamespace(scheduler=scheduler)
    watch_for_failures(core, lambda *_: None)
    wrapped = scheduler.update_from_output
    watch_for_failures(core, lambda *_: None)
    assert scheduler.update_from_output is wrapped
