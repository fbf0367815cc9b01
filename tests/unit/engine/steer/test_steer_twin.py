"""Rows equal a slow reference for any plan, any batch and any split into steps."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec import structs

from clairai.engine.steer.steer_tables import SteerTables
from clairai.engine.steer.steering_plan import PlanAction, PlanGate, SteeringPlan
from clairai.engine.steer.worker_steering import WorkerSteering
from clairai.engine.step import StepBatch
from clairai.errors import TapMissingError
from clairai.fields.ranges import OPEN_END
from tests.support.random_plans import SITES, WIDTH, courses_of_one_program, random_plan, row
from tests.support.steered_engine import (
    MAX_TOKENS,
    Request,
    Seen,
    faults,
    fleet,
    random_history,
    speculative_history,
    wrong_in,
)

seeds = st.integers(0, 2**32 - 1)
FIRST_D, SECOND_D = np.eye(WIDTH)[:2]
ALWAYS = ((0, OPEN_END),)


def latched(threshold: float = 100.5) -> PlanGate:
    """Opens at a row with 0.25 less than this, or more, in its first place; never closes."""
    return PlanGate("toy", row("pre_attn.0", FIRST_D), 0.25, "none", threshold, latch=True)


def adding(gate: PlanGate | None, *, start: int = 0) -> SteeringPlan:
    """Add one, at the first site, to the second place."""
    added = row("pre_attn.0", SECOND_D)
    action = PlanAction("v", "", "add", (added,), 1.0, ((start, OPEN_END),))
    if gate is None:
        return SteeringPlan((action,))
    return SteeringPlan(
        (PlanAction("v", "", "add", (added,), 1.0, ((start, OPEN_END),), gate=0),), (gate,)
    )


@settings(derandomize=True, deadline=None, max_examples=25)
@given(seeds)
def test_every_row_of_any_history_equals_the_reference(seed: int) -> None:
    assert random_history(fleet(), np.random.default_rng(seed), num_steps=12) == []


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.bfloat16, 2e-2), (torch.float16, 2e-3)])
def test_rows_of_less_precision_are_steered_in_float32(
    dtype: torch.dtype, tolerance: float
) -> None:
    for seed in range(4):
        held = fleet(dtype)
        assert random_history(held, np.random.default_rng(seed), tolerance=tolerance) == []


@settings(derandomize=True, deadline=None, max_examples=6)
@given(seeds)
def test_a_request_is_steered_the_same_however_it_is_split_into_steps(seed: int) -> None:
    plan = random_plan(np.random.default_rng(seed))
    whole = streams(plan, [24])
    for counts in ([1] * 24, [7, 1, 1, 9, 6], [23, 1]):
        for one, other in zip(whole, streams(plan, counts), strict=True):
            torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-5)


def streams(plan: SteeringPlan, counts: list[int]) -> list[torch.Tensor]:
    """The stream at each site, over all steps."""
    held = fleet()
    held.open("r", Request(plan, seed=5))
    steps = [held.step({"r": count}, num_padded=0) for count in counts]
    return [torch.cat([stream(step[index]) for step in steps]) for index in range(len(SITES))]


def stream(seen: Seen) -> torch.Tensor:
    x_TD, residual_TD = seen.after
    return x_TD if residual_TD is None else x_TD + residual_TD


def opened(rows: list[list[float]], plan: SteeringPlan) -> list[float]:
    """One request, steps of these first places, at the first site; gives their second places."""
    held = fleet()
    held.open("r", Request(plan, seed=0))
    found: list[float] = []
    for firsts in rows:
        held.place({"r": len(firsts)})
        x_TD = torch.zeros(len(firsts), WIDTH)
        x_TD[:, 0] = torch.tensor(firsts)
        held.tables.site("a").apply(x_TD, None)
        found += x_TD[:, 1].tolist()
    return found


def test_a_latch_opened_by_a_prompt_of_one_token_stays_open() -> None:
    assert opened([[101.0], [0.0], [0.0]], adding(latched())) == [1.0, 1.0, 1.0]
    assert opened([[0.0], [0.0], [101.0], [0.0]], adding(latched())) == [0.0, 0.0, 1.0, 1.0]


def test_hysteresis_opens_at_the_threshold_and_closes_below_the_release() -> None:
    gate = PlanGate("toy", row("pre_attn.0", FIRST_D), 0.0, "none", threshold=3.0, release=1.0)
    found = opened([[2.0, 3.0, 1.0], [2.0, 0.5, 2.0, 3.0], [1.0], [0.0]], adding(gate))
    assert found == [0, 1, 1, 1, 0, 0, 1, 1, 0]


def test_a_nan_score_opens_no_gate_and_leaves_a_latch_open() -> None:
    nan = float("nan")
    held = PlanGate("toy", row("pre_attn.0", FIRST_D), 0.0, "none", threshold=3.0, release=1.0)
    soft = PlanGate("toy", row("pre_attn.0", FIRST_D), 0.0, "none", threshold=3.0, sharpness=9.0)
    assert opened([[nan, 4.0, nan, 2.0]], adding(held)) == [0, 1, 0, 0]
    assert opened([[nan, 100.0, nan]], adding(soft)) == [0, 1, 0]
    assert opened([[nan, 101.0, nan, 0.0]], adding(latched())) == [0, 1, 1, 1]


def test_a_row_behind_a_closed_gate_is_not_written_even_if_it_holds_nan() -> None:
    along = row("pre_attn.0", SECOND_D)
    ablate = PlanAction("v", "", "ablate", (along,), 1.0, ALWAYS, gate=0)
    held = fleet()
    held.open("r", Request(SteeringPlan((ablate,), (latched(),)), seed=0))
    held.place({"r": 2})
    x_TD = torch.full((2, WIDTH), float("inf"))
    x_TD[:, 0] = 1
    before = x_TD.clone()
    held.tables.site("a").apply(x_TD, None)
    assert torch.equal(x_TD, before)


def test_a_gate_slot_keeps_no_state_of_its_previous_request() -> None:
    """The second request's gate is not active in its prompt: nothing reads it there."""
    held = fleet()
    held.open("first", Request(adding(latched(-1000.0)), seed=0))
    held.step({"first": 3})
    assert held.tables.state_ZG[0, 0] == 1
    held.close("first")
    held.open("second", Request(adding(latched(), start=4), seed=1))
    held.step({"second": 4})
    assert [fault for seen in held.step({"second": 1}) for fault in faults(seen)] == []
    assert held.tables.state_ZG[0, 0] == 0


def test_a_program_shared_by_two_plans_leaves_the_gate_state_of_each_alone() -> None:
    held = fleet()
    for number, plan in enumerate(courses_of_one_program()):
        held.open(f"r{number}", Request(plan, seed=number))
    for counts in ({"r0": 2, "r1": 3}, {"r1": 2, "r0": 1}, {"r0": 1, "r1": 2}):
        assert wrong_in(held.step(counts)) == []


def test_without_steered_requests_the_map_is_not_read() -> None:
    held = fleet()
    held.tables.map_T4.fill_(10**9)
    x_TD = torch.ones(4, WIDTH)
    held.tables.site("a").apply(x_TD, None)
    assert torch.equal(x_TD, torch.ones(4, WIDTH))


def test_a_token_outside_of_the_vocabulary_is_not_special() -> None:
    held = fleet()
    action = PlanAction(
        "v", "", "add", (row("pre_attn.0", SECOND_D),), 1.0, ALWAYS, skips_special=True
    )
    held.open("r", Request(SteeringPlan((action,)), seed=0))
    held.place({"r": 4})
    held.tables.use_token_ids(torch.tensor([-1, 0, 10**6, 1], dtype=torch.int32))
    x_TD = torch.zeros(4, WIDTH)
    held.tables.site("a").apply(x_TD, None)
    assert x_TD[:, 1].tolist() == [1, 0, 1, 1]


def tables() -> SteerTables:
    return fleet().tables


def test_sites_that_did_not_run_are_named() -> None:
    held = tables()
    held.site("b").apply(torch.zeros(1, WIDTH), torch.zeros(1, WIDTH))
    with pytest.raises(TapMissingError, match=r"2 of 3 steered sites .*first: a, c\)"):
        held.check_all_ran()
    for name in ("a", "c"):
        held.site(name).apply(torch.zeros(1, WIDTH), None)
    held.check_all_ran()


def test_more_or_wider_rows_than_the_tables_hold_are_refused() -> None:
    site = tables().site("a")
    with pytest.raises(TapMissingError, match="a forward of 65 rows of 12, tables hold 64 of 12"):
        site.apply(torch.zeros(MAX_TOKENS + 1, WIDTH), None)
    with pytest.raises(TapMissingError, match="a forward of 1 rows of 13"):
        site.apply(torch.zeros(1, WIDTH + 1), None)


def test_a_special_token_outside_of_the_vocabulary_is_refused() -> None:
    with pytest.raises(ValueError, match="token 8 is outside the vocabulary of 8"):
        tables().set_special([1, 8])


def test_the_memory_the_tables_take_is_counted() -> None:
    vectors, programs, entries = 48 * WIDTH, 65 * 3 * (16 * 8 + 1), MAX_TOKENS * (4 + 8)
    assert tables().nbytes == 4 * (vectors + programs + entries + 4 * 8 + 3) + 4 * 3 + 8


def test_a_batch_of_sequences_is_steered_as_its_rows_in_order() -> None:
    held = fleet()
    held.open("r", Request(adding(None), seed=0))
    held.place({"r": 6})
    x = torch.zeros(2, 3, WIDTH)
    held.tables.site("a").apply(x, None)
    assert x[:, :, 1].tolist() == [[1, 1, 1], [1, 1, 1]]


@pytest.mark.parametrize("is_ahead", [False, True])
@pytest.mark.parametrize("seed", range(12))
def test_gates_forget_drafts_that_were_rejected(seed: int, is_ahead: bool) -> None:
    """Special tokens among them: a gate passes over those, and keeps its state.

    Ahead, positions that only the device knows are steered as what they are.
    """
    rng = np.random.default_rng(seed)
    assert speculative_history(fleet(), rng, num_steps=12, is_ahead=is_ahead) == []


def _has_wrong_rows(*, is_ahead: bool) -> bool:
    rngs = map(np.random.default_rng, range(12))
    return any(speculative_history(fleet(), rng, 12, is_ahead=is_ahead) for rng in rngs)


@pytest.mark.parametrize("is_ahead", [False, True])
def test_without_a_word_of_the_rejected_drafts_gates_would_remember_them(
    is_ahead: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(WorkerSteering, "_forget", lambda *_: None)
    assert _has_wrong_rows(is_ahead=is_ahead)


def test_steered_by_the_positions_that_the_host_expects_rows_would_be_wrong(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Where drafts were rejected."""

    def place(self: WorkerSteering, batch: StepBatch) -> None:
        original(self, structs.replace(batch, lowest_R=None))

    original = WorkerSteering.place
    monkeypatch.setattr(WorkerSteering, "place", place)
    assert _has_wrong_rows(is_ahead=True)
