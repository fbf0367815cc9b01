"""Rows held for a rule are kept when it is met, else discarded; they are counted and bounded."""

from __future__ import annotations

import threading

import pytest

from clairai.engine.capture.capture_plan import KeepThreshold
from clairai.engine.capture.row_copier import SPARE_PART
from clairai.wire import capture_messages
from tests.support.capture_parts import ToyConsumer, capture_plan
from tests.support.capture_rig import rig

HELD = capture_plan(hold=KeepThreshold("anger", 2.0))


def test_the_score_of_a_draft_that_the_device_rejects_meets_no_rule(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with rig() as made:
        made.enter("x", 9, capture_plan())
        made.enter("a", 1, HELD)
        made.step(("x", 0, 1), ("a", 0, 4), rejected=(0, 0))

        def raise_last_score(stream: int) -> None:
            del stream
            made.tables.scores_STK[1, 4, 1] = 2.0

        monkeypatch.setattr(made.scores, "make_wait", raise_last_score)
        made.step(("x", 1, 1), ("a", 4, 4), rejected=(0, 1))
        assert made.found(1).rows == 0
        made.step(("x", 2, 1), ("a", 7, 4), rejected=(0, 0))
        assert made.found(1).rows == 4 + 3 + 4


def test_rows_are_held_until_their_rule_is_met() -> None:
    with rig() as made:
        made.enter("a", 1, HELD)
        made.enter("b", 2, HELD)
        made.enter("c", 3, capture_plan())
        made.tables.bias_SK[1, 1] = 1.0  # every score of the probe
        made.step(("a", 0, 2), ("b", 0, 1), ("c", 0, 1))
        assert [made.found(stream).rows for stream in (1, 2, 3)] == [0, 0, 1]
        made.tables.bias_SK[1, 1] = 2.0
        made.step(("a", 2, 1), ("c", 1, 1))
        assert [made.found(stream).rows for stream in (1, 2, 3)] == [3, 0, 2]
        made.tables.bias_SK[1, 1] = 0.0
        made.step(("a", 3, 1), ("b", 1, 1))
        assert made.found(1).rows == 4  # once is enough
        made.step(("c", 2, 1), finished=("a", "b"))
        told = made.found(2)
        assert (told.state, told.rows, told.discarded) == ("discarded", 0, 2)
        assert told.reason == "probe anger stayed below 2"
        assert made.found(1).state == "writing"
    assert made.consumers["toy"].rows() == {
        (1, 0, "post_block.0"): [0, 1, 2, 3],
        (3, 0, "post_block.0"): [0, 1, 2],
    }
    assert made.scores.followed  # on a GPU: until the scores are there


def test_a_rule_of_a_removed_probe_keeps_nothing_and_gives_the_reason() -> None:
    with rig() as made:
        made.enter("a", 1, capture_plan(hold=KeepThreshold("joy", 2.0)))
        made.step(("a", 0, 2))
        made.step(("a", 2, 1))
        told = made.found(1)
        assert (told.state, told.rows, told.discarded) == ("failed", 0, 3)
        assert "probe joy has no score" in told.reason
        made.step(("b", 0, 1), finished=("a",))
        assert made.found(1).state == "failed"
    assert made.consumers["toy"].blocks == []


def test_held_rows_are_bounded() -> None:
    with rig() as made:
        made.enter("a", 1, HELD)
        for step in range(20):
            made.step(("a", 8 * step, 8))
        told = made.found(1)
        assert 0 < told.dropped < 160
        assert "raise pending_mib" in told.reason
        state = made.capture.answer(capture_messages.DescribeCapture())
        assert isinstance(state, capture_messages.CaptureState)
        assert 0 < state.pending_nbytes <= 20_000


def test_rows_leave_room_in_the_arena_for_the_scores_that_decide_about_them() -> None:
    gate = threading.Event()
    with rig(nbytes=64 << 10, toy=ToyConsumer(gate=gate)) as made:
        made.enter("a", 1, HELD)
        made.enter("b", 2, capture_plan())
        at = 0
        while not made.told(1).dropped:
            made.step(("a", at, 1), ("b", at, 1))
            at += 1
        arena = made.copier.arena
        assert arena.nbytes - arena.used_nbytes >= arena.nbytes // SPARE_PART - 256
        made.tables.bias_SK[1, 1] = 2.0
        made.step(("a", at, 1), ("b", at, 1))
        gate.set()
        told = made.found(1)
        assert (told.state, told.rows + told.dropped) == ("open", at + 1)
        assert told.rows > 0


def test_a_score_without_room_in_the_arena_counts_as_missing() -> None:
    gate = threading.Event()
    with rig(nbytes=16 << 10, toy=ToyConsumer(gate=gate)) as made:
        made.enter("a", 1, HELD)
        made.enter("b", 2, capture_plan())
        for at in range(80):
            made.step(("a", at, 1), ("b", at, 1))
        gate.set()
        told = made.found(1)
        assert told.state == "failed"
        assert told.reason == "probe anger has no score for it: its rows are not kept"
        assert told.discarded + told.dropped == 80
