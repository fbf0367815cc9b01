"""Stop rules read scores from a real ring, and end a request the way vLLM does."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from enum import Enum
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest

from clairai.compat import stop_rules
from clairai.compat.stop_rules import RuleEnforcer, wrap_add_request, wrap_check_stop
from clairai.engine.publish.step_publisher import StepPublisher
from clairai.engine.rule_watcher import RuleWatcher
from clairai.engine.step import RequestMark
from clairai.errors import HandshakeError, VectorError
from clairai.fields.rules import StopRule
from clairai.probe.bank import EngineBank
from clairai.ring.attach import RingReader
from tests.support import toy_publisher as toy
from tests.support.probes import probe

PROMPT_LEN = 2
TOKEN = 5  # the one that every toy row carries


class Status(Enum):
    RUNNING = 1
    FINISHED_STOPPED = 2


class Request:
    """The parts of vLLM's Request that are read."""

    def __init__(self, enforcer: RuleEnforcer, number: int, *rules: StopRule) -> None:
        self.clairai_request_mark = RequestMark(1000 + number)
        self.clairai_rules = RuleWatcher(
            rules, tuple(rule.threshold or 0.0 for rule in rules), PROMPT_LEN
        )
        self.clairai_rule_enforcer = enforcer
        self.all_token_ids = [TOKEN] * PROMPT_LEN
        self.status = Status.RUNNING
        self.stop_reason: str | None = None
        enforcer.add(self.clairai_request_mark, self.clairai_rules)

    def is_finished(self) -> bool:
        return self.status is Status.FINISHED_STOPPED


@pytest.fixture
def step_publisher(runtime: Path) -> Iterator[StepPublisher]:
    with toy.running_publisher(runtime) as running:
        direction_D = np.full(toy.WIDTH, 1e-6, np.float32)  # its bias is its score
        columns: EngineBank = running.bank
        made = probe("p", point=toy.SECOND, direction_D=direction_D, bias=1.0)
        running.install(columns.add([made]))
        yield running


@contextmanager
def _enforcer(
    step_publisher: StepPublisher, steered: list[Any] | None = None
) -> Iterator[RuleEnforcer]:
    def steer(request: Any, rule: StopRule) -> None:
        if steered is None:
            raise VectorError("no vector is named so")
        steered.append((request, rule))

    made = RuleEnforcer(
        lambda: RingReader.attach(step_publisher.server.path, start="newest"), steer
    )
    try:
        yield made
    finally:
        made.close()


def _core() -> SimpleNamespace:
    """An engine core, as far as adding a request touches it."""
    return SimpleNamespace(scheduler=SimpleNamespace(update_from_output=lambda *_: {}))


def _generate(
    step_publisher: StepPublisher, request: Request, number: int, token: int = TOKEN
) -> bool:
    """One step: forward the newest token, sample the next, and check for the end."""
    if len(request.all_token_ids) == PROMPT_LEN:
        step_publisher.begin([toy.new_request(number, prompt_len=PROMPT_LEN)], [])
        toy.forward(step_publisher, number, start=0, count=PROMPT_LEN)
    else:
        toy.forward(step_publisher, number, start=len(request.all_token_ids) - 1, count=1)
    request.all_token_ids.append(token)
    return bool(wrap_check_stop(lambda *_: False)(request, 100))


def test_a_request_ends_when_its_rule_is_met_and_says_why(step_publisher: StepPublisher) -> None:
    with _enforcer(step_publisher) as enforcer:
        request = Request(enforcer, 1, StopRule("p", threshold=0.5, tokens=2))
        assert [_generate(step_publisher, request, 1) for _ in range(3)] == [False, False, True]
        assert request.status is Status.FINISHED_STOPPED
        assert request.stop_reason == "clairai: probe p >= 0.5 for 2 tokens"


def test_a_request_without_rules_is_not_looked_at() -> None:
    assert wrap_check_stop(lambda *_: True)(SimpleNamespace(), 1) is True
    assert wrap_check_stop(lambda *_: False)(SimpleNamespace(), 1) is False


def test_check_stop_is_wrapped_only_when_a_request_has_rules(
    step_publisher: StepPublisher, monkeypatch: pytest.MonkeyPatch
) -> None:
    def check_stop(*_: Any) -> bool:
        return False

    for name in ("vllm", "vllm.v1", "vllm.v1.core", "vllm.v1.core.sched"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    scheduler: Any = SimpleNamespace(check_stop=check_stop)
    monkeypatch.setattr(sys.modules["vllm.v1.core.sched"], "scheduler", scheduler, raising=False)
    add_request, core = wrap_add_request(lambda *_: None), _core()
    add_request(core, SimpleNamespace())
    assert scheduler.check_stop is check_stop
    with _enforcer(step_publisher) as enforcer:
        monkeypatch.setattr(stop_rules, "_get_enforcer", lambda _: enforcer)
        for number in (1, 2):
            add_request(core, Request(enforcer, number, StopRule("p", threshold=0.5)))
            assert vars(scheduler)["check_stop"].__wrapped__ is check_stop


def test_an_end_of_vllms_own_keeps_its_reason(step_publisher: StepPublisher) -> None:
    with _enforcer(step_publisher) as enforcer:
        request = Request(enforcer, 1, StopRule("p", threshold=0.5))
        _generate(step_publisher, request, 1)
        toy.forward(step_publisher, 1, start=PROMPT_LEN, count=1)
        request.all_token_ids.append(TOKEN)
        assert wrap_check_stop(lambda *_: True)(request, 100) is True
        assert request.stop_reason is None


def test_a_rule_that_steers_is_carried_out_once_and_the_answer_goes_on(
    step_publisher: StepPublisher,
) -> None:
    steered: list[Any] = []
    rule = StopRule("p", threshold=0.5, tokens=2, action="steer")
    with _enforcer(step_publisher, steered) as enforcer:
        request = Request(enforcer, 1, rule)
        assert not any(_generate(step_publisher, request, 1) for _ in range(5))
        assert steered == [(request, rule)]


def test_a_rule_that_triggers_with_the_last_token_does_not_steer(
    step_publisher: StepPublisher,
) -> None:
    steered: list[Any] = []
    with _enforcer(step_publisher, steered) as enforcer:
        request = Request(enforcer, 1, StopRule("p", threshold=0.5, action="steer"))
        _generate(step_publisher, request, 1)
        toy.forward(step_publisher, 1, start=PROMPT_LEN, count=1)
        request.all_token_ids.append(TOKEN)
        request.status = Status.FINISHED_STOPPED  # as vLLM's own check leaves it
        assert wrap_check_stop(lambda *_: True)(request, 100) is True
    assert steered == []


def test_rows_of_other_requests_and_choices_are_ignored(
    step_publisher: StepPublisher,
) -> None:
    with _enforcer(step_publisher) as enforcer:
        request = Request(enforcer, 1, StopRule("p", threshold=0.5, tokens=3))
        request.clairai_request_mark = RequestMark(1001, 1)
        enforcer.add(request.clairai_request_mark, request.clairai_rules)
        step_publisher.begin([toy.new_request(2, prompt_len=PROMPT_LEN)], [])
        toy.forward(step_publisher, 2, start=0, count=8)
        assert not _generate(step_publisher, request, 1)
        enforcer._poll()
        has_all_rows = request.clairai_rules.check([TOKEN] * (PROMPT_LEN + 2))
        assert not has_all_rows, "no row is of this choice"


def test_a_rule_that_cannot_be_carried_out_ends_the_answer(step_publisher: StepPublisher) -> None:
    with _enforcer(step_publisher) as enforcer:
        request = Request(enforcer, 1, StopRule("p", threshold=0.5, action="steer"))
        assert [_generate(step_publisher, request, 1) for _ in range(2)] == [False, True]
        assert request.stop_reason is not None
        assert "no vector is named so" in request.stop_reason


def test_scores_that_never_come_end_the_answer(
    step_publisher: StepPublisher, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("clairai.compat.stop_rules.SCORE_WAIT_S", 0.01)
    with _enforcer(step_publisher) as enforcer:
        request = Request(enforcer, 1, StopRule("p", threshold=0.5))
        request.all_token_ids += [TOKEN, TOKEN]  # a token was sampled, and no row published
        assert wrap_check_stop(lambda *_: False)(request, 100) is True
        assert request.stop_reason is not None
        assert "did not come" in request.stop_reason


def test_a_row_of_another_token_ends_the_answer(step_publisher: StepPublisher) -> None:
    with _enforcer(step_publisher) as enforcer:
        request = Request(enforcer, 1, StopRule("p", threshold=9.0))
        assert _generate(step_publisher, request, 1, token=TOKEN + 1) is False
        assert _generate(step_publisher, request, 1) is True
        assert request.stop_reason is not None
        assert "another token" in request.stop_reason


def test_a_row_that_is_ahead_of_its_token_does_not_end_the_answer_early(
    step_publisher: StepPublisher,
) -> None:
    """An engine that schedules ahead has published the next row before this token is checked."""
    with _enforcer(step_publisher) as enforcer:
        request = Request(enforcer, 1, StopRule("p", threshold=0.5, tokens=2))
        assert _generate(step_publisher, request, 1) is False
        for position in (PROMPT_LEN, PROMPT_LEN + 1):
            toy.forward(step_publisher, 1, start=position, count=1)
        request.all_token_ids.append(TOKEN)
        assert wrap_check_stop(lambda *_: False)(request, 100) is False
        request.all_token_ids.append(TOKEN)
        assert wrap_check_stop(lambda *_: False)(request, 100) is True


def test_the_ring_is_closed_with_the_last_request(step_publisher: StepPublisher) -> None:
    with _enforcer(step_publisher) as enforcer:
        first, second = (Request(enforcer, n, StopRule("p", threshold=9.0)) for n in (1, 2))
        enforcer.remove(first.clairai_request_mark, first.clairai_rules)
        assert _generate(step_publisher, second, 2) is False
        enforcer.remove(second.clairai_request_mark, second.clairai_rules)
        enforcer.remove(second.clairai_request_mark, second.clairai_rules)
        assert enforcer._reader is None


def test_a_request_that_took_a_used_stream_keeps_its_rules(step_publisher: StepPublisher) -> None:
    """The request that had the stream before has ended, but Python frees it only now."""
    with _enforcer(step_publisher) as enforcer:
        before, after = (Request(enforcer, 1, StopRule("p", threshold=0.5)) for _ in range(2))
        enforcer.remove(before.clairai_request_mark, before.clairai_rules)
        assert [_generate(step_publisher, after, 1) for _ in range(2)] == [False, True]


@pytest.mark.attack(122)
def test_a_rule_whose_scores_cannot_be_read_ends_its_answer_and_not_the_engine(
    step_publisher: StepPublisher, monkeypatch: pytest.MonkeyPatch
) -> None:
    with _enforcer(step_publisher) as enforcer:
        request = Request(enforcer, 1, StopRule("p", threshold=0.5))
        other = Request(enforcer, 2, StopRule("p", threshold=2.0))
        with monkeypatch.context() as planted:
            planted.setattr(enforcer, "check", lambda *_: 1 // 0)
            assert wrap_check_stop(lambda *_: False)(request, 100)
        assert request.status is Status.FINISHED_STOPPED
        assert "could not be checked: ZeroDivisionError" in str(request.stop_reason)
        assert [_generate(step_publisher, other, 2) for _ in range(2)] == [False, False]


@pytest.mark.attack(123)
def test_a_ring_with_no_room_for_another_reader_ends_the_answer_that_needs_one(
    step_publisher: StepPublisher, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Any program of this user can take all places of readers."""

    def refuse() -> RingReader:
        raise HandshakeError("64 readers are attached")

    added: list[Any] = []
    monkeypatch.setattr(stop_rules, "_install_check_stop", lambda: None)
    broken = RuleEnforcer(refuse, lambda *_: None)
    monkeypatch.setattr(stop_rules, "_get_enforcer", lambda _: broken)
    with _enforcer(step_publisher) as enforcer:
        request = Request(enforcer, 1, StopRule("p", threshold=0.5))
        wrap_add_request(lambda _, one: added.append(one))(_core(), request)
    assert added == [request]
    assert wrap_check_stop(lambda *_: False)(request, 100)
    assert "could not be checked: 64 readers are attached" in str(request.stop_reason)
