"""An error on behalf of one request, planted at each stage of each listener of the worker's steps.

The model runners are toys in the shape of vLLM's V1 and V2; listeners are the real ones.
"""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np
import pytest
import torch

from clairai.compat import step_hooks
from clairai.compat.failed_requests import FAILURES
from clairai.engine.capture.capture_plan import CapturePlan
from clairai.engine.step import NewRequest, RequestMark, StepBatch
from clairai.engine.step_guard import StepGuard
from clairai.fields.ranges import OPEN_END
from tests.support.capture_parts import capture_plan
from tests.support.capture_rig import Rig, rig
from tests.support.random_plans import SITE_OF, WIDTH, row
from tests.support.repeat_engine import V1, V2, Engine, engine
from tests.support.steered_engine import Request, ToyFleet, faults, fleet
from tests.support.steering_plans import action, plan

SITE = next(iter(SITE_OF))


def adding(number: float, *, point: str = SITE, width: int = WIDTH) -> Any:
    return plan(action((0, OPEN_END), rows=(row(point, np.full(width, number)),)))


BAD_PLANS = {
    "a row too short to divide by": adding(1e-30),
    "a point without a site": adding(1.0, point="post_attn.7"),
    "a row of another width": adding(1.0, width=WIDTH - 1),
    "more rows than the tables hold": plan(
        *(action((0, 9), rows=(row(SITE, np.full(WIDTH, n + 1.0)),)) for n in range(49))
    ),
}


def is_steered_right(held: ToyFleet, *names: str) -> bool:
    return not [fault for seen in held.step(dict.fromkeys(names, 1)) for fault in faults(seen)]


@pytest.mark.attack(105)
@pytest.mark.parametrize("bad", BAD_PLANS.values(), ids=[*BAD_PLANS])
def test_a_plan_that_cannot_be_loaded_fails_alone_and_leaves_the_tables_as_they_were(
    bad: Any,
) -> None:
    held = fleet()
    guard = StepGuard([held.steering])
    held.open("good", Request(adding(2.0), seed=1))
    for number in range(60):  # more often than the tables have rows or programs
        name = f"bad-{number}"
        guard.begin([NewRequest(name, name, RequestMark(1), 1, bad)], [])
        assert [*guard.take_failures()] == [name]
        guard.begin([], [name])
    held.open("plain", Request(None, seed=2))
    held.open("next", Request(adding(3.0), seed=3))
    assert is_steered_right(held, "good", "plain", "next")


@pytest.mark.attack(106)
def test_a_program_that_was_not_written_is_never_taken_for_a_known_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    held = fleet()
    guard = StepGuard([held.steering])
    with monkeypatch.context() as planted:
        planted.setattr(held.tables, "put_program", lambda *_: 1 // 0)
        guard.begin([NewRequest("a", "a", RequestMark(1), 1, adding(2.0))], [])
        assert guard.take_failures() == {"a": "ZeroDivisionError"}
    held.open("b", Request(adding(2.0), seed=1))  # the same content
    assert is_steered_right(held, "b")


@pytest.mark.attack(107)
def test_a_step_that_cannot_be_steered_fails_its_steered_requests_and_steers_nobody(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    held = fleet()
    guard = StepGuard([held.steering])
    held.open("steered", Request(adding(2.0), seed=1))
    held.open("plain", Request(None, seed=2))
    held.open("absent", Request(adding(3.0), seed=3))
    assert is_steered_right(held, "plain", "steered")
    ones_R = np.ones(2, np.int32)
    with monkeypatch.context() as planted:
        planted.setattr(held.steering, "_enter_segments", lambda *_: 1 // 0)
        guard.place(StepBatch(["steered", "plain"], ones_R, ones_R))
    assert guard.take_failures() == {"steered": "ZeroDivisionError"}
    rows_TD = torch.ones(2, WIDTH)
    held.tables.site("a").apply(rows_TD, None)
    assert torch.equal(rows_TD, torch.ones(2, WIDTH))
    held.live["absent"].next_position = 5
    assert is_steered_right(held, "absent", "plain")


class Output:
    """What the toy runners sample."""


def sampled(one: Engine) -> dict[str, str]:
    """The failures that the output of this step carries."""
    return dict(getattr(one.sample_tokens(None), FAILURES, {}))  # type: ignore[attr-defined]


@pytest.fixture(params=[V1, V2], ids=["V1", "V2"])
def runner(request: pytest.FixtureRequest) -> type[Engine]:
    kind: type[Engine] = request.param
    return type(kind.__name__, (kind,), {"sample_tokens": lambda *_: Output()})


@pytest.mark.attack(108)
@pytest.mark.parametrize("has_c", [True, False], ids=["C", "Python"])
@pytest.mark.parametrize("stage", ["read", "add", "amend", "place", "end"])
def test_one_request_fails_and_the_scores_of_all_others_are_published(
    runner: type[Engine], stage: str, has_c: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    with engine(has_c=has_c, runner=runner) as one:
        one.step({"a": 2})
        assert sampled(one) == {}
        with monkeypatch.context() as planted:
            plant(one, stage, planted)
            one.step({"a": 1, "b": 2})
        assert [*sampled(one)] == ["b"]
        one.step({"a": 1, "b": 1})  # as with async scheduling: it is in one batch more
        assert sampled(one) == {}
        one.step({"a": 1}, finished=("b",))
        one.gpu.publish(9)
        streams = [read["requests"][: read["head"]["num_requests"]] for read in one.read()]
        assert [ids[0] for ids in streams] == [ord("a")] * 4
        assert ord("b") not in streams[2]
        counts = [read["tokens"].count(0) for read in one.read()]  # rows of the first request
        assert counts == [2, 1, 1, 1]


def plant(one: Engine, stage: str, planted: pytest.MonkeyPatch) -> None:
    """An error about b."""
    read = step_hooks._read_new_request

    def fail(*_: Any) -> Any:
        raise ValueError("planted")

    if stage == "read":
        planted.setattr(
            step_hooks,
            "_read_new_request",
            lambda new: fail() if new.req_id == "b" else read(new),
        )
    elif stage == "add":
        planted.setattr(one.other, "begin", lambda new, _: {n.req_id: ValueError() for n in new})
    elif stage == "amend":
        one.carried = {"b": None}
        planted.setattr(one.other, "amend", fail)
    else:
        planted.setattr(one.other, stage, fail)
        planted.setattr(one.other, f"{stage}_failed", lambda _: ["b"])


@pytest.mark.attack(109)
@pytest.mark.parametrize("is_graph", [True, False], ids=["graph", "Python"])
@pytest.mark.parametrize("method", ["announce", "finish"])
def test_a_step_that_cannot_be_published_is_counted_as_lost_and_no_later_one_is_mistaken(
    runner: type[Engine], method: str, is_graph: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    with engine(runner=runner) as one:
        one.is_graph = is_graph
        one.step({"a": 2})
        with monkeypatch.context() as planted:
            planted.setattr(one.publisher, method, lambda *_: 1 // 0)
            one.step({"a": 1, "b": 2})
        assert sampled(one) == {}  # tokens go on
        assert one.step_publisher.num_steps_lost == 1
        one.step({"b": 1, "a": 1})
        one.gpu.publish(9)
        heads = [read["head"] for read in one.read() if read["head"]["num_rows"]]
        if is_graph and method == "announce":  # its graph must not find the next step's header
            assert [read["head"]["num_rows"] for read in one.read()] == [2, 0, 2]
        numbers = [head["first_seq"] for head in heads]
        assert numbers == [*range(len(numbers))]  # no record is missing between them
        last = one.read()[-1]
        assert last["requests"][:2] == [ord("b"), ord("a")]
        assert one.publisher.headers.last().is_published


def captured(req_id: str, wanted: CapturePlan, stream: int) -> NewRequest:
    return NewRequest(req_id, f"api-{req_id}", RequestMark(stream), 4, None, wanted)


@pytest.mark.attack(110)
def test_a_capture_that_cannot_begin_fails_alone() -> None:
    with rig() as one:
        guard = StepGuard([one.capture])
        bad = msgspec.structs.replace(capture_plan(), points=("post_block.9",))
        for number in range(70):
            guard.begin([captured("bad", bad, 100 + number)], [])
            assert guard.take_failures() == {"bad": "KeyError"}
        guard.begin([captured("a", capture_plan(), 1), captured("b", capture_plan(), 2)], [])
        assert guard.take_failures() == {}
        run_step(one, "a", "b")
        one.capture.begin([], ("a", "b"))
        assert [one.ended(f"api-{name}", "kept").rows for name in "ab"] == [2, 2]


@pytest.mark.attack(111)
@pytest.mark.parametrize("stage", ["place", "end"])
def test_a_step_that_cannot_be_captured_fails_its_captured_requests_and_says_so(
    stage: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with rig() as one:
        guard = StepGuard([one.capture])
        guard.begin([captured("a", capture_plan(), 1), captured("b", capture_plan(), 2)], [])
        target: Any = one.capture._selector if stage == "place" else one.copier
        with monkeypatch.context() as planted:
            planted.setattr(target, "step" if stage == "place" else "copy", lambda *_: 1 // 0)
            ones_R = np.ones(2, np.int32)
            guard.place(StepBatch(["a", "plain"], ones_R, ones_R))
            guard.end(lambda: None)  # type: ignore[arg-type, return-value]
        assert guard.take_failures() == {"a": "ZeroDivisionError"}
        told = one.told(1)
        assert (told.state, "failed in the worker" in told.reason) == ("failed", True)
        run_step(one, "b")
        one.capture.begin([], ("b",))
        assert one.ended("api-b", "kept").rows == 2


def run_step(one: Rig, *names: str) -> None:
    one.step(*((name, 0, 2) for name in names))
