"""One plan before a position and another from it on: exactly one steers each position."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from clairai.engine.steer.resolve_steering import amend_plan, check_entries_act
from clairai.engine.steer.steering_plan import (
    MAX_GATES,
    PlanAction,
    PlanGate,
    PlanRow,
    SteeringPlan,
    action_content,
)
from clairai.errors import RequestError
from clairai.fields.ranges import OPEN_END
from clairai.fields.steer import parse_entries

END = 20
ranges = st.lists(st.integers(0, END), min_size=2, max_size=4, unique=True).map(
    lambda cuts: tuple(
        (a, b) for a, b in zip(sorted(cuts)[::2], sorted(cuts)[1::2], strict=False) if a < b
    )
)


def _row(seed: int) -> PlanRow:
    values = np.full(3, seed, "<f4").tobytes()
    return PlanRow("post_block.1", f"digest {seed}", values)


def _gate(seed: int) -> PlanGate:
    return PlanGate("p", _row(seed), 0.0, "none", float(seed), latch=True)


@st.composite
def plans(draw: st.DrawFn) -> SteeringPlan | None:
    spans = draw(st.lists(ranges, max_size=3))
    seeds = draw(st.lists(st.integers(1, 9), min_size=len(spans), max_size=len(spans)))
    gated = [index for index, seed in enumerate(seeds) if seed % 2]
    actions = tuple(
        PlanAction(
            *("v", "d", "add", (_row(seed),), float(seed), span),
            gate=gated.index(index) if index in gated else None,
        )
        for index, (span, seed) in enumerate(zip(spans, seeds, strict=True))
        if span
    )
    gates = tuple(_gate(seeds[index]) for index in gated)
    return SteeringPlan(actions, gates) if actions else None


def _treatment(plan: SteeringPlan | None, position: int) -> list[object]:
    """What acts on one position, computed the slow way."""
    if plan is None:
        return []
    return [
        action_content(plan, action)
        for action in plan.actions
        if any(start <= position < end for start, end in action.ranges)
    ]


@given(plans(), plans(), st.integers(0, END))
def test_every_position_is_steered_by_the_plan_it_belongs_to(
    old: SteeringPlan | None, new: SteeringPlan | None, position: int
) -> None:
    made = amend_plan(old, new, position)
    for at in range(END + 1):
        assert _treatment(made, at) == _treatment(old if at < position else new, at)
    if made is not None:
        used = [action.gate for action in made.actions if action.gate is not None]
        assert used == [*range(len(made.gates))]  # each gate is one action's own


def test_a_request_that_was_changed_too_often_is_refused() -> None:
    def change(plan: SteeringPlan | None, position: int) -> SteeringPlan | None:
        action = PlanAction("v", "d", "add", (_row(1),), 1.0, ((0, OPEN_END),), gate=0)
        return amend_plan(plan, SteeringPlan((action,), (_gate(position),)), position)

    plan = None
    for position in range(MAX_GATES):
        plan = change(plan, position)
    with pytest.raises(RequestError, match="gates"):
        change(plan, MAX_GATES)


def test_an_entry_that_would_never_act_is_refused() -> None:
    entries = parse_entries([{"vector": "v", "when": "prompt"}], what="steer")
    with pytest.raises(RequestError, match=r"steer\[0\]"):
        check_entries_act(entries, prompt_len=5, position=5)
    check_entries_act(entries, prompt_len=5, position=4)
