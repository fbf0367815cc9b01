"""Taps on a side stream are joined at every attention of a real model, and change nothing."""

from __future__ import annotations

import pytest

from tests.engine import joining, models, watching
from tests.engine.process import EngineProcess

pytestmark = [pytest.mark.engine, pytest.mark.timeout(900)]

NUM_LAYERS = 4
PROMPTS = models.random_prompts(3, (5, 17), 40_000)


def test_the_side_stream_is_joined_once_in_every_layer_and_changes_no_bit(
    engine: EngineProcess,
) -> None:
    alone = engine.call(watching.logprobs, PROMPTS)
    num_joins, joined = engine.call(joining.joined, PROMPTS)
    assert joined == alone
    assert num_joins == NUM_LAYERS * 8  # one step for both prompts, seven more for the answers
    assert engine.call(watching.logprobs, PROMPTS) == alone
