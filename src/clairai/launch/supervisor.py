"""Takes a way to start an engine; keeps one running until told to stop, or says why not."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final, Literal, Protocol

from clairai.errors import EngineGoneError
from clairai.launch.engine_process import LOOK_PAUSE_S
from clairai.proxy.engine_info import HealthStatus

DeathPolicy = Literal["restart", "end"]
STARTING: Final = HealthStatus("starting", "the engine is starting")


class StopRequest(Protocol):
    """Whether to stop, and whether at once."""

    def __call__(self) -> bool: ...
    def is_urgent(self) -> bool: ...


class SupervisedEngine(Protocol):
    """As EngineProcess has it."""

    def wait_ready(self, *, stop: Callable[[], bool], tick: Callable[[], None]) -> bool: ...
    def is_alive(self) -> bool: ...
    def describe_death(self) -> str: ...
    def ending(self) -> str: ...
    def stop(self, *, hurry: Callable[[], bool]) -> None: ...


class EngineHost(Protocol):
    """What happens around an engine."""

    def start(self) -> SupervisedEngine: ...

    def await_ready(self, engine: SupervisedEngine) -> bool:
        """False if told to stop; EngineGoneError if it died."""

    def announce(self) -> None:
        """It serves."""

    def tell(self, word: HealthStatus | None) -> None:
        """To whoever asks the proxy; None: the engine can be asked itself."""

    def say(self, line: str) -> None:
        """To whoever watches us."""

    def check(self) -> None:
        """Comes every moment; raises if there is another reason to end."""


@dataclass(frozen=True)
class RestartPolicy:
    """How often to start again; an engine that served for `long_s` counts as well again."""

    max_restarts: int = 3  # in a row
    long_s: float = 120.0
    pause_s: float = 1.0  # before the first new start; doubled for each death after it
    max_pause_s: float = 30.0

    def pause_after(self, num_deaths: int) -> float:
        return min(self.pause_s * 2.0 ** (num_deaths - 1), self.max_pause_s)


@dataclass(frozen=True)
class _Death:
    error: EngineGoneError
    ending: str  # without what the log says of it, which may name paths
    served_s: float | None  # None: it never did


class Supervisor:
    """One engine after the other."""

    def __init__(
        self, serving: EngineHost, *, on_death: DeathPolicy, patience: RestartPolicy | None = None
    ) -> None:
        self._serving = serving
        self._on_death = on_death
        self._patience = patience or RestartPolicy()
        self._num_deaths = 0
        self._has_served = False

    def run(self, stop: StopRequest) -> None:
        """Return when told to stop; EngineGoneError if the engine ended and does not come back.

        One that cannot even be started the first time is not started again: it would fail again.
        """
        while (death := self._live(stop)) is not None:
            self._has_served |= death.served_s is not None
            if not self._has_served or self._on_death == "end":
                self._serving.tell(HealthStatus("failed", f"the engine is gone: {death.ending}"))
                raise death.error
            is_well_again = (death.served_s or 0.0) >= self._patience.long_s
            self._num_deaths = 1 if is_well_again else self._num_deaths + 1
            if self._num_deaths > self._patience.max_restarts:
                self._give_up(death, stop)
            self._pause(death, stop)

    def _live(self, stop: StopRequest) -> _Death | None:
        """One engine, from its start to its end; None if the end was asked for."""
        if stop():
            return None
        self._serving.tell(STARTING)
        engine = self._serving.start()
        ready_s: float | None = None
        try:
            if self._serving.await_ready(engine):
                ready_s = time.monotonic()
                self._serving.tell(None)
                self._serving.announce()
                self._watch(engine, stop)
        except EngineGoneError as error:
            served_s = None if ready_s is None else time.monotonic() - ready_s
            return _Death(error, engine.ending(), served_s)
        finally:
            if stop():
                self._serving.say("stopping vLLM (Ctrl-C once more: at once)")
            engine.stop(hurry=stop.is_urgent)
        return None

    def _watch(self, engine: SupervisedEngine, stop: StopRequest) -> None:
        while not stop():
            self._serving.check()
            if not engine.is_alive():
                raise EngineGoneError(engine.describe_death())
            time.sleep(LOOK_PAUSE_S)

    def _pause(self, death: _Death, stop: StopRequest) -> None:
        pause_s = self._patience.pause_after(self._num_deaths)
        attempt = f"{self._num_deaths} of {self._patience.max_restarts}"
        self._serving.say(death.error.reason)
        self._serving.say(f"starting vLLM again in {pause_s:g} s (attempt {attempt})")
        reason = f"the engine is gone: {death.ending}; it is started again (attempt {attempt})"
        self._serving.tell(HealthStatus("starting", reason))
        due_s = time.monotonic() + pause_s
        self._wait(lambda: stop() or time.monotonic() >= due_s)

    def _give_up(self, death: _Death, stop: StopRequest) -> None:
        """The proxy stays, so that whoever asks it learns why there is no answer."""
        reason = f"the engine died {self._num_deaths} times in a row, at last: {death.ending}"
        self._serving.say(death.error.reason)
        self._serving.say(f"{reason}; not started again. Ctrl-C ends the proxy")
        self._serving.tell(HealthStatus("failed", reason))
        self._wait(stop)
        raise death.error

    def _wait(self, until: Callable[[], bool]) -> None:
        while not until():
            self._serving.check()
            time.sleep(LOOK_PAUSE_S)
