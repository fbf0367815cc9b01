"""Rules count crossings in a row, act once for each run, and never go on unwatched."""

from __future__ import annotations

import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from clairai.engine.rule_watcher import RuleWatcher
from clairai.errors import RequestError
from clairai.fields.rules import StopRule, parse_rules
from clairai.match.choice_scores import ScoreColumns, ScoreRow

PROMPT_LEN = 10
TOKEN = 5


def _watch(*rules: StopRule, thresholds: tuple[float, ...] | None = None) -> RuleWatcher:
    return RuleWatcher(rules, thresholds or tuple(1.0 for _ in rules), PROMPT_LEN)


def _see(watch: RuleWatcher, *scores: float, name: str = "p", start: int = PROMPT_LEN) -> None:
    """Rows arrive, and then the token behind the last of them."""
    columns = ScoreColumns((name,), (None,))
    for index, score in enumerate(scores):
        watch.add_row(start + index, ScoreRow(TOKEN, columns, [score]))
    watch.check([TOKEN] * (start + len(scores) + 1))


@given(st.lists(st.sampled_from([0.0, 0.5, 1.0, 2.0, math.nan]), max_size=30), st.integers(1, 4))
def test_a_rule_goes_off_with_the_token_that_completes_its_run(
    scores: list[float], tokens: int
) -> None:
    watch = _watch(StopRule("p", tokens=tokens, action="alert"))
    _see(watch, *scores)
    runs, expected = 0, []
    for index, score in enumerate(scores):
        runs = runs + 1 if score >= 1.0 else 0
        if runs == tokens:
            expected.append(PROMPT_LEN + index)
    assert [alarm.position for alarm in watch.alarms] == expected
    assert watch.end is None


def test_the_first_stop_is_what_the_answer_says() -> None:
    watch = _watch(StopRule("p", tokens=2), StopRule("p"), thresholds=(1.0, 5.0))
    _see(watch, 1.5, 0.0, 1.5, 1.5, 9.0)
    assert watch.end == "clairai: probe p >= 1 for 2 tokens"
    assert [alarm.position for alarm in watch.alarms] == [PROMPT_LEN + 3], "nothing after the end"


def test_a_token_that_comes_again_after_a_preemption_counts_once() -> None:
    watch = _watch(StopRule("p", tokens=3))
    _see(watch, 2.0, 2.0)
    _see(watch, 2.0, 2.0)
    assert watch.end is None
    _see(watch, 2.0, start=PROMPT_LEN + 2)
    assert watch.end is not None


def test_a_lost_score_ends_the_answer() -> None:
    watch = _watch(StopRule("p"))
    _see(watch, 0.0)
    _see(watch, 0.0, start=PROMPT_LEN + 3)
    assert watch.end == "clairai: the rule on p could not be checked: 2 scores were lost"


def test_a_row_of_another_token_ends_the_answer() -> None:
    watch = _watch(StopRule("p"))
    watch.add_row(PROMPT_LEN, ScoreRow(TOKEN + 1, ScoreColumns(("p",), (None,)), [9.0]))
    assert watch.check([TOKEN] * (PROMPT_LEN + 2))
    assert watch.alarms == []
    assert watch.end is not None
    assert "another token" in watch.end


def test_a_score_counts_only_when_its_token_is_known_and_is_not_the_newest() -> None:
    watch = _watch(StopRule("p"))
    watch.add_row(PROMPT_LEN, ScoreRow(TOKEN, ScoreColumns(("p",), (None,)), [9.0]))
    assert watch.check([TOKEN] * (PROMPT_LEN + 1))
    assert watch.end is None
    assert watch.check([TOKEN] * (PROMPT_LEN + 2))
    assert watch.end == "clairai: probe p >= 1 for 1 token"


def test_a_probe_that_left_the_bank_ends_the_answer() -> None:
    watch = _watch(StopRule("p"))
    _see(watch, 5.0, name="q")
    assert watch.end is not None
    assert "no longer in the bank" in watch.end


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"probe": "p", "action": "steer"}, "belong together"),
        ({"probe": "p", "steer": [{"vector": "v"}]}, "belong together"),
        ({"probe": "p", "action": "steer", "steer": [{"vctor": "v"}]}, "vctor"),
    ],
)
def test_a_rule_that_steers_says_with_what(given: dict[str, Any], said: str) -> None:
    with pytest.raises(RequestError, match=said):
        parse_rules([given], what="stop")


def test_a_rule_that_steers_is_written_as_it_is_read() -> None:
    given = {"probe": "p", "action": "steer", "steer": [{"vector": "v", "scale": 2.0}]}
    (rule,) = parse_rules([given], what="stop")
    assert parse_rules([rule.to_json()], what="stop") == (rule,)
