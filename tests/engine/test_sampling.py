"""However a request is sampled, every one of its rows is right: all ways in one mixed batch."""

from __future__ import annotations

import numpy as np
import pytest

from tests.engine import asks, sampling, steering
from tests.engine.process import EngineFailed, EngineProcess

pytestmark = [pytest.mark.engine, pytest.mark.timeout(900)]

ROUNDS = 2


def test_every_way_of_sampling_leaves_every_row_right_in_one_batch(engine: EngineProcess) -> None:
    found = engine.call(sampling.run, rounds=ROUNDS, seed=1)
    assert found.verdict.wrong == []
    assert found.verdict.unaccounted == 0
    assert found.verdict.lost == 0
    assert found.broken == []  # each way did what it is for
    assert found.asked == dict.fromkeys(sampling.ALL, ROUNDS)
    assert found.verdict.rows > 1500
    assert found.num_preempted > 0
    assert found.verdict.aborted > 0


def test_beams_have_no_scores_and_say_so(engine: EngineProcess) -> None:
    """vLLM makes a request of its own for every step of every beam."""
    with pytest.raises(EngineFailed, match=r"BeamSearchOutput has no scores: .* beams have none"):
        engine.call(sampling.score_beams)
    with pytest.raises(EngineFailed, match=r"BeamSearchOutput has no captures: .* beams have none"):
        engine.call(sampling.capture_beams)
    ((scores,),) = engine.call(asks.scores, [[11, 12, 13]], ["a"], max_tokens=4)
    assert np.isfinite(scores["a"][:-1]).all()  # others go on


def test_what_steers_every_request_steers_beams_too(steered: EngineProcess) -> None:
    plain = steered.call(sampling.search_beams)
    steered.call(steering.set_tiers, base=[{"vector": "late", "scale": 5.0}])
    try:
        changed = steered.call(sampling.search_beams)
    finally:
        steered.call(steering.set_tiers, base=[])
    assert changed != plain
    assert steered.call(sampling.search_beams) == plain
