"""A running request is steered otherwise: by whoever asks, or by a rule on its own scores."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Final

import numpy as np
import pytest

import clairai
from clairai.points import Point
from tests.engine import steering
from tests.engine.hooked import ALWAYS, LONG, ROWS, TOLERANCE, N, error_of, noise, positions
from tests.engine.process import EngineProcess
from tests.engine.steering import Ask
from tests.fidelity.oracle import hidden_states
from tests.fidelity.steered import Change

pytestmark = [pytest.mark.engine, pytest.mark.timeout(900)]

NUM_NEW: Final = 40
WATCHED_D: Final = noise(41, 1.0)


@pytest.mark.parametrize("num_steps", [1, 2, 10])
def test_a_change_acts_from_the_position_it_names_and_what_was_before_stays(
    steered: EngineProcess, cut_model: Path, num_steps: int
) -> None:
    """After one step the prompt is only half prefilled: the rest of it is not changed either."""
    ask = Ask(LONG, ({"vector": "early"},), num_new=NUM_NEW)
    entries = [{"vector": "late", "scale": -0.5}, {"vector": "middle", "op": "ablate"}]
    position, answer = steered.call(steering.amend_after, ask, num_steps, entries)
    assert position >= N
    changes = [
        Change("add", ROWS["early"], positions(0, position)),
        Change("add", ROWS["late"], positions(position), -0.5),
        Change("ablate", ROWS["middle"], positions(position)),
    ]
    assert error_of(cut_model, ask, answer, changes) <= TOLERANCE
    unchanged = [Change("add", ROWS["early"], ALWAYS)]
    assert error_of(cut_model, ask, answer, unchanged) > 10 * TOLERANCE


def test_blocks_made_after_a_change_are_not_given_to_who_was_not_changed(
    steered: EngineProcess, cut_model: Path
) -> None:
    steered.call(steering.reset_cache)
    ask = Ask(LONG, num_new=NUM_NEW)
    _, answer = steered.call(steering.amend_after, ask, 5, [{"vector": "early"}])
    turn = Ask((*LONG, *answer.token_ids))
    (after,) = steered.call(steering.answer, [turn])
    assert after.num_cached == 96
    assert error_of(cut_model, turn, after, []) <= TOLERANCE


def test_a_rule_steers_the_rest_of_the_answer_when_its_probe_crosses(
    steered: EngineProcess, cut_model: Path
) -> None:
    """What crosses is forwarded, and the next token sampled; the one after that is changed."""
    (plain,) = steered.call(steering.answer, [Ask(LONG, num_new=NUM_NEW)])
    states_TD = hidden_states(str(cut_model), [*LONG, *plain.token_ids])["post_block.3"]
    scores = states_TD.astype(np.float64)[N:-1] @ WATCHED_D
    threshold = float(np.sort(scores)[-3])
    crossed = int(np.argmax(scores >= threshold))
    probe = clairai.Probe(
        "watched", Point.parse("post_block.3"), WATCHED_D.astype(np.float32), threshold=threshold
    )
    steered.call(steering.add_probes, [probe])
    rule = {"probe": "watched", "action": "steer", "steer": [{"vector": "late", "scale": 0.5}]}
    ask = Ask(LONG, stop=(rule,), num_new=NUM_NEW)
    (answer,) = steered.call(steering.answer, [ask])
    steered.call(steering.remove_probes, ["watched"])
    assert answer.finish_reason == "length"
    errors = {
        start: error_of(cut_model, replace(ask), answer, [Change("add", ROWS["late"], at, 0.5)])
        for start in (crossed + 1, crossed + 2, crossed + 3)
        for at in [positions(N + start)]
    }
    assert errors[crossed + 2] <= TOLERANCE
    assert min(errors[crossed + 1], errors[crossed + 3]) > 10 * TOLERANCE
