"""Restarts of engines that die on cue, and what the user and the proxy are told."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import pytest

from clairai.errors import ClairaiError, EngineGoneError
from clairai.launch.liveness import Trouble
from clairai.launch.supervisor import DeathPolicy, RestartPolicy, Supervisor
from clairai.proxy.engine_facts import HealthStatus

AT_ONCE = RestartPolicy(max_restarts=2, long_s=1000.0, pause_s=0.0)


@dataclass
class DyingEngine:
    """An engine that starts or not, and is dead when it is next looked at."""

    can_start: bool = True
    is_end_expected: bool = False
    is_stopped: bool = False
    troubles: Iterator[Trouble | None] = field(default_factory=lambda: iter(()))
    trouble: Trouble | None = None

    def wait_ready(self, *, stop: Callable[[], bool], tick: Callable[[], None]) -> bool:
        tick()
        if not self.can_start:
            raise EngineGoneError("it could not start; /a/path of its log")
        return not stop()

    def is_alive(self) -> bool:
        """While it has troubles to tell of."""
        return self.trouble is not None

    def find_trouble(self) -> Trouble | None:
        self.trouble = next(self.troubles, None)
        return self.trouble

    def describe_death(self) -> str:
        return "it was killed; /a/path of its log"

    def exit_reason(self) -> str:
        return "it was killed"

    def stop(self, *, is_urgent: Callable[[], bool]) -> None:
        assert not is_urgent()
        assert self.is_end_expected
        self.is_stopped = True


@dataclass
class FakeHost:
    """An EngineHost whose engines follow a script; told to stop when `is_done` says so."""

    script: Iterator[DyingEngine]
    is_done: Callable[[FakeHost], bool] = lambda _: False
    started: list[DyingEngine] = field(default_factory=list)
    statuses: list[HealthStatus | None] = field(default_factory=list)
    said: list[str] = field(default_factory=list)
    num_announced: int = 0
    num_ended_answers: int = 0
    trouble: Exception | None = None

    def start(self) -> DyingEngine:
        assert all(engine.is_stopped for engine in self.started)
        self.started.append(next(self.script))
        return self.started[-1]

    def wait_ready(self, engine: DyingEngine) -> bool:
        return engine.wait_ready(stop=self, tick=lambda: None)

    def announce(self) -> None:
        self.num_announced += 1

    def set_health(self, status: HealthStatus | None) -> None:
        self.statuses.append(status)

    def end_answers(self) -> None:
        assert not self.started[-1].is_stopped  # at once: ending an engine takes seconds
        self.num_ended_answers += 1

    def expect_end(self) -> None:
        self.started[-1].is_end_expected = True

    def say(self, line: str) -> None:
        self.said.append(line)

    def check(self) -> None:
        if self.trouble is not None:
            raise self.trouble

    def __call__(self) -> bool:
        return self.is_done(self)

    def is_urgent(self) -> bool:
        return False


def _run(host: FakeHost, on_death: DeathPolicy, policy: RestartPolicy = AT_ONCE) -> None:
    Supervisor(host, on_death=on_death, policy=policy).run(host)  # type: ignore[arg-type]


def test_an_engine_that_dies_ends_everything_with_on_death_end() -> None:
    host = FakeHost(iter([DyingEngine()]))
    with pytest.raises(EngineGoneError, match="it was killed"):
        _run(host, "end")
    assert host.started[0].is_stopped
    assert host.statuses == [
        HealthStatus("starting", "the engine is starting"),
        None,
        HealthStatus("failed", "the engine is gone: it was killed"),
    ]


@pytest.mark.parametrize("on_death", ["end", "restart"])
def test_an_engine_that_never_served_is_not_started_again(on_death: DeathPolicy) -> None:
    host = FakeHost(iter([DyingEngine(can_start=False)]))
    with pytest.raises(EngineGoneError, match="it could not start"):
        _run(host, on_death)
    assert host.started[0].is_stopped
    assert host.num_announced == 0


def test_an_engine_that_dies_is_started_again_and_so_is_one_that_then_cannot_start() -> None:
    script = iter([DyingEngine(), DyingEngine(can_start=False), DyingEngine()])
    host = FakeHost(script, is_done=lambda host: host.num_announced == 2)
    _run(host, "restart")
    assert host.num_announced == 2
    assert all(engine.is_stopped for engine in host.started)
    restarting = [
        status for status in host.statuses if status is not None and "again" in str(status.reason)
    ]
    assert [status.status for status in restarting] == ["starting", "starting"]
    assert "attempt 2 of 2" in str(restarting[-1].reason)


def test_after_deaths_in_a_row_it_gives_up_and_waits_for_the_stop() -> None:
    script = (DyingEngine() for _ in range(9))
    host = FakeHost(script, is_done=_failed)
    with pytest.raises(EngineGoneError):
        _run(host, "restart")
    assert len(host.started) == 1 + AT_ONCE.max_restarts
    assert host.statuses[-1] == HealthStatus(
        "failed", "the engine died 3 times in a row, at last: it was killed"
    )
    assert "not started again" in host.said[-1]


def _failed(host: FakeHost) -> bool:
    status = host.statuses[-1] if host.statuses else None
    return status is not None and status.status == "failed"


def test_an_engine_that_served_long_enough_has_all_attempts_again() -> None:
    script = (DyingEngine() for _ in range(9))
    host = FakeHost(script, is_done=lambda host: host.num_announced == 6)
    _run(host, "restart", RestartPolicy(max_restarts=1, long_s=0.0, pause_s=0.0))
    assert host.num_announced == 6


def test_no_health_reason_names_a_path() -> None:
    host = FakeHost((DyingEngine() for _ in range(9)), is_done=_failed)
    with pytest.raises(EngineGoneError):
        _run(host, "restart")
    assert not [
        status for status in host.statuses if status is not None and "/" in str(status.reason)
    ]


def test_pauses_grow_to_a_bound() -> None:
    policy = RestartPolicy(pause_s=1.0, max_pause_s=5.0)
    assert [policy.pause_after(num) for num in (1, 2, 3, 4, 90)] == [1.0, 2.0, 4.0, 5.0, 5.0]


def test_a_pause_ends_when_told_to_stop() -> None:
    began_s = time.monotonic()
    host = FakeHost(iter([DyingEngine()]), is_done=lambda host: len(host.said) == 2)
    _run(host, "restart", RestartPolicy(pause_s=60.0, max_pause_s=60.0))
    assert time.monotonic() - began_s < 30.0


def test_trouble_with_the_proxy_ends_the_engine_too() -> None:
    host = FakeHost(iter([DyingEngine()]), trouble=ClairaiError("the proxy has ended"))
    with pytest.raises(ClairaiError, match="the proxy has ended"):
        _run(host, "restart")
    assert host.started[0].is_stopped


def test_answers_are_ended_at_every_death_before_the_engine_is_stopped() -> None:
    script = iter([DyingEngine(), DyingEngine(), DyingEngine()])
    host = FakeHost(script, is_done=lambda host: host.num_announced == 3)
    _run(host, "restart")
    assert host.num_ended_answers == 2


def test_an_engine_whose_process_hangs_is_ended_and_started_again() -> None:
    hung = Trouble("the engine core (process 7) makes no progress", 1000.0, is_fatal=True)
    script = iter([DyingEngine(troubles=iter([hung])), DyingEngine()])
    host = FakeHost(script, is_done=lambda host: host.num_announced == 2)
    _run(host, "restart")
    assert host.started[0].is_stopped
    assert host.num_ended_answers == 1


def test_health_says_what_is_slow_and_since_when_while_it_may_recover() -> None:
    slow = Trouble("the engine core (process 7) makes no progress", 1000.0, is_fatal=False)
    host = FakeHost(iter([DyingEngine(troubles=iter([slow, slow]))]))
    with pytest.raises(EngineGoneError):
        _run(host, "end")
    degraded = HealthStatus("degraded", slow.reason, 1000.0, is_stalled=True)
    assert host.statuses.count(degraded) == 1
    assert host.statuses[-1] == HealthStatus("failed", "the engine is gone: it was killed")
