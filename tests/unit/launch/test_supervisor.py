"""Takes engines that die as told; gives what is started again, and what is said of it."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import pytest

from clairai.errors import ClairaiError, EngineGoneError
from clairai.launch.supervisor import DeathPolicy, RestartPolicy, Supervisor
from clairai.proxy.engine_info import HealthStatus

AT_ONCE = RestartPolicy(max_restarts=2, long_s=1000.0, pause_s=0.0)


@dataclass
class Dying:
    """An engine that comes up or not, and is dead when it is next looked at."""

    is_good: bool = True
    is_stopped: bool = False

    def wait_ready(self, *, stop: Callable[[], bool], tick: Callable[[], None]) -> bool:
        tick()
        if not self.is_good:
            raise EngineGoneError("it could not start; /a/path of its log")
        return not stop()

    def is_alive(self) -> bool:
        return False

    def describe_death(self) -> str:
        return "it was killed; /a/path of its log"

    def ending(self) -> str:
        return "it was killed"

    def stop(self, *, hurry: Callable[[], bool]) -> None:
        assert not hurry()
        self.is_stopped = True


@dataclass
class Scene:
    """Serving, with the engines of a script; told to stop when `is_enough` says so."""

    script: Iterator[Dying]
    is_enough: Callable[[Scene], bool] = lambda _: False
    started: list[Dying] = field(default_factory=list)
    told: list[HealthStatus | None] = field(default_factory=list)
    said: list[str] = field(default_factory=list)
    num_announced: int = 0
    trouble: Exception | None = None

    def start(self) -> Dying:
        assert all(engine.is_stopped for engine in self.started)
        self.started.append(next(self.script))
        return self.started[-1]

    def await_ready(self, engine: Dying) -> bool:
        return engine.wait_ready(stop=self, tick=lambda: None)

    def announce(self) -> None:
        self.num_announced += 1

    def tell(self, word: HealthStatus | None) -> None:
        self.told.append(word)

    def say(self, line: str) -> None:
        self.said.append(line)

    def check(self) -> None:
        if self.trouble is not None:
            raise self.trouble

    def __call__(self) -> bool:
        return self.is_enough(self)

    def is_urgent(self) -> bool:
        return False


def _run(scene: Scene, on_death: DeathPolicy, patience: RestartPolicy = AT_ONCE) -> None:
    Supervisor(scene, on_death=on_death, patience=patience).run(scene)  # type: ignore[arg-type]


def test_an_engine_that_dies_ends_everything_where_that_was_asked_for() -> None:
    scene = Scene(iter([Dying()]))
    with pytest.raises(EngineGoneError, match="it was killed"):
        _run(scene, "end")
    assert scene.started[0].is_stopped
    assert scene.told == [
        HealthStatus("starting", "the engine is starting"),
        None,
        HealthStatus("failed", "the engine is gone: it was killed"),
    ]


@pytest.mark.parametrize("on_death", ["end", "restart"])
def test_an_engine_that_never_served_is_not_started_again(on_death: DeathPolicy) -> None:
    scene = Scene(iter([Dying(is_good=False)]))
    with pytest.raises(EngineGoneError, match="it could not start"):
        _run(scene, on_death)
    assert scene.started[0].is_stopped
    assert scene.num_announced == 0


def test_an_engine_that_dies_is_started_again_and_so_is_one_that_then_cannot_start() -> None:
    script = iter([Dying(), Dying(is_good=False), Dying()])
    scene = Scene(script, is_enough=lambda scene: scene.num_announced == 2)
    _run(scene, "restart")
    assert scene.num_announced == 2
    assert all(engine.is_stopped for engine in scene.started)
    restarting = [word for word in scene.told if word is not None and "again" in word.reason]  # type: ignore[operator]
    assert [word.status for word in restarting] == ["starting", "starting"]
    assert "attempt 2 of 2" in str(restarting[-1].reason)


def test_after_deaths_in_a_row_it_gives_up_says_so_and_waits_to_be_ended() -> None:
    script = (Dying() for _ in range(9))
    scene = Scene(script, is_enough=_failed)
    with pytest.raises(EngineGoneError):
        _run(scene, "restart")
    assert len(scene.started) == 1 + AT_ONCE.max_restarts
    assert scene.told[-1] == HealthStatus(
        "failed", "the engine died 3 times in a row, at last: it was killed"
    )
    assert "not started again" in scene.said[-1]


def _failed(scene: Scene) -> bool:
    word = scene.told[-1] if scene.told else None
    return word is not None and word.status == "failed"


def test_an_engine_that_served_long_enough_has_all_attempts_again() -> None:
    script = (Dying() for _ in range(9))
    scene = Scene(script, is_enough=lambda scene: scene.num_announced == 6)
    _run(scene, "restart", RestartPolicy(max_restarts=1, long_s=0.0, pause_s=0.0))
    assert scene.num_announced == 6


def test_nothing_told_to_the_outside_names_a_path() -> None:
    scene = Scene((Dying() for _ in range(9)), is_enough=_failed)
    with pytest.raises(EngineGoneError):
        _run(scene, "restart")
    assert not [word for word in scene.told if word is not None and "/" in str(word.reason)]


def test_pauses_grow_to_a_bound() -> None:
    patience = RestartPolicy(pause_s=1.0, max_pause_s=5.0)
    assert [patience.pause_after(num) for num in (1, 2, 3, 4, 90)] == [1.0, 2.0, 4.0, 5.0, 5.0]


def test_a_pause_ends_when_told_to_stop() -> None:
    began_s = time.monotonic()
    scene = Scene(iter([Dying()]), is_enough=lambda scene: len(scene.said) == 2)
    _run(scene, "restart", RestartPolicy(pause_s=60.0, max_pause_s=60.0))
    assert time.monotonic() - began_s < 30.0


def test_trouble_with_the_proxy_ends_the_engine_too() -> None:
    scene = Scene(iter([Dying()]), trouble=ClairaiError("the proxy has ended"))
    with pytest.raises(ClairaiError, match="the proxy has ended"):
        _run(scene, "restart")
    assert scene.started[0].is_stopped
