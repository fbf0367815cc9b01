"""An error of one listener at one stage ends the requests it belongs to; all others go on."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from clairai.engine.step import NewRequest, RequestErrors, RequestMark, StepBatch, try_each
from clairai.engine.step_guard import StepGuard
from clairai.errors import RequestError


class Listener:
    """Knows requests, and raises where a test says."""

    def __init__(self, raises: str = "", about: str = "") -> None:
        self.raises, self.about = raises, about
        self.known: set[str] = set()
        self.stages: list[str] = []
        self.dropped: dict[str, str] = {}

    def _hear(self, stage: str) -> None:
        self.stages.append(stage)
        if self.raises == stage and not self.about:
            raise ValueError("planted")

    def begin(self, new: Any, finished: Any) -> RequestErrors:
        self._hear("begin")
        self.known -= set(finished)
        return try_each(new, self._add)

    def _add(self, request: NewRequest) -> None:
        if self.raises == "add" and request.req_id == self.about:
            raise RequestError("planted for one")
        self.known.add(request.req_id)

    def amend(self, req_id: str, plan: Any) -> None:
        del req_id, plan
        self._hear("amend")

    def place(self, batch: StepBatch) -> None:
        del batch
        self._hear("place")

    def place_failed(self, batch: StepBatch) -> list[str]:
        return [req_id for req_id in batch.req_ids if req_id in self.known]

    def reject(self, rejected_R: Any) -> None:
        del rejected_R
        self._hear("reject")

    def end(self, inputs: Any) -> None:
        del inputs
        self._hear("end")

    def end_failed(self, batch: StepBatch | None) -> list[str]:
        return [] if batch is None else self.place_failed(batch)

    def drop(self, req_id: str, reason: str) -> None:
        self.known.discard(req_id)
        self.dropped[req_id] = reason
        if self.raises == "drop":
            raise ValueError("planted")

    def can_skip(self) -> bool:
        return True

    def before_dummy_run(self) -> None: ...

    def after_dummy_run(self) -> None: ...


@pytest.fixture(autouse=True)
def quiet(caplog: pytest.LogCaptureFixture) -> Iterator[None]:
    with caplog.at_level(logging.CRITICAL, "clairai.step"):
        yield


def request(name: str) -> NewRequest:
    return NewRequest(name, name, RequestMark(1), 1)


def batch(*names: str) -> StepBatch:
    ones_R = np.ones(len(names), np.int32)
    return StepBatch(names, ones_R, ones_R)


def step(guard: StepGuard, *names: str) -> tuple[bool, dict[str, str]]:
    guard.place(batch(*names))
    return guard.end(lambda: None), guard.take_failures()  # type: ignore[arg-type, return-value]


def test_a_step_without_errors_fails_nobody_and_may_be_skipped() -> None:
    first, second = Listener(), Listener()
    guard = StepGuard([first, second])
    guard.begin([request("a")], ["old"])
    assert step(guard, "a") == (True, {})
    assert first.stages == second.stages == ["begin", "place", "end"]


@pytest.mark.parametrize("at", [0, 1, 2])
def test_a_request_that_a_listener_cannot_add_fails_alone(at: int) -> None:
    listeners = [Listener(), Listener(), Listener()]
    listeners[at] = Listener(raises="add", about="b")
    guard = StepGuard(listeners)
    guard.begin([request(name) for name in "abc"], [])
    assert step(guard, "a", "b", "c") == (False, {"b": "planted for one"})
    for listener in listeners:
        assert listener.known == {"a", "c"}
        assert listener.dropped == {"b": "planted for one"}
        assert listener.stages == ["begin", "place", "end"]


def test_the_failures_of_a_step_are_reported_once() -> None:
    guard = StepGuard([Listener(raises="add", about="a")])
    guard.begin([request("a")], [])
    assert step(guard, "a")[1]
    assert step(guard, "a") == (True, {})


def test_a_request_that_cannot_be_read_fails_alone() -> None:
    listener = Listener()
    guard = StepGuard([listener])
    read = [guard.read("a", lambda: request("a")), guard.read("b", lambda: 1 // 0)]  # type: ignore[arg-type, return-value]
    assert [one and one.req_id for one in read] == ["a", None]
    guard.begin([one for one in read if one is not None], [])
    assert step(guard, "a", "b")[1] == {"b": "ZeroDivisionError"}
    assert listener.known == {"a"}


@pytest.mark.parametrize("at", [0, 1])
def test_newcomers_fail_if_a_listener_cannot_begin_and_running_requests_go_on(at: int) -> None:
    listeners = [Listener(), Listener()]
    guard = StepGuard(listeners)
    guard.begin([request("old")], [])
    step(guard, "old")
    listeners[at].raises = "begin"
    guard.begin([request("new")], [])
    assert step(guard, "old", "new")[1] == {"new": "ValueError"}
    assert [one.known for one in listeners] == [{"old"}, {"old"}]


@pytest.mark.parametrize("stage", ["place", "end"])
@pytest.mark.parametrize("at", [0, 1])
def test_an_error_of_the_step_fails_those_whom_the_listener_serves_in_it(
    stage: str, at: int
) -> None:
    listeners = [Listener(), Listener()]
    guard = StepGuard(listeners)
    guard.begin([request("a"), request("elsewhere")], [])
    listeners[at].raises = stage
    listeners[at].known.discard("plain")
    assert step(guard, "a", "plain") == (False, {"a": "ValueError"})
    assert listeners[1 - at].stages[-2:] == ["place", "end"]
    assert listeners[at].known == {"elsewhere"}


def test_a_change_that_cannot_be_applied_fails_its_request() -> None:
    first, second = Listener(), Listener(raises="amend")
    guard = StepGuard([first, second])
    guard.begin([request("a"), request("b")], [])
    guard.amend("a", lambda listener: listener.amend("a", None))
    assert step(guard, "a", "b")[1] == {"a": "ValueError"}
    assert first.known == second.known == {"b"}


def test_a_listener_that_cannot_drop_a_request_keeps_no_other_from_it() -> None:
    first, second = Listener(raises="drop"), Listener()
    guard = StepGuard([first, second])
    guard.begin([request("a")], [])
    guard.fail("a", ValueError("planted"))
    assert second.dropped == {"a": "ValueError"}


def test_a_listener_that_cannot_make_the_step_safe_ends_the_engine() -> None:
    """Nothing may be served that is not known to be as asked."""

    class Lost(Listener):
        def place_failed(self, batch: StepBatch) -> list[str]:
            del batch
            raise RuntimeError("the device is gone")

    guard = StepGuard([Lost(raises="place")])
    guard.begin([request("a")], [])
    with pytest.raises(RuntimeError, match="the device is gone"):
        guard.place(batch("a"))


def test_every_error_is_logged_with_its_cause(caplog: pytest.LogCaptureFixture) -> None:
    guard = StepGuard([Listener(raises="place")])
    with caplog.at_level(logging.ERROR, "clairai.step"):
        guard.begin([request("a")], [])
        guard.place(batch("plain"))
    assert [record.message for record in caplog.records] == ["Listener failed in a step"]
    assert caplog.records[0].exc_info is not None


@pytest.mark.parametrize("at", [0, 1])
def test_requests_fail_of_which_a_listener_cannot_forget_rejected_drafts(at: int) -> None:
    listeners = [Listener(), Listener()]
    listeners[at].raises = "reject"
    guard = StepGuard(listeners)
    guard.begin([request("a")], [])
    guard.place(batch("a", "b"))
    guard.reject(np.ones(2, np.int32))
    guard.end(lambda: None)  # type: ignore[arg-type, return-value]
    assert guard.take_failures() == {"a": "ValueError"}
    assert listeners[0].stages == listeners[1].stages == ["begin", "place", "reject", "end"]
