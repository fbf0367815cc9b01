"""Stop rules as JSON: read, written again, or refused with a short message."""

from __future__ import annotations

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from clairai.errors import RequestError, quote
from clairai.fields.rules import MAX_RULES, StopRule, parse_rules

reals = st.floats(-1e30, 1e30)
names = st.text("abc-_.", min_size=1, max_size=5)
rules = st.builds(
    StopRule, names, st.none() | reals, st.integers(1, 1000), st.sampled_from(["stop", "alert"])
)


@settings(derandomize=True, deadline=None, max_examples=50)
@given(st.lists(rules, max_size=MAX_RULES))
def test_a_rule_written_as_json_is_read_as_an_equal_one(every: list[StopRule]) -> None:
    text = json.dumps([rule.to_json() for rule in every])
    assert parse_rules(json.loads(text), what="stop") == tuple(every)


def test_the_shortest_rule_stops_at_the_first_token_over_the_probes_own_threshold() -> None:
    assert parse_rules([{"probe": "p"}], what="stop") == (StopRule("p", None, 1, "stop"),)


@pytest.mark.parametrize(
    ("rule", "reason"),
    [
        ({}, r"stop\[0\].probe must be text"),
        ({"probe": "p", "tokens": 0}, "a whole number of 1 to 1000, got 0"),
        ({"probe": "p", "tokens": 1001}, "a whole number of 1 to 1000"),
        ({"probe": "p", "tokens": True}, "a whole number of 1 to 1000"),
        ({"probe": "p", "tokens": 1.0}, "a whole number of 1 to 1000"),
        ({"probe": "p", "action": "halt"}, "one of stop, alert"),
        ({"probe": "p", "threshold": float("nan")}, "must be a finite number"),
        ({"probe": "p", "k": 3}, "unknown key 'k'; known: probe, threshold, tokens, action"),
        ("p", "must be an object"),
    ],
    ids=quote,
)
def test_a_wrong_rule_is_refused(rule: object, reason: str) -> None:
    with pytest.raises(RequestError, match=reason):
        parse_rules([rule], what="stop")


def test_the_rules_of_a_request_are_limited() -> None:
    with pytest.raises(RequestError, match=f"give at most {MAX_RULES}"):
        parse_rules([{"probe": "p"}] * (MAX_RULES + 1), what="stop")
