"""Whoever reads a large body beside an event loop rests after each step."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from clairai.fields.turns import REST, end_step, run_in_turns


@pytest.fixture
def use(monkeypatch: pytest.MonkeyPatch) -> Callable[[float], None]:
    """Uses the processor for so long."""
    now_s = [0.0]
    monkeypatch.setattr("time.thread_time", lambda: now_s[0])

    def pass_by(seconds: float) -> None:
        now_s[0] += seconds

    return pass_by


@pytest.fixture
def rests(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    made: list[float] = []
    monkeypatch.setattr("time.sleep", made.append)
    return made


def test_a_step_is_followed_by_a_rest_several_times_as_long(
    use: Callable[[float], None], rests: list[float]
) -> None:
    def work() -> str:
        for seconds in (0.002, 0.004):
            use(seconds)
            end_step()
        return "done"

    assert run_in_turns(work) == "done"
    assert rests == pytest.approx([REST * 0.002, REST * 0.004])


def test_short_steps_count_together(use: Callable[[float], None], rests: list[float]) -> None:
    def work() -> None:
        for _ in range(4):
            use(0.0006)
            end_step()

    run_in_turns(work)
    assert rests == pytest.approx([REST * 0.0012] * 2)


def test_nobody_else_rests(use: Callable[[float], None], rests: list[float]) -> None:
    use(1.0)
    run_in_turns(lambda: None)
    end_step()
    assert rests == []
