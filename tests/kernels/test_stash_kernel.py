"""Scores from the stash equal scores in the forward to the bit, in tiles of any size.

T = tokens, D = model width, K = capacity of a site, S = sites.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from clairai.engine.score import stash_kernel
from clairai.engine.score.score_kernel import SLICE_D, TILE_T, choose_tile_k
from clairai.engine.score.score_tables import ScoreTables
from clairai.engine.score.stash_kernel import StashScorer, stash_tilings
from tests.kernels.test_score_kernel import DTYPES, Case, case, kernel

WIDTH, MAX_TOKENS, STASH_ROWS = 200, 40, 24
NOTHING = 1234.5  # where no score was written
SHAPES = [(1, 1), (17, 16), (20, 70)]


def cases_of(num_tokens: int, capacity: int, dtype: str) -> list[Case]:
    return [case(num_tokens, WIDTH, capacity, DTYPES[dtype], seed) for seed in range(3)]


def given_of(cases: list[Case]) -> tuple[Any, ...]:
    """Three sites: scored later, not at all, scored later with one probe."""
    num_tokens, capacity = len(cases[0].hidden_TD), cases[0].weights_HDK.shape[2]
    dtype = cases[0].hidden_TD.dtype
    stash_SRD = torch.full((3, STASH_ROWS, WIDTH), float("nan"), dtype=dtype)
    for site, one in enumerate(cases):
        stash_SRD[site, :num_tokens] = one.hidden_TD
    scores_STK = torch.full((3, MAX_TOKENS, capacity), NOTHING)
    stashed_S = torch.tensor([capacity, 0, 1], dtype=torch.int32)
    bank = [
        torch.stack([getattr(one, name) for one in cases])
        for name in ("weights_HDK", "bias_K", "activation_K")
    ]
    sizes = (num_tokens, MAX_TOKENS, WIDTH, capacity)
    return (stash_SRD, STASH_ROWS, *bank, scores_STK, stashed_S, *sizes)


def constants_of(given: tuple[Any, ...], tile_t: int) -> dict[str, Any]:
    return {
        "TILE_T": tile_t,
        "SLICE_D": SLICE_D,
        "TILE_K": choose_tile_k(given[-1]),
        "IS_SPLIT": given[0].dtype == torch.bfloat16,
        "NUM_SLICES": -(-WIDTH // SLICE_D),
    }


def scored(cases: list[Case], tile_t: int) -> torch.Tensor:
    given = given_of(cases)
    constants = constants_of(given, tile_t)
    tiles = (-(-given[7] // tile_t), -(-given[-1] // constants["TILE_K"]), 3)
    with np.errstate(all="ignore"):
        stash_kernel.score_stash[tiles](*given, **constants)
    scores_STK: torch.Tensor = given[5]
    return scores_STK


def scored_wide(cases: list[Case], **changes: Any) -> torch.Tensor:
    """Twice: the second launch finds what the first one left."""
    given = given_of(cases)
    constants = constants_of(given, TILE_T) | changes
    slices, tiles_t = constants["NUM_SLICES"], -(-given[7] // TILE_T)
    tiles_k = -(-given[-1] // constants["TILE_K"])
    block = slices * TILE_T * constants["TILE_K"]
    partial = torch.full((3 * tiles_t * tiles_k * block,), float("nan"))
    ticket = torch.zeros(3 * tiles_t * tiles_k, dtype=torch.int32)
    for _ in range(2):
        given[5].fill_(NOTHING)
        with np.errstate(all="ignore"):
            stash_kernel.score_stash_wide[tiles_t, tiles_k * slices, 3](
                *given, partial, ticket, **constants
            )
        assert not ticket.any()
    scores_STK: torch.Tensor = given[5]
    return scores_STK


def check(cases: list[Case], scores_STK: torch.Tensor) -> None:
    num_tokens = len(cases[0].hidden_TD)
    assert torch.equal(scores_STK[0, :num_tokens], kernel(cases[0]))
    assert torch.equal(scores_STK[2, :num_tokens, :1], kernel(cases[2])[:, :1])
    assert (scores_STK[1] == NOTHING).all()
    assert (scores_STK[:, num_tokens:] == NOTHING).all()


@pytest.mark.parametrize("tile_t", [TILE_T, 64])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("num_tokens", "capacity"), SHAPES)
def test_rows_in_the_stash_have_the_bits_of_rows_in_the_forward(
    num_tokens: int, capacity: int, dtype: str, tile_t: int
) -> None:
    cases = cases_of(num_tokens, capacity, dtype)
    check(cases, scored(cases, tile_t))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("num_tokens", "capacity"), SHAPES)
def test_a_program_for_each_slice_of_the_width_gives_the_same_bits(
    num_tokens: int, capacity: int, dtype: str
) -> None:
    cases = cases_of(num_tokens, capacity, dtype)
    check(cases, scored_wide(cases))


def test_a_slice_that_is_left_out_would_be_noticed() -> None:
    cases = cases_of(17, 16, "float32")
    with pytest.raises(AssertionError):
        check(cases, scored_wide(cases, NUM_SLICES=1))


@pytest.mark.parametrize(("num_tokens", "is_wide"), [(1, True), (32, True), (33, False)])
def test_many_programs_are_used_where_what_they_leave_for_each_other_has_room(
    num_tokens: int, is_wide: bool
) -> None:
    held = ScoreTables(
        ["a", "b"], width=WIDTH, capacity=70, max_tokens=64, device="cpu", stash_rows=48
    )
    held.scratch = (torch.zeros(1), torch.zeros(8, dtype=torch.int32))  # 2 sites x 2 x 2 tiles
    scorer = StashScorer(held)
    wide, plain = ToyKernel(), ToyKernel()
    scorer._wide = wide  # type: ignore[assignment]
    tiling = stash_tilings(64, is_split=False, shared_nbytes=232_448)[0]
    scorer._kernels = [(tiling, plain)]  # type: ignore[list-item]
    scorer.launch_in_graph(num_tokens)
    tiles_t = -(-num_tokens // TILE_T)
    assert wide.launched == ([((tiles_t, 2 * 2, 2), num_tokens)] if is_wide else [])
    assert plain.launched == ([] if is_wide else [((tiles_t, 2, 2), num_tokens)])


class ToyKernel:
    def __init__(self) -> None:
        self.launched: list[tuple[tuple[int, ...], int]] = []

    def launch(self, grid: tuple[int, ...], **cells: int) -> None:
        self.launched.append((grid, cells["T"]))


@pytest.mark.parametrize("shared_nbytes", [232_448, 166_912, 101_376])  # H200, A100, RTX 4090
@pytest.mark.parametrize("capacity", [1, 16, 32, 64, 512])
def test_every_tiling_fits_the_gpu_and_there_is_one_for_any_number_of_tokens(
    capacity: int, shared_nbytes: int
) -> None:
    tile_k = choose_tile_k(capacity)
    found = stash_tilings(tile_k, is_split=True, shared_nbytes=shared_nbytes)
    assert [one.most_tokens for one in found] == [32, 128, stash_kernel.NO_LIMIT]
    for one in found:
        assert one.num_stages * 2 * SLICE_D * (one.tile_t + 2 * tile_k) <= shared_nbytes
        assert one.num_stages >= 2
    (alone,) = stash_tilings(tile_k, is_split=False, shared_nbytes=shared_nbytes)
    assert (alone.tile_t, alone.most_tokens) == (TILE_T, stash_kernel.NO_LIMIT)
