"""Keeps one engine running until told to stop, with a limited number of restarts."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final, Literal, Protocol

from clairai.errors import EngineGoneError
from clairai.launch.engine_process import POLL_S
from clairai.launch.liveness import Trouble
from clairai.proxy.engine_facts import HealthStatus
from clairai.proxy.observe.observer import HealthState

DeathPolicy = Literal["restart", "end"]
STARTING: Final = HealthStatus("starting", "the engine is starting")


class StopRequest(Protocol):
    """Says whether to stop, and whether at once."""

    def __call__(self) -> bool: ...
    def is_urgent(self) -> bool: ...


class SupervisedEngine(Protocol):
    """What the supervisor uses of an EngineProcess."""

    def wait_ready(self, *, stop: Callable[[], bool], tick: Callable[[], None]) -> bool: ...
    def is_alive(self) -> bool: ...
    def find_trouble(self) -> Trouble | None: ...
    def describe_death(self) -> str: ...
    def exit_reason(self) -> str: ...
    def stop(self, *, is_urgent: Callable[[], bool]) -> None: ...


class EngineHost(Protocol):
    """What the supervisor tells of an engine, and to whom."""

    def start(self) -> SupervisedEngine: ...

    def wait_ready(self, engine: SupervisedEngine) -> bool:
        """False if told to stop; EngineGoneError if it died."""

    def announce(self) -> None:
        """Tell the user that the engine serves."""

    def set_health(self, status: HealthStatus | None) -> None:
        """What the proxy answers about the engine; None: it asks the engine itself."""

    def end_answers(self) -> None:
        """End every answer that is being given, with an error: the engine will not go on."""

    def expect_end(self) -> None:
        """The engine is about to be stopped: that its ring goes is no news."""

    def say(self, line: str) -> None:
        """Print a line for the user."""

    def check(self) -> None:
        """Called often; raises if there is another reason to end."""


@dataclass(frozen=True)
class RestartPolicy:
    """How often to start again. An engine that served for `long_s` resets the count."""

    max_restarts: int = 3  # in a row
    long_s: float = 120.0
    pause_s: float = 1.0  # before the first restart; doubled for each death after it
    max_pause_s: float = 30.0

    def pause_after(self, num_deaths: int) -> float:
        return min(self.pause_s * 2.0 ** (num_deaths - 1), self.max_pause_s)


@dataclass(frozen=True)
class _Death:
    error: EngineGoneError
    reason: str  # without the end of the log, which may name paths
    served_s: float | None  # None: it never served


class Supervisor:
    """Runs one engine after the other."""

    def __init__(
        self, host: EngineHost, *, on_death: DeathPolicy, policy: RestartPolicy | None = None
    ) -> None:
        self._host = host
        self._on_death = on_death
        self._policy = policy or RestartPolicy()
        self._num_deaths = 0
        self._has_served = False

    def run(self, stop: StopRequest) -> None:
        """Return when told to stop; EngineGoneError if the engine ended and does not come back.

        An engine that fails in its first start is not started again: it would fail again.
        """
        while (death := self._run_engine(stop)) is not None:
            if not self._can_restart():
                raise death.error
            is_well_again = (death.served_s or 0.0) >= self._policy.long_s
            self._num_deaths = 1 if is_well_again else self._num_deaths + 1
            if self._num_deaths > self._policy.max_restarts:
                self._give_up(death, stop)
            self._pause(death, stop)

    def _run_engine(self, stop: StopRequest) -> _Death | None:
        """One engine, from its start to its end; None if the end was asked for."""
        if stop():
            return None
        self._host.set_health(STARTING)
        engine = self._host.start()
        ready_s: float | None = None
        try:
            if self._host.wait_ready(engine):
                ready_s = time.monotonic()
                self._host.set_health(None)
                self._host.announce()
                self._watch(engine, stop)
        except EngineGoneError as error:
            served_s = None if ready_s is None else time.monotonic() - ready_s
            death = _Death(error, engine.exit_reason(), served_s)
            self._host.set_health(self._status_after(death))
            self._host.end_answers()
            return death
        finally:
            if stop():
                self._host.say("stopping vLLM (Ctrl-C once more: at once)")
            self._host.expect_end()
            engine.stop(is_urgent=stop.is_urgent)
        return None

    def _can_restart(self) -> bool:
        return self._has_served and self._on_death == "restart"

    def _status_after(self, death: _Death) -> HealthStatus:
        """What clients learn while the engine's processes are being ended."""
        self._has_served |= death.served_s is not None
        state: HealthState = "starting" if self._can_restart() else "failed"
        return HealthStatus(state, f"the engine is gone: {death.reason}")

    def _watch(self, engine: SupervisedEngine, stop: StopRequest) -> None:
        last: Trouble | None = None
        while not stop():
            self._host.check()
            trouble = engine.find_trouble()
            if not engine.is_alive() or (trouble is not None and trouble.is_fatal):
                raise EngineGoneError(engine.describe_death())
            if trouble != last:
                self._report(trouble)
                last = trouble
            time.sleep(POLL_S)

    def _report(self, trouble: Trouble | None) -> None:
        """Tell user and proxy of a process that may recover."""
        if trouble is None:
            self._host.say("every process of the engine makes progress again")
            self._host.set_health(None)
            return
        self._host.say(f"warning: {trouble.reason}")
        stalled = trouble.is_stalling
        status = HealthStatus("degraded", trouble.reason, trouble.since, is_stalled=stalled)
        self._host.set_health(status)

    def _pause(self, death: _Death, stop: StopRequest) -> None:
        pause_s = self._policy.pause_after(self._num_deaths)
        attempt = f"{self._num_deaths} of {self._policy.max_restarts}"
        self._host.say(death.error.reason)
        self._host.say(f"starting vLLM again in {pause_s:g} s (attempt {attempt})")
        reason = f"the engine is gone: {death.reason}; it is started again (attempt {attempt})"
        self._host.set_health(HealthStatus("starting", reason))
        due_s = time.monotonic() + pause_s
        self._wait(lambda: stop() or time.monotonic() >= due_s)

    def _give_up(self, death: _Death, stop: StopRequest) -> None:
        """Keep the proxy, so that clients learn why there is no answer."""
        reason = f"the engine died {self._num_deaths} times in a row, at last: {death.reason}"
        self._host.say(death.error.reason)
        self._host.say(f"{reason}; not started again. Ctrl-C ends the proxy")
        self._host.set_health(HealthStatus("failed", reason))
        self._wait(stop)
        raise death.error

    def _wait(self, until: Callable[[], bool]) -> None:
        while not until():
            self._host.check()
            time.sleep(POLL_S)
