"""Cache keys of steered blocks: equal exactly where every position so far was treated alike."""

from __future__ import annotations

import itertools
from typing import Any

import msgspec
import pytest
from hypothesis import assume, event, given, settings
from hypothesis import strategies as st

from clairai.engine.steer.cache_keys import BlockKeys, block_key
from clairai.engine.steer.steering_plan import (
    MAX_SEGMENTS,
    PlanAction,
    PlanGate,
    SteeringPlan,
    all_program_keys,
    program_key,
    program_keys,
    split_segments,
    treatments,
)
from clairai.fields.ranges import OPEN_END
from tests.support.steering_plans import action, gate, plan, row

LAST = 9  # positions that the naive reference looks at one by one
EDGES = (0, 1, 3, 4, 6, OPEN_END)

# Few values, so that two plans drawn apart from each other are often alike in part.
ranges = st.sampled_from(
    [((a, b),) for a, b in itertools.combinations(EDGES, 2)]
    + [((a, b), (c, d)) for a, b, c, d in itertools.combinations(EDGES, 4)]
)
gates = st.builds(
    gate, latch=st.booleans(), threshold=st.sampled_from([0.0, 1.0]), probe=st.sampled_from("pq")
)


@st.composite
def plans(draw: st.DrawFn) -> SteeringPlan:
    actions: list[PlanAction] = []
    held: list[PlanGate] = []
    for _ in range(draw(st.integers(1, 3))):
        gated = draw(st.booleans()) and draw(st.booleans())
        if gated:
            held.append(draw(gates))
        actions.append(
            action(
                *draw(ranges),
                vector=draw(st.sampled_from(["v", "w"])),
                scale=draw(st.sampled_from([1.0, 2.0])),
                rows=(row("pre_attn.1", draw(st.sampled_from("ab"))),),
                skips_special=draw(st.sampled_from([False, False, True])),
                gate=len(held) - 1 if gated else None,
            )
        )
    return SteeringPlan(tuple(actions), tuple(held))


def content(one: SteeringPlan, index: int) -> tuple[Any, ...]:
    """All of an action but its name, its positions and the number of its gate."""
    found = one.actions[index]
    opened = (
        None if found.gate is None else msgspec.structs.replace(one.gates[found.gate], probe="")
    )
    plain = msgspec.structs.replace(found, vector="", digest="", ranges=(), gate=None)
    return plain, opened


def acting(one: SteeringPlan, position: int) -> list[int]:
    return [
        index
        for index, found in enumerate(one.actions)
        if any(start <= position < end for start, end in found.ranges)
    ]


def naive(one: SteeringPlan, end: int) -> list[list[tuple[Any, ...]]]:
    """What is done to each position below `end`, in order."""
    return [[content(one, index) for index in acting(one, p)] for p in range(end)]


@settings(derandomize=True, deadline=None, max_examples=500)
@given(plans(), plans(), st.integers(1, LAST))
def test_two_plans_share_a_block_exactly_if_they_treat_all_before_its_end_alike(
    one: SteeringPlan, other: SteeringPlan, end: int
) -> None:
    is_alike = naive(one, end) == naive(other, end)
    event(f"alike: {is_alike}, steered: {any(naive(one, end))}")
    assert (block_key(one, 0, end) == block_key(other, 0, end)) == is_alike


@settings(derandomize=True, deadline=None, max_examples=150)
@given(plans(), st.integers(1, LAST), st.data())
def test_a_plan_with_the_same_effect_has_the_same_keys(
    one: SteeringPlan, end: int, data: st.DataObject
) -> None:
    """Split an action at a position into two of equal content; rename; clip past the end."""
    index = data.draw(st.integers(0, len(one.actions) - 1))
    found = one.actions[index]
    assume(found.gate is None)
    cut = data.draw(st.integers(0, LAST))
    halves = [
        msgspec.structs.replace(found, vector="other", digest="other", ranges=part)
        for part in (_clipped(found, 0, cut).ranges, _clipped(found, cut, OPEN_END).ranges)
    ]
    actions = (*one.actions[:index], *halves, *one.actions[index + 1 :])
    other = SteeringPlan(actions, one.gates)
    assert naive(other, end) == naive(one, end)
    assert block_key(other, 0, end) == block_key(one, 0, end)
    clipped = [_clipped(found, 0, end) for found in one.actions]
    assert block_key(SteeringPlan(tuple(clipped), one.gates), 0, end) == block_key(one, 0, end)


def _clipped(found: PlanAction, low: int, high: int) -> PlanAction:
    kept = [(max(start, low), min(end, high)) for start, end in found.ranges]
    return msgspec.structs.replace(found, ranges=tuple(one for one in kept if one[0] < one[1]))


@settings(derandomize=True, deadline=None, max_examples=100)
@given(plans())
def test_a_block_has_no_key_exactly_where_nothing_has_acted_yet(one: SteeringPlan) -> None:
    keys = BlockKeys(one)
    for end in range(1, LAST):
        assert (keys.key(end) is None) == (not any(naive(one, end)))
        assert keys.key(end) == block_key(one, end - 1, end)


@settings(derandomize=True, deadline=None, max_examples=100)
@given(plans())
def test_segments_hold_the_actions_of_each_position(one: SteeringPlan) -> None:
    found = split_segments(one)
    for position in range(LAST):
        active = [active for start, end, active in found if start <= position < end]
        assert active == ([tuple(acting(one, position))] if acting(one, position) else [])
    for before, after in itertools.pairwise(found):
        assert before[0] < before[1] <= after[0]
        assert before[1] < after[0] or before[2] != after[2]


@settings(derandomize=True, deadline=None, max_examples=100)
@given(plans(), plans())
def test_a_program_key_covers_content_and_the_indices_of_stateful_gates(
    one: SteeringPlan, other: SteeringPlan
) -> None:
    def meaning(held: SteeringPlan, active: tuple[int, ...]) -> list[tuple[Any, ...]]:
        found = []
        for index in active:
            number = held.actions[index].gate
            is_stateful = number is not None and held.gates[number].is_stateful
            found.append((content(held, index), number if is_stateful else None))
        return found

    for (_, _, mine), (_, _, theirs) in itertools.product(
        split_segments(one), split_segments(other)
    ):
        is_same = meaning(one, mine) == meaning(other, theirs)
        assert (program_key(one, mine) == program_key(other, theirs)) == is_same
    found = split_segments(one)
    assert program_keys(one, found) == [program_key(one, active) for _, _, active in found]
    assert all_program_keys(one) == set(program_keys(one, found))


def test_ranges_that_touch_are_one_segment() -> None:
    assert split_segments(plan(action((0, 4), (4, 8)))) == ((0, 8, (0,)),)
    assert treatments(plan(action((0, 4)), action((4, 8)))) == treatments(plan(action((0, 8))))


@pytest.mark.parametrize("latch", [False, True])
def test_the_index_of_a_stateful_gate_is_in_the_program_key_alone(
    latch: bool,
) -> None:
    """A program shared by two requests must find the state of a gate in the same place of both."""
    gates = (gate(latch=latch), gate(latch=latch))
    first = plan(action((0, 4), gate=0), gates=gates)
    second = plan(action((0, 4), gate=1), gates=gates)
    assert (all_program_keys(first) == all_program_keys(second)) == (not latch)
    assert block_key(first, 0, 4) == block_key(second, 0, 4)


def test_a_prompt_is_shared_by_steering_of_both_phases_and_of_the_prompt_alone() -> None:
    both, prompt = plan(action((0, OPEN_END))), plan(action((0, 20)))
    assert block_key(both, 0, 16) == block_key(prompt, 0, 16) is not None
    assert block_key(both, 16, 32) != block_key(prompt, 16, 32)


def test_steering_of_generated_tokens_shares_the_prompt_and_not_the_generated_blocks() -> None:
    one, longer = plan(action((20, OPEN_END))), plan(action((36, OPEN_END)))
    assert block_key(one, 0, 16) is None
    assert block_key(one, 16, 32) is not None
    # The next turn of the conversation: what was generated is now part of a longer prompt.
    assert block_key(longer, 16, 32) is None


def test_the_order_of_two_actions_matters_to_the_key_on_one_token_and_not_on_two() -> None:
    first, second = {"scale": 2.0}, {"op": "replace"}
    together = [action((0, 9), **first), action((0, 9), **second)]
    apart = [action((0, 4), **first), action((4, 9), **second)]
    assert block_key(plan(*together), 0, 9) != block_key(plan(*together[::-1]), 0, 9)
    assert block_key(plan(*apart), 0, 9) == block_key(plan(*apart[::-1]), 0, 9)


CHANGES: list[dict[str, Any]] = [
    {"op": "ablate"},
    {"rows": (row(digest="1"),)},
    {"rows": (row("pre_attn.0"),)},
    {"rows": (row(), row())},
    {"scale": -1.0},
    {"scale": 1.0000000000000002},
    {"is_matched": True},
    {"low": 0.0},
    {"high": 0.0},
    {"gate": 0},
    {"skips_special": True},
]


@pytest.mark.parametrize("change", CHANGES, ids=lambda change: next(iter(change)))
def test_the_key_covers_everything_an_action_does(change: dict[str, Any]) -> None:
    plain, changed = plan(action((0, 4))), plan(action((0, 4), **change), gates=(gate(),))
    assert block_key(plain, 0, 4) != block_key(changed, 0, 4)
    assert program_key(plain, (0,)) != program_key(changed, (0,))


GATE_CHANGES: list[dict[str, Any]] = [
    {"row": row("pre_attn.0", "h")},
    {"row": row("post_attn.0", "g")},
    {"bias": 1.0},
    {"activation": "sigmoid"},
    {"threshold": 0.25},
    {"sharpness": 1.0},
    {"release": 0.5},
    {"latch": True},
]


@pytest.mark.parametrize("change", GATE_CHANGES, ids=lambda change: next(iter(change)))
def test_the_key_covers_everything_a_gate_does(change: dict[str, Any]) -> None:
    one = plan(action((0, 4), gate=0), gates=(gate(),))
    other = plan(action((0, 4), gate=0), gates=(gate(**change),))
    assert block_key(one, 0, 4) != block_key(other, 0, 4)
    assert program_key(one, (0,)) != program_key(other, (0,))


def test_no_key_covers_names_of_vectors_or_probes() -> None:
    one = plan(action((0, 4), gate=0), gates=(gate(),))
    other = plan(action((0, 4), gate=0, vector="w", digest="e"), gates=(gate(probe="q"),))
    assert block_key(one, 0, 4) == block_key(other, 0, 4)
    assert all_program_keys(one) == all_program_keys(other)


def test_a_plan_with_the_most_segments_is_keyed_quickly() -> None:
    many = [(2 * i, 2 * i + 1) for i in range(MAX_SEGMENTS)]
    held = plan(*(action(*many[i::8], scale=float(i + 1)) for i in range(8)))
    assert len(treatments(held)) == MAX_SEGMENTS
    assert len(all_program_keys(held)) == 8
    keys = BlockKeys(held)
    assert len({keys.key(end) for end in range(1, 2 * MAX_SEGMENTS)}) == MAX_SEGMENTS
