"""The score kernel equals its twin in plain torch, for every shape, and writes nothing else.

T = tokens, D = model width, K = capacity of a site, H = halves of a weight.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from clairai.engine.score import score_kernel
from clairai.engine.score.score_kernel import SLICE_D, TILE_T, Scorer
from clairai.engine.score.score_tables import score_twin

CPU = torch.device("cpu")
GUARD = 7  # rows of memory on both sides that belong to no request
DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}


@dataclass(frozen=True)
class Case:
    """Rows and a bank, as a site hands them to the kernel."""

    hidden_TD: torch.Tensor
    weights_HDK: torch.Tensor
    bias_K: torch.Tensor
    activation_K: torch.Tensor


def case(num_tokens: int, width: int, capacity: int, dtype: torch.dtype, seed: int = 1) -> Case:
    """All memory beside the rows and the weights is NaN: a read outside shows in the scores."""
    generator = torch.Generator().manual_seed(seed)
    weights_DK = torch.randn(width, capacity, generator=generator)
    high_DK = weights_DK.bfloat16()
    halves = [high_DK, (weights_DK - high_DK.float()).bfloat16()]
    split = halves if dtype == torch.bfloat16 else [weights_DK]
    return Case(
        guarded(torch.randn(num_tokens, width, generator=generator).to(dtype)),
        guarded(torch.stack(split).view(-1, capacity)).view(len(split), width, capacity),
        torch.randn(capacity, generator=generator),
        torch.randint(0, 3, (capacity,), generator=generator, dtype=torch.int32),
    )


def guarded(rows: torch.Tensor) -> torch.Tensor:
    memory = torch.full((len(rows) + 2 * GUARD, rows.shape[1]), float("nan"), dtype=rows.dtype)
    memory[GUARD:-GUARD] = rows
    return memory[GUARD:-GUARD]


def kernel(given: Case, scorer: Scorer | None = None) -> torch.Tensor:
    """The kernel's scores; fails if it wrote outside of them, or counted itself wrongly."""
    num_tokens, width = given.hidden_TD.shape
    capacity = given.weights_HDK.shape[2]
    scorer = scorer or Scorer(width, capacity, num_tokens, CPU)
    memory = torch.full((num_tokens + 2 * GUARD, capacity), 1234.5)
    ran_S = torch.tensor([10, 20, 30], dtype=torch.int32)
    scores_TK = memory[GUARD:-GUARD]
    bank = (given.weights_HDK, given.bias_K, given.activation_K)
    with np.errstate(all="ignore"):  # numpy warns of what a GPU computes in silence
        scorer(given.hidden_TD, *bank, scores_TK, ran_S[1])
    assert (memory[:GUARD] == 1234.5).all()
    assert (memory[-GUARD:] == 1234.5).all()
    assert ran_S.tolist() == [10, 21, 30]
    assert not scorer._ticket.any()  # ready for the next tap
    return scores_TK


def twin(given: Case) -> torch.Tensor:
    scores_TK = torch.zeros(len(given.hidden_TD), given.weights_HDK.shape[2])
    ran = torch.zeros((), dtype=torch.int32)
    bank = (given.weights_HDK, given.bias_K, given.activation_K)
    score_twin(given.hidden_TD, *bank, scores_TK, ran)
    return scores_TK


def assert_equal(given: Case, found_TK: torch.Tensor) -> None:
    """Equal except for the order of float32 sums: the bound grows with what is added up."""
    size_TK = given.hidden_TD.float().abs() @ given.weights_HDK.float().sum(0).abs()
    error_TK = (found_TK - twin(given)).abs()
    assert (error_TK <= 2e-6 * (size_TK + given.bias_K.abs() + 1)).all()


def narrow(given: Case) -> Scorer:
    """A scorer whose scratch memory holds one tile of tokens: longer steps go the long way."""
    width, capacity = given.hidden_TD.shape[1], given.weights_HDK.shape[2]
    return Scorer(width, capacity, TILE_T, CPU)


@settings(derandomize=True, deadline=None, max_examples=12)
@given(
    st.integers(1, 40),
    st.integers(1, 300),
    st.integers(1, 70),
    st.sampled_from([*DTYPES]),
    st.integers(0, 1000),
)
def test_any_shape_scores_as_the_twin_does_both_ways(
    num_tokens: int, width: int, capacity: int, dtype: str, seed: int
) -> None:
    made = case(num_tokens, width, capacity, DTYPES[dtype], seed)
    assert_equal(made, kernel(made))
    assert_equal(made, kernel(made, narrow(made)))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("num_tokens", [1, 15, 16, 17, 33])
def test_a_last_tile_of_tokens_is_cut_where_the_step_ends(num_tokens: int, dtype: str) -> None:
    made = case(num_tokens, 2 * SLICE_D + 1, 5, DTYPES[dtype])
    assert_equal(made, kernel(made))
    assert_equal(made, kernel(made, narrow(made)))


@pytest.mark.parametrize("width", [1, 127, 128, 129, 576])
def test_a_width_that_is_no_whole_number_of_slices_is_read_to_its_end(width: int) -> None:
    made = case(3, width, 16, torch.bfloat16)
    assert_equal(made, kernel(made))


@pytest.mark.parametrize("capacity", [1, 2, 16, 17, 63, 64, 65, 130])
def test_every_number_of_probes_has_its_own_columns(capacity: int) -> None:
    made = case(2, 130, capacity, torch.bfloat16)
    assert_equal(made, kernel(made))
    assert_equal(made, kernel(made, narrow(made)))


def test_a_step_beyond_the_scratch_memory_goes_the_long_way(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(score_kernel, "MAX_PARTIALS", 3 * TILE_T * 16)
    scorer = Scorer(200, 16, 4096, CPU)
    assert scorer.max_wide_tokens == TILE_T
    made = case(TILE_T + 1, 200, 16, torch.bfloat16)
    monkeypatch.setattr(scorer, "_partial", None)  # a call that needs it fails
    monkeypatch.setattr(scorer, "_ticket", torch.zeros(1))
    assert_equal(made, kernel(made, scorer))


def test_the_scratch_memory_is_counted_and_stays_small() -> None:
    scorer = Scorer(8192, 64, 16384, CPU)
    assert sum(one.nbytes for one in scorer.scratch) <= 4 * score_kernel.MAX_PARTIALS + 4 * 1024
    assert scorer.max_wide_tokens >= TILE_T


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_row_has_the_same_bits_in_every_batch_and_both_ways(dtype: str) -> None:
    made = case(37, 300, 5, DTYPES[dtype])
    together_TK = kernel(made)
    assert torch.equal(together_TK, kernel(made, narrow(made)))
    for row in (0, 1, 15, 16, 36):
        alone = Case(
            made.hidden_TD[row : row + 1], made.weights_HDK, made.bias_K, made.activation_K
        )
        assert torch.equal(kernel(alone)[0], together_TK[row])


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_row_that_is_not_finite_spoils_no_other(bad: float, dtype: str) -> None:
    made = case(20, 200, 5, DTYPES[dtype])
    clean_TK = kernel(made).clone()
    made.hidden_TD[7, 150] = bad
    for scorer in (None, narrow(made)):
        found_TK = kernel(made, scorer)
        others = [row for row in range(20) if row != 7]
        assert torch.equal(found_TK[others], clean_TK[others])
        # Split weights may meet infinity with both signs: then it is NaN, and never a number.
        is_nan_K = found_TK[7].isnan()
        assert is_nan_K.all() or not np.isnan(bad)
        assert torch.equal(found_TK[7][~is_nan_K], twin(made)[7][~is_nan_K])


def test_each_activation_is_its_own_and_extreme_values_do_not_overflow() -> None:
    inf, nan = float("inf"), float("nan")
    values = [0.0, -0.0, 1.0, -1.0, 88.8, -88.8, -104.0, 1e4, -1e4, 3e38, -3e38, inf, -inf, nan]
    made = Case(
        torch.tensor(values)[:, None],
        torch.ones(1, 1, 3),
        torch.zeros(3),
        torch.tensor([0, 1, 2], dtype=torch.int32),
    )
    found_TK, expected_TK = kernel(made), twin(made)
    torch.testing.assert_close(found_TK, expected_TK, rtol=1e-6, atol=1e-37, equal_nan=True)
    assert found_TK[:-1, 2].min() == 0
    assert found_TK[:-1, 2].max() == 1


def test_rows_that_lie_apart_are_read_by_their_stride() -> None:
    made = case(9, 400, 6, torch.bfloat16)
    apart = Case(
        made.hidden_TD[::2, 100:300], made.weights_HDK[:, 100:300].contiguous(), *banked(made)
    )
    assert apart.hidden_TD.stride() == (800, 1)
    assert_equal(apart, kernel(apart))


def test_rows_that_lie_across_are_read_as_they_are() -> None:
    made = case(9, 200, 6, torch.float32)
    across = Case(made.hidden_TD.T.contiguous().T, made.weights_HDK, *banked(made))
    assert across.hidden_TD.stride() == (1, 9)
    assert_equal(across, kernel(across))


def banked(made: Case) -> tuple[torch.Tensor, torch.Tensor]:
    return made.bias_K, made.activation_K


def test_one_scorer_serves_one_tap_after_the_other() -> None:
    scorer = Scorer(200, 5, 64, CPU)
    for seed, num_tokens in enumerate((33, 1, 64, 17)):
        made = case(num_tokens, 200, 5, torch.bfloat16, seed)
        assert_equal(made, kernel(made, scorer))


def test_a_product_without_the_low_half_would_be_noticed() -> None:
    made = case(4, 300, 5, torch.bfloat16)
    high_only = Case(made.hidden_TD, made.weights_HDK.clone(), *banked(made))
    high_only.weights_HDK[1] = 0
    with pytest.raises(AssertionError):
        assert_equal(made, kernel(high_only))


@pytest.mark.parametrize("changed", ["SLICE_D", "TILE_K", "NUM_SLICES"])
def test_a_kernel_with_another_constant_would_be_noticed(changed: str) -> None:
    made = case(18, 300, 40, torch.float32)
    scorer = narrow(made)  # the long way: no program waits for another's ticket
    scorer._tiling[changed] //= 2
    with pytest.raises(AssertionError):
        assert_equal(made, kernel(made, scorer))


class Recorder:
    """Stands in for a kernel: notes what is compiled, and what is launched."""

    def __init__(self, name: str, noted: list[tuple[str, str, int]]) -> None:
        self._name, self._noted = name, noted

    def warmup(self, *given: Any, grid: Any, **tiling: Any) -> Loadable:
        del grid, tiling
        return Loadable(self._name, given[6].data_ptr(), self._noted)

    def __getitem__(self, grid: Any) -> Callable[..., None]:
        del grid
        return lambda *given, **_: self._noted.append(("launched", self._name, given[6].data_ptr()))


class Loadable:
    """What `warmup` returns: compiled, and loaded when it is given a grid."""

    def __init__(self, name: str, site: int, noted: list[tuple[str, str, int]]) -> None:
        self._name, self._site, self._noted = name, site, noted

    def __getitem__(self, grid: Any) -> None:
        del grid
        self._noted.append(("loaded", self._name, self._site))


def test_the_first_forward_compiles_and_loads_what_any_later_one_launches(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    noted: list[tuple[str, str, int]] = []
    for name in ("score_wide", "score_long"):
        monkeypatch.setattr(score_kernel, name, Recorder(name, noted))
    scorer = Scorer(4096, 16, 8192, CPU)
    bank = case(1, 4096, 16, torch.bfloat16)
    ran_S = torch.zeros(2, dtype=torch.int32)  # two sites, of which one is aligned otherwise

    def forward(num_tokens: int) -> None:
        hidden_TD, scores_TK = torch.empty(num_tokens, 4096), torch.empty(num_tokens, 16)
        for ran in ran_S:
            scorer(hidden_TD, bank.weights_HDK, bank.bias_K, bank.activation_K, scores_TK, ran)

    forward(8192)
    loaded = {(name, site) for what, name, site in noted if what == "loaded"}
    assert len(loaded) == 4
    noted.clear()
    for num_tokens in (1, 600, scorer.max_wide_tokens, scorer.max_wide_tokens + 1, 8192):
        forward(num_tokens)
    assert {what for what, _, _ in noted} == {"launched"}
    assert {(name, site) for _, name, site in noted} == loaded
