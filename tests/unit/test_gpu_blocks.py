"""A ratio by turns is that of the taps, not of answers that grow, nor of one slow step."""

from __future__ import annotations

import numpy as np
import pytest

from bench.gpu_blocks import BLOCK, OF_NO_TURN, Stamp, is_tapped, set_of, steps_of, summary

BATCH = 4


def stamps(added_s: float, by_set_s: float = 0.0, num_steps: int = 16 * BLOCK) -> list[Stamp]:
    """Steps of 5 ms that take 2 us more with each, and some noise."""
    rng = np.random.default_rng(0)
    found, now_s = [(0.0, OF_NO_TURN, BATCH)], 0.004
    for number in range(num_steps):
        found.append((now_s, number, BATCH))
        now_s += 0.005 + 2e-6 * number + rng.normal(0, 5e-6)
        now_s += added_s * is_tapped(number) + by_set_s * set_of(number)
        now_s += 0.3 * (number % 97 == 50)  # something else on the machine
    return found


@pytest.mark.parametrize("added_s", [0.0, 50e-6, -20e-6])
def test_what_taps_add_to_steps_that_grow_is_found_to_a_tenth_of_a_percent(added_s: float) -> None:
    row = summary(steps_of(stamps(added_s), BATCH))
    usual_s = 0.005 + 2e-6 * 8 * BLOCK
    assert row["p50"] == pytest.approx(1 + added_s / usual_s, abs=1e-3)
    assert row["alike"] == pytest.approx(1.0, abs=1e-3)
    assert row["steps"] == 8 * 15


def test_sets_of_graphs_that_are_not_alike_are_seen() -> None:
    assert summary(steps_of(stamps(0.0, 100e-6), BATCH))["alike"] > 1.01


def test_steps_of_another_size_do_not_count() -> None:
    some = stamps(0.0)
    smaller = [(at, number, size - (number > 8 * BLOCK)) for at, number, size in some]
    assert summary(steps_of(smaller, BATCH))["steps"] == 4 * 15
