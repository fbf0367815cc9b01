"""Scores all sites of a step in one launch, from the rows that the forward left in the stash.

Runs in: the worker. T = tokens in this step, D = model width, K = probe capacity of a site.

After the forward it runs beside the product that makes the logits: few programs, each over the
whole width (`score_stash`). Within a captured graph it runs beside the model's own products, which
take all of the GPU and wait for whatever occupies a part of it: many short programs
(`score_stash_wide`).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Final

import torch
import triton
import triton.language as tl

from clairai.engine.kernel_launch import CompiledKernel, CudaDriver, KernelLaunch, arguments_by_name
from clairai.engine.score.score_kernel import (
    SLICE_D,
    TILE_T,
    choose_tile_k,
    product,
    store_scores,
    store_slice,
    sum_slices,
)

if TYPE_CHECKING:
    from clairai.engine.score.score_tables import ScoreTables

NO_LIMIT: Final = 1 << 31


@triton.jit(do_not_specialize=["T"])
def score_stash(stash_ptr, site_rows, weights_ptr, bias_ptr, activation_ptr, scores_ptr,
                stashed_ptr, T, max_tokens, D, K,
                TILE_T: tl.constexpr, SLICE_D: tl.constexpr, TILE_K: tl.constexpr,
                IS_SPLIT: tl.constexpr, NUM_SLICES: tl.constexpr):  # fmt: skip
    """All sites at once, from the stash; the same bits as score_kernel.py."""
    tile, column, site = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    if column * TILE_K < tl.load(stashed_ptr + site):
        first_t, first_k, far = tile * TILE_T, column * TILE_K, site.to(tl.int64)
        x_ptr = stash_ptr + far * site_rows * D
        weights_ptr += far * D * K * (2 if IS_SPLIT else 1)
        raw_TK = tl.zeros([TILE_T, TILE_K], dtype=tl.float32)
        for part in range(NUM_SLICES):
            raw_TK += product(x_ptr, D, weights_ptr, first_t, part * SLICE_D, first_k, T, D, K,
                              TILE_T, SLICE_D, TILE_K, IS_SPLIT)  # fmt: skip
        store_scores(scores_ptr + far * max_tokens * K, raw_TK, bias_ptr + far * K,
              activation_ptr + far * K, first_t, first_k, T, K, TILE_T, TILE_K)  # fmt: skip


@triton.jit(do_not_specialize=["T"])
def score_stash_wide(stash_ptr, site_rows, weights_ptr, bias_ptr, activation_ptr, scores_ptr,
                     stashed_ptr, T, max_tokens, D, K, partial_ptr, ticket_ptr,
                     TILE_T: tl.constexpr, SLICE_D: tl.constexpr, TILE_K: tl.constexpr,
                     IS_SPLIT: tl.constexpr, NUM_SLICES: tl.constexpr):  # fmt: skip
    """The same, with a program for each slice of the width."""
    tile, part = tl.program_id(0), tl.program_id(1) % NUM_SLICES
    column, site = tl.program_id(1) // NUM_SLICES, tl.program_id(2)
    if column * TILE_K < tl.load(stashed_ptr + site):
        first_t, first_k, far = tile * TILE_T, column * TILE_K, site.to(tl.int64)
        weights_ptr += far * D * K * (2 if IS_SPLIT else 1)
        product_TK = product(stash_ptr + far * site_rows * D, D, weights_ptr, first_t,
                             part * SLICE_D, first_k, T, D, K, TILE_T, SLICE_D, TILE_K,
                             IS_SPLIT)  # fmt: skip
        num_columns = tl.num_programs(1) // NUM_SLICES
        block = (far * tl.num_programs(0) + tile) * num_columns + column
        if store_slice(
            partial_ptr, ticket_ptr, block, part, product_TK, TILE_T, TILE_K, NUM_SLICES
        ):
            raw_TK = sum_slices(partial_ptr, block, TILE_T, TILE_K, NUM_SLICES)
            store_scores(scores_ptr + far * max_tokens * K, raw_TK, bias_ptr + far * K,
                  activation_ptr + far * K, first_t, first_k, T, K, TILE_T, TILE_K)  # fmt: skip
            tl.store(ticket_ptr + block, 0)  # for the next step, which starts after this one


@dataclass(frozen=True)
class Tiling:
    """How the scores of at most this many tokens are spread over the GPU."""

    most_tokens: int
    tile_t: int
    num_warps: int
    num_stages: int  # tiles that are loaded at once


def stash_tilings(tile_k: int, *, is_split: bool, shared_nbytes: int) -> tuple[Tiling, ...]:
    """Fewest tokens first; `shared_nbytes` is what one program can have of an SM's memory.

    These programs run beside the product that makes the logits, and each keeps that off its SM:
    few and large ones take least from it (bench/gpu_beside.py). Only bfloat16 is known to have the
    same bits in tiles of any size.
    """
    if not is_split:
        return (Tiling(NO_LIMIT, TILE_T, tile_k // 8, 3),)
    small = Tiling(32, TILE_T, tile_k // 8, 6)
    middle = Tiling(128, 64, 4, 5)
    large = Tiling(NO_LIMIT, 128, 8, 4) if tile_k <= 32 else replace(middle, most_tokens=NO_LIMIT)

    def fitting(one: Tiling) -> Tiling:
        nbytes = 2 * SLICE_D * (one.tile_t + 2 * tile_k)
        return replace(one, num_stages=min(one.num_stages, max(shared_nbytes // nbytes, 2)))

    return tuple(map(fitting, (small, middle, large)))


class StashScorer:
    """Launches the kernels above, compiled beforehand: they are part of every step."""

    def __init__(self, tables: ScoreTables) -> None:
        self._tables = tables
        bank = (tables.weights_SHDK, tables.bias_SK, tables.activation_SK)
        self._read = (tables.stash_SRD, *bank, tables.scores_STK, tables.stashed_S)
        # Free at that time: taps that score at once have run.
        self._scratch = tables.scratch
        num_sites, halves, width, capacity = tables.weights_SHDK.shape
        self.max_tokens = tables.stash_SRD.shape[1]
        self._sizes = (tables.max_tokens, width, capacity)
        tile_k = choose_tile_k(capacity)
        self._grid = (triton.cdiv(capacity, tile_k), num_sites)
        self._constants: dict[str, Any] = {
            "SLICE_D": SLICE_D,
            "TILE_K": tile_k,
            "IS_SPLIT": halves == 2,
            "NUM_SLICES": triton.cdiv(width, SLICE_D),
        }
        self._kernels: list[tuple[Tiling, CompiledKernel]] = []
        self._wide: CompiledKernel | None = None

    def prepare(self, driver: CudaDriver) -> None:
        stash, *others = self._read
        given = (stash, self.max_tokens, *others, 1, *self._sizes)
        found = torch.cuda.get_device_properties(stash.device).shared_memory_per_block_optin
        is_split, tile_k = self._constants["IS_SPLIT"], self._constants["TILE_K"]
        self._kernels = []
        for tiling in stash_tilings(tile_k, is_split=is_split, shared_nbytes=found):
            compiled = score_stash.warmup(
                *given,
                **self._constants,
                TILE_T=tiling.tile_t,
                num_warps=tiling.num_warps,
                num_stages=tiling.num_stages,
                grid=(1,),
            )
            kernel = CompiledKernel(driver, compiled, arguments_by_name(score_stash, given))
            self._kernels.append((tiling, kernel))
        self._prepare_wide(driver, (*given, *self._scratch))

    def _prepare_wide(self, driver: CudaDriver, given: tuple[Any, ...]) -> None:
        constants = self._constants | {"TILE_T": TILE_T}
        num_warps = self._constants["TILE_K"] // 8
        compiled = score_stash_wide.warmup(*given, **constants, num_warps=num_warps, grid=(1,))
        self._wide = CompiledKernel(driver, compiled, arguments_by_name(score_stash_wide, given))

    def is_due(self, num_tokens: int) -> bool:
        """A step with more tokens than the stash holds was scored within the forward."""
        return 0 < num_tokens <= self.max_tokens and self._tables.num_stashed > 0

    def launch_for(self, num_tokens: int) -> KernelLaunch:
        tiling, kernel = next(one for one in self._kernels if num_tokens <= one[0].most_tokens)
        return kernel.launch((-(-num_tokens // tiling.tile_t), *self._grid), T=num_tokens)

    def launch_in_graph(self, num_tokens: int) -> KernelLaunch:
        """Many short programs, if the scratch has room for what they pass to each other."""
        (tiles_k, num_sites), tiles_t = self._grid, -(-num_tokens // TILE_T)
        if self._wide is None or num_sites * tiles_t * tiles_k > len(self._scratch[1]):
            return self.launch_for(num_tokens)
        slices = self._constants["NUM_SLICES"]
        return self._wide.launch((tiles_t, tiles_k * slices, num_sites), T=num_tokens)
