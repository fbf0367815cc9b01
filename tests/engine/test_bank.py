"""The bank changes while the engine serves; what cannot be done leaves it as it was."""

from __future__ import annotations

import numpy as np
import pytest

from tests.engine import asks
from tests.engine.process import EngineProcess

pytestmark = [pytest.mark.engine, pytest.mark.timeout(900)]


def test_probes_are_added_replaced_and_removed_without_a_restart(engine: EngineProcess) -> None:
    assert engine.call(asks.bank_life) == [["b", "a"], ["b", "a"], ["a"], []]


def test_a_probe_added_mid_request_scores_from_that_step_on(engine: EngineProcess) -> None:
    scores, step = engine.call(asks.change_mid_request)
    assert np.isfinite(scores["early"][:-1]).all()
    # Step 0 forwards the 3 prompt tokens; step s > 0 forwards position 2 + s.
    assert np.isnan(scores["late"][: 2 + step]).all()
    assert np.isfinite(scores["late"][2 + step : -1]).all()


@pytest.mark.parametrize(
    ("change", "code", "reason"),
    [
        ("untapped point", "point", "post_block.1, which is not tapped here"),
        ("duplicate", "probe", "use replace, or rename"),
        ("unknown name", "probe", "no probe named"),
        ("replace unknown", "probe", "no probe named"),
        ("other model", "probe", "was made for"),
        ("truncated file", "probe", ""),
        ("over capacity", "capacity", "all 8 slots at post_block.3 are taken"),
        ("wrong width", "probe", "has width 64"),
    ],
)
def test_pitfall_15_a_change_that_cannot_be_made_is_an_error_and_the_bank_is_untouched(
    engine: EngineProcess, change: str, code: str, reason: str
) -> None:
    found_code, found_reason, is_untouched = engine.call(asks.refused, change)
    assert found_code == code
    assert reason in found_reason
    assert is_untouched
