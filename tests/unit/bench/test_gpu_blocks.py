"""A ratio by turns is that of the taps, not of answers that grow, nor of one slow step."""

from __future__ import annotations

import numpy as np
import pytest

from bench.gpu_blocks import (
    BLOCK,
    NUM_SETS,
    OF_NO_TURN,
    Stamp,
    following,
    is_tapped,
    set_of,
    steps_of,
    summary,
)

BATCH = 4
TURNS = 20 * NUM_SETS  # ten of each way and set


def stamps(added_s: float, by_set_s: float = 0.0, num_steps: int = TURNS * BLOCK) -> list[Stamp]:
    """Steps of 5 ms that take 0.4 us more with each, and some noise."""
    rng = np.random.default_rng(0)
    found, now_s = [Stamp(0.0, 0, OF_NO_TURN, BATCH)], 0.004
    for number in range(num_steps):
        turn, place = following(found[-1], is_alike=True)
        found.append(Stamp(now_s, turn, place, BATCH))
        now_s += 0.005 + 4e-7 * place + rng.normal(0, 5e-6)
        now_s += added_s * is_tapped(turn) + by_set_s * set_of(turn)
        now_s += 0.3 * (number % 97 == 50)  # something else on the machine
    return found


@pytest.mark.parametrize("added_s", [0.0, 50e-6, -20e-6])
def test_what_taps_add_to_steps_that_grow_is_found_to_a_tenth_of_a_percent(added_s: float) -> None:
    row = summary(steps_of(stamps(added_s), BATCH))
    usual_s = 0.005 + 4e-7 * TURNS * BLOCK / 2
    assert row["p50"] == pytest.approx(1 + added_s / usual_s, abs=1e-3)
    assert abs(row["p50"] - 1 - added_s / usual_s) < 4 * row["error"] < 4e-3
    assert row["steps"] == TURNS // 2 * 15


def test_sets_of_graphs_that_are_not_alike_are_seen() -> None:
    assert summary(steps_of(stamps(0.0, 100e-6), BATCH))["error"] > 4e-3


def test_a_host_that_is_slower_now_and_then_is_so_for_both() -> None:
    some, late_s, slow = stamps(50e-6), 0.0, list[Stamp]()
    for one in some:
        slow.append(one._replace(began_s=one.began_s + late_s))
        late_s += 0.002 * (one.turn % 26 < 13)
    row = summary(steps_of(slow, BATCH))
    usual_s = 0.006 + 4e-7 * TURNS * BLOCK / 2
    assert row["p50"] == pytest.approx(1 + 50e-6 / usual_s, abs=1e-3)


def test_steps_of_another_size_do_not_count() -> None:
    some = stamps(0.0)
    half = TURNS // 2
    smaller = [one._replace(num_requests=BATCH - (one.turn >= half)) for one in some]
    assert summary(steps_of(smaller, BATCH))["steps"] == half // 2 * 15


def test_turns_go_on_with_the_next_requests_so_that_every_set_of_graphs_has_its_turn() -> None:
    """The KV cache holds but three turns of many requests."""
    found = list[Stamp]()
    for number in range(20 * 80):
        turn, place = following(found[-1] if found else None, is_alike=number % 80 > 3)
        found.append(Stamp(0.0, turn, place, BATCH))
    counted = [one for one in found if one.is_counted]
    turns = sorted({one.turn for one in counted})
    assert turns == [*range(20 * 3)]
    assert max(one.place for one in counted) < 80
    assert {(is_tapped(turn), set_of(turn)) for turn in turns} == {
        (is_on, one) for is_on in (False, True) for one in range(NUM_SETS)
    }
