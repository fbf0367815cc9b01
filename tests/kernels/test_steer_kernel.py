"""The steer kernel gives what the reference and the plain twin give, and touches nothing else.

T = tokens, D = model width. The kernel's source with a bug in it is caught by the same comparison.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from clairai.engine.steer import steer_kernel
from clairai.engine.steer.steer_kernel import SteerLauncher
from clairai.engine.steer.steer_tables import SteerFunction, SteerTables
from clairai.engine.steer.steer_twin import steer_twin
from clairai.engine.steer.steering_plan import PlanAction, PlanGate, SteeringPlan
from clairai.engine.steer.worker_steering import WorkerSteering
from clairai.fields.ranges import OPEN_END
from tests.kernels.planting import planted
from tests.support.random_plans import WIDTH, courses_of_one_program, random_plan, row
from tests.support.steered_engine import (
    Request,
    ToyFleet,
    fixed_history,
    fleet,
    random_history,
    speculative_history,
    wrong_in,
)

DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}
ROUNDING = {"bfloat16": 2e-2, "float16": 2e-3, "float32": 1e-5}
seeds = st.integers(0, 2**32 - 1)


def kernel_fleet(
    dtype: torch.dtype = torch.float32, steer: SteerFunction | None = None
) -> ToyFleet:
    held = fleet(dtype)
    held.tables.steer = steer or SteerLauncher(WIDTH)
    return held


@settings(derandomize=True, deadline=None, max_examples=4)
@given(seeds, st.sampled_from([*DTYPES]))
def test_every_row_of_any_history_equals_the_reference(seed: int, dtype: str) -> None:
    held, rng = kernel_fleet(DTYPES[dtype]), np.random.default_rng(seed)
    assert random_history(held, rng, num_steps=4, tolerance=ROUNDING[dtype]) == []


@settings(derandomize=True, deadline=None, max_examples=4)
@given(seeds)
def test_kernel_and_twin_leave_the_same_state(seed: int) -> None:
    """Gates and what they remember included, over several steps of several requests."""
    left, right = kernel_fleet(), fleet()
    for held in (left, right):
        rng = np.random.default_rng(seed)
        for name in "abc":
            held.open(name, Request(random_plan(rng), seed=int(rng.integers(1 << 30))))
        for counts in ({"a": 6, "b": 3}, {"b": 1, "a": 1, "c": 5}, {"b": 1, "a": 1, "c": 1}):
            held.step(counts)
    for name in ("state_ZG", "gates_TG", "map_T4", "reads_ZS", "ran_S"):
        torch.testing.assert_close(getattr(left.tables, name), getattr(right.tables, name))


@pytest.mark.parametrize("is_ahead", [False, True])
@pytest.mark.parametrize("seed", range(2))
def test_gates_forget_drafts_that_were_rejected(seed: int, is_ahead: bool) -> None:
    rng = np.random.default_rng(seed)
    assert speculative_history(kernel_fleet(), rng, num_steps=4, is_ahead=is_ahead) == []


def test_a_state_that_is_kept_of_another_row_is_caught(tmp_path: Path) -> None:
    kept = "tl.store(states_ptr + row.to(tl.int64) * NUM_GATES + g"
    steer = steer_with_bug(tmp_path, kept, kept.replace("row.to", "first.to"))
    rng = np.random.default_rng(0)
    assert speculative_history(kernel_fleet(steer=steer), rng, num_steps=4, is_ahead=True)


def test_a_program_shared_by_two_plans_leaves_the_gate_state_of_each_alone() -> None:
    held = kernel_fleet()
    for number, plan in enumerate(courses_of_one_program()):
        held.open(f"r{number}", Request(plan, seed=number))
    for counts in ({"r0": 2, "r1": 3}, {"r1": 2, "r0": 1}, {"r0": 1, "r1": 2}):
        assert wrong_in(held.step(counts)) == []


def wide(width: int, dtype: torch.dtype, steer: SteerFunction) -> SteerTables:
    """One request, all four ops and a gate that reads, at rows of this width."""
    rng = np.random.default_rng(width)
    made = [row("p", rng.standard_normal(width)) for _ in range(5)]
    always = ((0, OPEN_END),)
    actions = (
        PlanAction("v", "", "add", (made[0],), 2.0, always, is_matched=True, gate=0),
        PlanAction("v", "", "ablate", (made[1],), 1.0, always),
        PlanAction("v", "", "clamp", (made[2],), 1.0, always, low=-0.5, high=0.5),
        PlanAction("v", "", "replace", (made[3],), 0.25, always),
    )
    gate = PlanGate("toy", made[4], 0.1, "sigmoid", 0.5, sharpness=3.0)
    tables = SteerTables(
        ["s"], width=width, max_tokens=8, gate_slots=1, rows=8, programs=2, vocabulary=4,
        device="cpu", dtype=dtype,
    )  # fmt: skip
    tables.steer = steer
    WorkerSteering(tables, {"p": "s"}).add("r", SteeringPlan(actions, (gate,)))
    tables.map_T4[1:5, 0] = 1
    tables.num_mapped = 5
    return tables


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", [1, 63, 64, 65, 576])
def test_a_row_of_any_width_is_steered_to_its_end_and_not_beyond(width: int, dtype: str) -> None:
    """Rows lie apart, as slices of wider ones, and what is between them must stay."""
    generator = torch.Generator().manual_seed(width)
    memory = torch.randn(2, 6, width + 9, generator=generator).to(DTYPES[dtype])
    by_kernel, by_twin = memory.clone(), memory.clone()
    for steer, held in ((SteerLauncher(width), by_kernel), (steer_twin, by_twin)):
        x_TD, residual_TD = held[:, :, 4 : 4 + width]
        wide(width, DTYPES[dtype], steer).site("s").apply(x_TD, residual_TD)
    tolerance = ROUNDING[dtype]
    torch.testing.assert_close(by_kernel, by_twin, rtol=tolerance, atol=tolerance)
    for place in (slice(0, 4), slice(4 + width, None)):
        assert torch.equal(by_kernel[:, :, place], memory[:, :, place])
    assert torch.equal(by_kernel[:, [0, 5]], memory[:, [0, 5]])
    assert not by_kernel[0, 1:5, 4 : 4 + width].any()  # x, of the rows that are steered


def test_a_row_has_the_same_bits_in_every_batch() -> None:
    x_TD = torch.randn(6, 70, generator=torch.Generator().manual_seed(1))
    together = x_TD.clone()
    wide(70, torch.float32, SteerLauncher(70)).site("s").apply(together, None)
    for index in range(1, 5):
        alone = x_TD[index - 1 : index + 1].clone()  # the second of two rows
        wide(70, torch.float32, SteerLauncher(70)).site("s").apply(alone, None)
        assert torch.equal(alone[1], together[index])


def test_indices_outside_of_the_tables_steer_nothing() -> None:
    tables = wide(70, torch.float32, SteerLauncher(70))
    x_TD = torch.ones(6, 70)
    tables.map_T4[1:5, 0] = torch.tensor([-1, 3, 10**9, -(10**9)])
    tables.map_T4[1, 1:] = torch.tensor([5, 10**9, 1])  # no such gate slot
    tables.site("s").apply(x_TD, None)
    assert torch.equal(x_TD, torch.ones(6, 70))
    tables.map_T4[1:5] = torch.tensor([1, 0, 0, 0])
    tables.words_PSOW[1, 0, :, 1] = 10**9  # rows that are none
    tables.site("s").apply(x_TD, None)
    assert x_TD.isfinite().all()


def test_a_run_that_goes_beyond_the_forward_ends_with_it() -> None:
    tables = wide(70, torch.float32, SteerLauncher(70))
    tables.reads_ZS[0, 0] = 1
    tables.map_T4[1] = torch.tensor([1, 10**6, 0, 0])
    tables.map_T4[2:6] = torch.tensor([1, -1, 0, 0])
    memory = torch.ones(8, 70)
    tables.site("s").apply(memory[:4], None)
    assert (memory[1:4] != 1).any(1).all()
    assert torch.equal(memory[4:], torch.ones(4, 70))


def test_an_empty_forward_launches_nothing_and_strided_rows_are_refused() -> None:
    site = wide(70, torch.float32, SteerLauncher(70)).site("s")
    site.apply(torch.zeros(0, 70), None)
    with pytest.raises(ValueError, match="stride 1"):
        site.apply(torch.zeros(70, 3).T, None)


PLANTED = {
    "x is not zeroed": ("steered_D = tl.zeros_like(steered_D)", "pass"),
    "no row walks": ("tl.minimum(run, tl.num_programs(0) - first), 1)", "1, 1)"),
    "the gate slot of row 0": ("slot = tl.load(entry_ptr + 2)", "slot = tl.load(map_ptr + 2)"),
    "never fresh": ("tl.load(entry_ptr + 3) == 0, reads, 0)", "run != 0, reads, 0)"),
    "a walk one too short": ("in range(count):", "in range(count - (count > 1)):"),
    "nothing is remembered": ("advanced = tl.where(run > 0, reads, 0)", "advanced = reads * 0"),
    "the program of the first row": ("tl.load(map_ptr + row * ENTRY)", "tl.load(entry_ptr)"),
    "special tokens advance gates": ("!= 0) & (is_skipped == 0)", "!= 0)"),
    "special tokens are steered": ("tl.where(is_skipped, 0.0, amount)", "amount"),
    "an op too few": ("in range(num_ops):", "in range(num_ops - (num_ops > 1)):"),
    "a closed latch": ("((flags & IS_LATCHED) != 0) | is_held", "is_held"),
    "a gate of another token": ("gates_ptr + row_64 * NUM_GATES", "gates_ptr"),
}  # fmt: skip
SEED = 0


def steer_with_bug(tmp_path: Path, old: str, new: str, width: int = WIDTH) -> SteerFunction:
    steer: SteerFunction = planted(steer_kernel, tmp_path, old, new).SteerLauncher(width)
    return steer


@pytest.mark.parametrize("bug", PLANTED)
def test_a_planted_bug_is_caught(bug: str, tmp_path: Path) -> None:
    steer = steer_with_bug(tmp_path, *PLANTED[bug])
    assert any(fixed_history(kernel_fleet(steer=steer), SEED))


def _is_walked(steer: SteerFunction) -> bool:
    """A run that is steered from its second row on: a chunk that crosses the end of a prompt."""
    tables = wide(70, torch.float32, steer)
    tables.reads_ZS[0, 0] = 1
    tables.map_T4[1:4] = torch.tensor([[0, 3, 0, 0], [1, -1, 0, 0], [1, -1, 0, 0]])
    rows = torch.ones(4, 70)
    tables.site("s").apply(rows, None)
    is_changed = (rows != 1).any(1).tolist()
    return bool(is_changed == [False, False, True, True])


def _is_alone(steer: SteerFunction) -> bool:
    """A row that has a program, and no gate slot."""
    tables = wide(70, torch.float32, steer)
    tables.map_T4[:] = 0
    tables.map_T4[2, 0] = 1
    rows = torch.ones(4, 70)
    tables.site("s").apply(rows, None)
    return bool((rows != 1).any(1).tolist() == [False, False, True, False])


def test_the_kernel_skips_exactly_the_rows_without_ops(tmp_path: Path) -> None:
    condition = "(run != 0) | (tl.load(entry_ptr) > 0)"
    assert _is_walked(SteerLauncher(70))
    assert _is_alone(SteerLauncher(70))
    assert not _is_walked(steer_with_bug(tmp_path, condition, "tl.load(entry_ptr) > 0", 70))
    assert not _is_alone(steer_with_bug(tmp_path, condition, "run != 0", 70))


def test_without_a_planted_bug_the_sequence_is_right() -> None:
    held = kernel_fleet()
    assert not any(fixed_history(held, SEED))
    assert held.tables.ran_S.tolist() == [5, 5, 5]
