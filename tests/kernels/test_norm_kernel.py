"""The norm kernel gives what vLLM's own norm gives, steers as the steer kernel does, and stashes.

T = tokens, D = model width, R = rows of the stash.
"""

from __future__ import annotations

from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
import torch

from clairai.engine.score import norm_kernel
from clairai.engine.score.norm_kernel import FusedNorm, norm_twin
from clairai.engine.steer.steer_kernel import SteerLauncher
from clairai.engine.steer.steer_tables import SteerTables
from tests.kernels.planting import planted
from tests.support.random_plans import WIDTH
from tests.support.steered_engine import (
    ToyFleet,
    fixed_history,
    fleet,
    random_history,
    speculative_history,
)

DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}
ROUNDING = {"bfloat16": 1.6e-2, "float16": 2e-3, "float32": 2e-6}
EPSILON = 1e-5


def rows(num_tokens: int, width: int, dtype: torch.dtype, seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(num_tokens, width, generator=generator).to(dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("num_tokens", "width"), [(1, 1), (3, 70), (17, 64), (2, 576)])
def test_it_is_vllms_norm_and_gives_the_sum_too(num_tokens: int, width: int, dtype: str) -> None:
    kind = DTYPES[dtype]
    x_TD, residual_TD = (rows(num_tokens, width, kind, seed) for seed in (1, 2))
    weight_D = rows(1, width, kind, 3)[0]
    stash_RD, ran = torch.full((2, width), 7.0, dtype=kind), torch.zeros((), dtype=torch.int32)
    made = FusedNorm(width, EPSILON, stash_RD, ran)(x_TD, residual_TD, weight_D)
    normed_TD, stream_TD = norm_twin(x_TD, residual_TD, weight_D, EPSILON)
    # The interpreter cuts a bfloat16 off where a GPU rounds it: tests/gpu asks for equal bits.
    bound = ROUNDING[dtype]
    torch.testing.assert_close(made, (normed_TD, stream_TD), rtol=bound, atol=bound)
    assert torch.equal(stash_RD[:num_tokens], made[1][:2])
    assert (stash_RD[num_tokens:] == 7.0).all()
    assert int(ran) == 1


def test_rows_may_lie_in_larger_memory() -> None:
    memory = rows(4, 100, torch.float32, 5)
    x_TD, residual_TD = memory[:, :30], memory[:, 60:90]
    stash_RD, ran = torch.zeros(4, 30), torch.zeros((), dtype=torch.int32)
    normed_TD, stream_TD = FusedNorm(30, EPSILON, stash_RD, ran)(x_TD, residual_TD, torch.ones(30))
    expected = norm_twin(x_TD.clone(), residual_TD.clone(), torch.ones(30), EPSILON)
    torch.testing.assert_close((normed_TD, stream_TD), expected)


class ByNorm:
    """Steers pairs with the norm kernel, in the form in which the steer kernel would leave them."""

    def __init__(self, module: ModuleType = norm_kernel) -> None:
        self._alone = SteerLauncher(WIDTH)
        self._kind = module.FusedNorm

    def __call__(
        self, x_TD: torch.Tensor, residual_TD: torch.Tensor | None, tables: SteerTables, site: int
    ) -> None:
        if residual_TD is None:
            self._alone(x_TD, residual_TD, tables, site)
            return
        stash_RD, ran = torch.zeros(64, WIDTH, dtype=x_TD.dtype), torch.zeros(1, dtype=torch.int32)
        weight_D = torch.ones(WIDTH, dtype=x_TD.dtype)
        steered = self._kind(WIDTH, EPSILON, stash_RD, ran).steered
        normed_TD, stream_TD = steered(x_TD, residual_TD, weight_D, tables, site)
        expected_TD, _ = norm_twin(stream_TD, torch.zeros_like(stream_TD), weight_D, EPSILON)
        torch.testing.assert_close(normed_TD, expected_TD, rtol=1e-5, atol=1e-5)
        assert torch.equal(stash_RD[: len(x_TD)], stream_TD)
        is_steered_T = (stream_TD != x_TD + residual_TD).any(dim=1)
        residual_TD[is_steered_T] = stream_TD[is_steered_T]
        x_TD[is_steered_T] = 0


def norm_fleet(module: ModuleType = norm_kernel) -> ToyFleet:
    held = fleet()
    held.tables.steer = ByNorm(module)
    return held


@pytest.mark.parametrize("seed", range(3))
def test_every_row_of_any_history_is_steered_as_the_reference_has_it(seed: int) -> None:
    assert random_history(norm_fleet(), np.random.default_rng(seed), num_steps=5) == []


def test_gates_forget_drafts_that_were_rejected() -> None:
    rng = np.random.default_rng(1)
    assert speculative_history(norm_fleet(), rng, num_steps=4, is_ahead=True) == []


def test_a_state_that_is_kept_of_another_row_is_caught(tmp_path: Path) -> None:
    kept = "tl.store(states_ptr + row.to(tl.int64) * NUM_GATES + g"
    held = norm_fleet(planted(norm_kernel, tmp_path, kept, kept.replace("row.to", "first.to")))
    assert speculative_history(held, np.random.default_rng(1), num_steps=4, is_ahead=True)


def test_the_drill_is_right() -> None:
    assert not any(fixed_history(norm_fleet(), 0))


PLANTED = {
    "the walk is one row off": ("row = first + offset", "row = tl.maximum(first + offset - 1, 0)"),
    "one row is stashed": ("tl.where(row < stash_rows, D, 0)", "tl.where(row < 1, D, 0)"),
    "a steered row is not passed on": ("stream_D = tl.where(is_changed", "_ = tl.where(is_changed"),
    "nothing is remembered": ("((tl.where(run > 0, reads, 0) >> g)", "((reads * 0 >> g)"),
    "never fresh": ("tl.where(is_fresh == 0, reads, 0)", "reads"),
    "a walk that stays where it is": ("if offset > 0:", "if offset < 0:"),
    "the seat of row 0": ("tl.load(entry_ptr + 2)", "tl.load(map_ptr + 2)"),
    "no row walks": ("tl.minimum(run, tl.num_programs(0) - first), 1)", "1, 1)"),
    "a gate of another token": ("gates_ptr + row.to(tl.int64) * NUM_GATES", "gates_ptr"),
}


@pytest.mark.parametrize("bug", PLANTED)
def test_a_planted_bug_is_caught(bug: str, tmp_path: Path) -> None:
    held = norm_fleet(planted(norm_kernel, tmp_path, *PLANTED[bug]))
    with pytest.raises(AssertionError):
        assert not any(fixed_history(held, 0))
