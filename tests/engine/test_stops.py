"""A stop rule ends an answer at the right token, whatever else runs."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final

import numpy as np
import pytest

import clairai
from clairai.points import Point
from tests.engine import asks, steering
from tests.engine.process import EngineFailed, EngineProcess
from tests.engine.steering import Answer, Ask

pytestmark = [pytest.mark.engine, pytest.mark.timeout(900)]

WIDTH: Final = 576
NUM_NEW: Final = 40
PROMPTS: Final = [tuple(range(7000 + 50 * i, 7000 + 50 * i + 30)) for i in range(6)]


def _probe(name: str, seed: int, threshold: float | None) -> clairai.Probe:
    row = np.random.default_rng(seed).standard_normal(WIDTH).astype(np.float32)
    return clairai.Probe(name, Point.parse("post_block.3"), row, threshold=threshold)


@pytest.fixture(scope="module")
def scored(
    engine: EngineProcess,
) -> Iterator[tuple[EngineProcess, list[Answer], list[list[float]]]]:
    """With plain answers and their scores, against which the rules are checked."""
    engine.call(steering.add_probes, [_probe("watched", 31, None), _probe("other", 32, 1e9)])
    plain = [Ask(prompt, num_new=NUM_NEW) for prompt in PROMPTS]
    answers, scores = engine.call(steering.answer_and_score, plain, "watched")
    yield engine, answers, scores
    engine.call(steering.remove_probes, ["watched", "other"])


def _first(scores: list[float], threshold: float, tokens: int) -> int | None:
    """Index of the generated token that completes the run, computed the slow way."""
    for index in range(len(scores) - 1):  # the last token is never forwarded
        run = scores[max(0, index - tokens + 1) : index + 1]
        if len(run) == tokens and all(score >= threshold for score in run):
            return index
    return None


@pytest.mark.parametrize(("tokens", "share"), [(1, 0.5), (2, 0.5), (4, 0.2)])
def test_an_answer_ends_with_the_token_after_the_run_that_its_rule_names(
    scored: tuple[EngineProcess, list[Answer], list[list[float]]], tokens: int, share: float
) -> None:
    """The next token is sampled in the same forward as the score, so it is there too."""
    engine, plain, scores = scored
    threshold = float(np.quantile([s for one in scores for s in one[:-1]], share))
    rule = {"probe": "watched", "threshold": threshold, "tokens": tokens}
    given = [Ask(prompt, stop=(rule,), num_new=NUM_NEW) for prompt in PROMPTS]
    found = engine.call(steering.answer, given)
    ended = 0
    for answer, whole, one in zip(found, plain, scores, strict=True):
        at = _first(one, threshold, tokens)
        if at is None or at + 2 >= NUM_NEW:
            assert (answer.token_ids, answer.finish_reason) == (whole.token_ids, "length")
            continue
        ended += 1
        assert answer.token_ids == whole.token_ids[: at + 2]
        assert answer.finish_reason == "stop"
        count = "1 token" if tokens == 1 else f"{tokens} tokens"
        assert answer.stop_reason == f"clairai: probe watched >= {threshold:g} for {count}"
    assert ended


def test_a_rule_that_only_alerts_and_one_that_is_never_met_change_nothing(
    scored: tuple[EngineProcess, list[Answer], list[list[float]]],
) -> None:
    engine, plain, _ = scored
    alert = {"probe": "watched", "threshold": -1e9, "action": "alert"}
    given = [Ask(PROMPTS[0], stop=(alert, {"probe": "other"}), num_new=NUM_NEW), Ask(PROMPTS[1])]
    found = engine.call(steering.answer, given)
    assert found[0].token_ids == plain[0].token_ids
    assert found[0].finish_reason == "length"


def test_an_aborted_request_is_no_longer_watched(
    scored: tuple[EngineProcess, list[Answer], list[list[float]]],
) -> None:
    engine, _, _ = scored
    ask = Ask(PROMPTS[0], stop=({"probe": "other"},), num_new=NUM_NEW)
    assert engine.call(steering.abort_one, ask, 5) == 0


@pytest.mark.parametrize(
    ("rule", "said"),
    [
        ({"probe": "wached"}, "watched"),
        ({"probe": "watched"}, "has no threshold of its own"),
        ({"probe": "other", "tokens": 0}, "tokens"),
    ],
)
def test_a_rule_that_could_not_be_checked_is_refused(
    scored: tuple[EngineProcess, list[Answer], list[list[float]]], rule: dict[str, Any], said: str
) -> None:
    engine, _, _ = scored
    with pytest.raises(EngineFailed, match="RequestError") as caught:
        engine.call(steering.answer, [Ask(PROMPTS[0], stop=(rule,))])
    assert said in str(caught.value)
    engine.call(asks.drop_unfinished)
