"""One request fails in the worker of a real engine: it ends with an error, and no other notices."""

from __future__ import annotations

import base64
from dataclasses import replace
from typing import Any, Final

import numpy as np
import pytest

from tests.engine import asks, failing, hooked, steering
from tests.engine.failing import BAD_SCALE
from tests.engine.hooked import WIDTH
from tests.engine.process import EngineFailed, EngineProcess
from tests.engine.steering import Answer, Ask

pytestmark = [pytest.mark.engine, pytest.mark.timeout(900)]

LONG: Final = tuple(range(3000, 3100))  # more than a step: it fails before it could sample
SHORT: Final = tuple(range(4000, 4040))
BAD: Final = Ask(LONG, ({"vector": "early", "scale": BAD_SCALE},))
STEERED: Final = Ask(SHORT, ({"vector": "early", "scale": 2.0},))
PLAIN: Final = Ask(SHORT)
SUBNORMAL: Final = np.array([1e-40, *[0.0] * (WIDTH - 1)], "<f4").tobytes()


def answers(engine: EngineProcess, *asks: Ask) -> list[Answer]:
    found: list[Answer] = engine.call(steering.answer, list(asks))
    return found


def is_failed(answer: Answer) -> bool:
    reason = str(answer.stop_reason)
    is_told = reason.startswith("clairai: the worker could not serve this request: ")
    return answer.finish_reason == "error" and is_told and not answer.token_ids


@pytest.mark.attack(112)
@pytest.mark.parametrize("stage", ["read", "load"])
def test_the_others_of_the_batch_get_the_answers_they_get_without_it(
    steered: EngineProcess, stage: str
) -> None:
    steered.call(steering.reset_cache)
    expected = answers(steered, STEERED, PLAIN)
    bad, *others = steered.call(failing.answer_while_failing, [BAD, STEERED, PLAIN], stage)
    assert is_failed(bad)
    assert [one.token_ids for one in others] == [one.token_ids for one in expected]


@pytest.mark.attack(113)
def test_a_step_that_cannot_be_steered_fails_its_steered_requests_alone(
    steered: EngineProcess,
) -> None:
    (expected,) = answers(steered, PLAIN)
    found = steered.call(failing.answer_while_failing, [STEERED, PLAIN, BAD], "place")
    assert [is_failed(one) for one in found] == [True, False, True]
    assert found[1].token_ids == expected.token_ids


@pytest.mark.attack(114)
def test_blocks_that_a_failed_request_left_are_never_found(steered: EngineProcess) -> None:
    steered.call(steering.reset_cache)
    assert is_failed(steered.call(failing.answer_while_failing, [BAD], "load")[0])
    again, without_cache = answers(steered, BAD, replace(BAD, salt="isolated"))
    assert again.num_cached == 0
    assert again.token_ids == without_cache.token_ids
    assert answers(steered, BAD)[0].num_cached == 96  # the same, had it not failed


@pytest.mark.attack(115)
def test_a_capture_that_cannot_begin_fails_alone(engine: EngineProcess) -> None:
    prompts = [list(range(100 * n, 100 * n + 20)) for n in (60, 61, 62)]
    bad, *others = engine.call(failing.capture_while_failing, prompts)
    assert (bad[:2], "could not serve this request: ValueError" in bad[2]) == (("error", 0), True)
    assert [one[:2] for one in others] == [("length", 4)] * 2


@pytest.mark.attack(116)
def test_a_subnormal_row_inside_a_request_is_refused_and_the_engine_lives(
    engine: EngineProcess,
) -> None:
    inline: dict[str, Any] = {"points": {"pre_attn.0": base64.b64encode(SUBNORMAL).decode()}}
    with pytest.raises(EngineFailed, match="has length 1e-40"):
        answers(engine, Ask(SHORT, ({"vector": inline},)))
    engine.call(asks.drop_unfinished)
    assert len(answers(engine, PLAIN)[0].token_ids) == PLAIN.num_new


@pytest.mark.attack(117)
def test_a_subnormal_row_is_not_planted_by_a_name_and_a_tier(engine: EngineProcess) -> None:
    file = hooked.vector_file("planted", {"pre_attn.0": np.ones(WIDTH)})
    spoiled = file.replace(np.ones(WIDTH, "<f4").tobytes(), SUBNORMAL)
    assert spoiled != file
    with pytest.raises(EngineFailed, match="has length 1e-40"):
        engine.call(failing.put_unchecked, spoiled)
    with pytest.raises(EngineFailed, match="no vector is named 'planted'"):
        engine.call(steering.set_tiers, base=[{"vector": "planted"}])
    assert len(answers(engine, PLAIN)[0].token_ids) == PLAIN.num_new
