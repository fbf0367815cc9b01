"""The scores of answers are kept for a while, in bounded memory, for whoever made them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from clairai.proxy.caller import ANYBODY, Caller
from clairai.proxy.completions.completion_request import MAX_ID, ClairaiOptions
from clairai.proxy.completions.kept_scores import KeptAnswer, KeptScores
from clairai.proxy.completions.request_scores import RequestScores, ScoreBudget, ScoreSlice
from clairai.proxy.proxy_settings import Limits, ProxySettings, Timeouts
from clairai.proxy.responses import HttpRefusal
from clairai.proxy.ring_feed import to_json_numbers

ALICE = Caller("alice", frozenset(("read",)))
BOB = Caller("bob", frozenset(("read",)))
ADMIN = Caller("root", frozenset(("admin",)))


class Clock:
    """Time that the test makes pass."""

    def __init__(self) -> None:
        self.now_s = 1000.0
        self.timers: list[tuple[float, Callable[[], None]]] = []

    def __call__(self) -> float:
        return self.now_s

    def call_later(self, delay_s: float, act: Callable[[], None]) -> Any:
        self.timers.append((self.now_s + delay_s, act))

    def run_timers(self) -> None:
        due = [act for at_s, act in self.timers if at_s <= self.now_s]
        self.timers = [timer for timer in self.timers if timer[0] > self.now_s]
        for act in due:
            act()


def scores() -> RequestScores:
    return RequestScores(
        1,
        ClairaiOptions(),
        max_scores=1 << 20,
        budget=ScoreBudget(1 << 20),
        is_attached=lambda: True,
    )


def store(clock: Clock | None = None, *, kept_s: float = 60.0, **limits: int) -> KeptScores:
    settings = ProxySettings(
        "http://127.0.0.1:1", limits=Limits(**limits), timeouts=Timeouts(scores_kept=kept_s)
    )
    clock = clock or Clock()
    return KeptScores(settings, clock=clock, call_later=clock.call_later)


def slice_of(start: int, count: int, names: tuple[str, ...] = ("a", "b")) -> ScoreSlice:
    rows: list[Any] = [[float(start + at)] * len(names) for at in range(count)]
    return ScoreSlice(names, start, rows, ())


def answer(kept: KeptScores, name: str, *, owner: str | None = None, tokens: int = 3) -> KeptAnswer:
    made = kept.open(scores(), owner)
    made._scores._choice(0)  # type: ignore[union-attr]  # the request has one choice
    made.identify(name)
    made.add_tokens(0, list(range(tokens)))
    for at in range(tokens):
        made.add_scores(0, slice_of(at, 1))
    return made


def shown(kept: KeptScores, name: str, caller: Caller = ANYBODY) -> Any:
    return kept.copy(name, caller).describe(None)


def refusal(act: Callable[[], object]) -> HttpRefusal:
    with pytest.raises(HttpRefusal) as caught:
        act()
    return caught.value


def test_an_answer_is_found_while_it_runs_and_after_its_end() -> None:
    kept = store()
    one = answer(kept, "chatcmpl-1", tokens=2)
    running = shown(kept, "chatcmpl-1")
    assert (running.status, running.is_final, running.expires) == ("running", False, None)
    assert running.choices[0].probe_scores.scores == [[0.0, 0.0], [1.0, 1.0]]
    one.end("done")
    ended = shown(kept, "chatcmpl-1")
    assert (ended.status, ended.is_final) == ("done", True)
    assert ended.expires is not None
    assert ended.choices[0].token_ids == [0, 1]
    assert ended.choices[0].probe_scores.scores == running.choices[0].probe_scores.scores


def test_packing_loses_no_row_no_loss_and_no_column() -> None:
    kept = store()
    one = answer(kept, "a", tokens=0)
    for start in range(200):
        names = ("a", "b") if start < 150 else ("b", "c")
        made = slice_of(start, 1, names)
        is_lost = start == 70
        one.add_scores(0, made._replace(scores=[[None, None]], lost=(0,)) if is_lost else made)
    one.end("done")
    found = shown(kept, "a").choices[0].probe_scores
    assert found.names == ("a", "b", "c")
    assert found.lost == 1
    expected: list[list[float | None]] = [[at, at, None] for at in range(150)]
    expected += [[None, at, at] for at in range(150, 200)]
    expected[70] = [None, None, None]
    assert found.scores == expected


def test_float32_scores_are_shown_with_the_digits_of_the_answer() -> None:
    kept = store()
    one = answer(kept, "a", tokens=0)
    values = np.array([[0.1], [np.nan], [1e-30], [-123456.789], [0.0]], np.float32)
    told = to_json_numbers(values)
    one.add_scores(0, ScoreSlice(("a",), 0, told, ()))
    one.end("done")
    assert shown(kept, "a").choices[0].probe_scores.scores == told


def test_an_id_that_nobody_has_is_refused_with_the_way_to_get_scores() -> None:
    found = refusal(lambda: store().get("nobody", ANYBODY))
    assert (found.status, found.code) == (404, "no-scores")
    assert "X-Clairai-Scores" in found.message


def test_scores_expire_some_time_after_the_end_and_not_before_it() -> None:
    clock = Clock()
    kept = store(clock, kept_s=60)
    one = answer(kept, "a")
    clock.now_s += 1000
    assert not shown(kept, "a").is_final
    one.end("done")
    clock.now_s += 59
    assert shown(kept, "a").is_final
    clock.now_s += 1
    assert "expired" in refusal(lambda: kept.get("a", ANYBODY)).message
    assert (len(kept), kept.nbytes) == (0, 0)


def test_expired_scores_go_although_nobody_asks() -> None:
    clock = Clock()
    kept = store(clock, kept_s=60)
    answer(kept, "a").end("done")
    clock.now_s += 30
    answer(kept, "b").end("done")
    for left in (1, 0):
        clock.now_s += 30
        clock.run_timers()
        assert len(kept) == left
    assert (kept.nbytes, clock.timers) == (0, [])


def test_the_oldest_answer_makes_room_for_the_newest() -> None:
    kept = store(kept_answers=2)
    for name in ("a", "b", "c"):
        answer(kept, name).end("done")
    assert "made room" in refusal(lambda: kept.get("a", ANYBODY)).message
    assert [shown(kept, name).id for name in ("b", "c")] == ["b", "c"]
    assert (len(kept), kept.num_dropped) == (2, 1)


def test_bytes_are_bounded_also_while_answers_run() -> None:
    kept = store(kept_bytes=64 << 10)
    first, second = answer(kept, "a"), answer(kept, "b")
    for start in range(3, 20_000, 100):
        second.add_scores(0, slice_of(start, 100))
        assert kept.nbytes <= 64 << 10
        first.add_scores(0, slice_of(start, 100))
    first.end("done")
    second.end("done")
    assert len(kept) == 0
    assert kept.nbytes == 0
    assert "made room" in refusal(lambda: kept.get("b", ANYBODY)).message


def test_an_answer_costs_four_bytes_a_score_when_it_has_ended() -> None:
    kept = store()
    one = answer(kept, "a", tokens=1000)
    one.end("done")
    assert 1000 * 2 * 4 <= one.nbytes <= 1000 * 2 * 4 + 1000 * 8 + 2048
    assert kept.nbytes == one.nbytes


def test_another_keys_answer_is_as_one_that_does_not_exist() -> None:
    kept = store()
    answer(kept, "a", owner="alice").end("done")
    assert shown(kept, "a", ALICE).id == "a"
    assert shown(kept, "a", ADMIN).id == "a"
    other = refusal(lambda: kept.get("a", BOB))
    unknown = refusal(lambda: kept.get("x", BOB))
    assert (other.status, other.message) == (unknown.status, unknown.message)


def test_what_became_of_anothers_answer_is_not_told() -> None:
    clock = Clock()
    kept = store(clock)
    answer(kept, "a", owner="alice").end("done")
    clock.now_s += 61
    assert "expired" in refusal(lambda: kept.get("a", ALICE)).message
    assert "expired" not in refusal(lambda: kept.get("a", BOB)).message


def test_an_id_that_another_key_chose_too_replaces_nothing() -> None:
    kept = store()
    answer(kept, "same", owner="alice", tokens=5).end("done")
    answer(kept, "same", owner="bob", tokens=1).end("done")
    assert len(shown(kept, "same", ALICE).choices[0].token_ids) == 5
    assert len(shown(kept, "same", BOB).choices[0].token_ids) == 1


def test_an_id_that_its_owner_used_again_is_that_of_the_newest() -> None:
    kept = store()
    first = answer(kept, "same", tokens=5)
    second = answer(kept, "same", tokens=1)
    first.add_scores(0, slice_of(5, 100))
    first.end("done")
    assert len(shown(kept, "same").choices[0].token_ids) == 1
    assert kept.nbytes == second.nbytes


def test_an_id_longer_than_any_of_vllms_is_not_kept() -> None:
    kept = store()
    answer(kept, "x" * (MAX_ID + 1))
    assert len(kept) == 0


def test_reasons_of_answers_that_are_gone_are_bounded_too() -> None:
    kept = store(kept_answers=4)
    for number in range(20):
        answer(kept, f"a{number}")
    assert "made room" in refusal(lambda: kept.get("a15", ANYBODY)).message
    assert "unknown" in refusal(lambda: kept.get("a0", ANYBODY)).message
