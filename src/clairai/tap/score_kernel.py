"""Takes residual rows on a GPU; gives their scores: product, bias, activation, in one launch.

T = tokens in this step, D = model width, K = probe capacity of a site, H = halves of a weight.

Triton: it needs no compiler on the user's machine, and runs in Triton's interpreter where there is
no GPU. The launch is captured in vLLM's CUDA graphs and replayed for ever: all that is read lies at
fixed addresses, and what is given by value (sizes) is fixed for the graph.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Final

import torch
import triton
import triton.language as tl

from clairai.tap.launch import Driver, Kernel, Launch, by_name

if TYPE_CHECKING:
    from clairai.tap.tables import Tables

TILE_T: Final = 16  # the least that a tensor core multiplies
SLICE_D: Final = 128
MAX_TILE_K: Final = 64
NO_END: Final = 1 << 31
MAX_PARTIALS: Final = 1 << 21  # numbers, 8 MiB: with more tokens than fit, score_long


@triton.jit
def _product(x_ptr, stride_x, weights_ptr, first_t, first_d, first_k, T, D, K,
             TILE_T: tl.constexpr, SLICE_D: tl.constexpr, TILE_K: tl.constexpr,
             IS_SPLIT: tl.constexpr):  # fmt: skip
    """x[tile, slice] @ weights[slice, tile], no coarser than the weights' float32."""
    t = first_t + tl.arange(0, TILE_T)
    d = first_d + tl.arange(0, SLICE_D)
    k = first_k + tl.arange(0, TILE_K)
    x_at = x_ptr + t.to(tl.int64)[:, None] * stride_x + d[None, :]
    x_TD = tl.load(x_at, mask=(t < T)[:, None] & (d < D)[None, :], other=0.0)
    w_at = weights_ptr + d.to(tl.int64)[:, None] * K + k[None, :]
    is_there_DK = (d < D)[:, None] & (k < K)[None, :]
    high_DK = tl.load(w_at, mask=is_there_DK, other=0.0)
    if IS_SPLIT:
        # A float32 weight is the sum of two bfloat16 to 16 bits, and their products are exact.
        low_DK = tl.load(w_at + D * K, mask=is_there_DK, other=0.0)
        product_TK = tl.dot(x_TD, high_DK, tl.dot(x_TD, low_DK))
    else:
        product_TK = tl.dot(x_TD.to(tl.float32), high_DK, input_precision="tf32x3")
    return product_TK


@triton.jit
def _store(scores_ptr, raw_TK, bias_ptr, activation_ptr, first_t, first_k, T, K,
           TILE_T: tl.constexpr, TILE_K: tl.constexpr):  # fmt: skip
    """Add the bias, apply each column's activation, and store what is inside the table."""
    t = first_t + tl.arange(0, TILE_T)
    k = first_k + tl.arange(0, TILE_K)
    activation_K = tl.load(activation_ptr + k, mask=k < K, other=0)[None, :]
    z_TK = raw_TK + tl.load(bias_ptr + k, mask=k < K, other=0.0)[None, :]
    # Through exp(-|z|), which never overflows.
    small_TK = tl.exp(-tl.abs(z_TK))
    sigmoid_TK = tl.where(z_TK >= 0, 1.0, small_TK) / (1.0 + small_TK)
    sigmoid_TK = tl.where(z_TK == z_TK, sigmoid_TK, z_TK)  # NaN stays NaN
    z_TK = tl.where((activation_K == 1) & (z_TK < 0), 0.0, z_TK)
    z_TK = tl.where(activation_K == 2, sigmoid_TK, z_TK)
    at = scores_ptr + t.to(tl.int64)[:, None] * K + k[None, :]
    tl.store(at, z_TK, mask=(t < T)[:, None] & (k < K)[None, :])


@triton.jit(do_not_specialize=["T"])
def score_wide(x_ptr, stride_x, weights_ptr, bias_ptr, activation_ptr, scores_ptr,
               ran_ptr, T, D, K, partial_ptr, ticket_ptr,
               TILE_T: tl.constexpr, SLICE_D: tl.constexpr, TILE_K: tl.constexpr,
               IS_SPLIT: tl.constexpr, NUM_SLICES: tl.constexpr):  # fmt: skip
    """Few tokens: a program for each slice of the width; the last one to finish adds them up.

    The sum is taken in the order of the slices, whoever takes it: same row, same bits.
    """
    tile, part, column = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    first_t, first_k = tile * TILE_T, column * TILE_K
    product_TK = _product(x_ptr, stride_x, weights_ptr, first_t, part * SLICE_D, first_k, T, D, K,
                          TILE_T, SLICE_D, TILE_K, IS_SPLIT)  # fmt: skip
    cell = tl.arange(0, TILE_T)[:, None] * TILE_K + tl.arange(0, TILE_K)[None, :]
    block = (tile * tl.num_programs(2) + column).to(tl.int64)
    partials = partial_ptr + block * (NUM_SLICES * TILE_T * TILE_K) + cell
    tl.store(partials + part * (TILE_T * TILE_K), product_TK)
    tl.debug_barrier()  # all threads' stores come before this program's ticket
    # Release: our slice is visible before the ticket. Acquire: who draws the last ticket sees the
    # slices of all who drew before. The partner is this same line in the other programs.
    drawn = tl.atomic_add(ticket_ptr + block, 1, sem="acq_rel", scope="gpu")
    if drawn == NUM_SLICES - 1:
        raw_TK = tl.zeros([TILE_T, TILE_K], dtype=tl.float32)
        for other in tl.static_range(NUM_SLICES):
            raw_TK += tl.load(partials + other * (TILE_T * TILE_K), cache_modifier=".cg")
        _store(scores_ptr, raw_TK, bias_ptr, activation_ptr, first_t, first_k, T, K, TILE_T, TILE_K)
        tl.store(ticket_ptr + block, 0)  # for the next tap: it begins when this kernel has ended
        if (tile == 0) & (column == 0):
            tl.store(ran_ptr, tl.load(ran_ptr) + 1)


@triton.jit(do_not_specialize=["T"])
def score_long(x_ptr, stride_x, weights_ptr, bias_ptr, activation_ptr, scores_ptr,
               ran_ptr, T, D, K,
               TILE_T: tl.constexpr, SLICE_D: tl.constexpr, TILE_K: tl.constexpr,
               IS_SPLIT: tl.constexpr, NUM_SLICES: tl.constexpr):  # fmt: skip
    """Many tokens: a program for each tile of tokens, over the whole width."""
    tile, column = tl.program_id(0), tl.program_id(1)
    first_t, first_k = tile * TILE_T, column * TILE_K
    raw_TK = tl.zeros([TILE_T, TILE_K], dtype=tl.float32)
    for part in range(NUM_SLICES):
        raw_TK += _product(x_ptr, stride_x, weights_ptr, first_t, part * SLICE_D, first_k, T, D, K,
                           TILE_T, SLICE_D, TILE_K, IS_SPLIT)  # fmt: skip
    _store(scores_ptr, raw_TK, bias_ptr, activation_ptr, first_t, first_k, T, K, TILE_T, TILE_K)
    if (tile == 0) & (column == 0):
        tl.store(ran_ptr, tl.load(ran_ptr) + 1)


@triton.jit(do_not_specialize=["T"])
def score_stash(stash_ptr, site_rows, weights_ptr, bias_ptr, activation_ptr, scores_ptr,
                stashed_ptr, T, max_tokens, D, K,
                TILE_T: tl.constexpr, SLICE_D: tl.constexpr, TILE_K: tl.constexpr,
                IS_SPLIT: tl.constexpr, NUM_SLICES: tl.constexpr):  # fmt: skip
    """All sites at once, from the rows that the forward has left; the same bits as above."""
    tile, column, site = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    if column * TILE_K < tl.load(stashed_ptr + site):
        first_t, first_k, far = tile * TILE_T, column * TILE_K, site.to(tl.int64)
        x_ptr = stash_ptr + far * site_rows * D
        weights_ptr += far * D * K * (2 if IS_SPLIT else 1)
        raw_TK = tl.zeros([TILE_T, TILE_K], dtype=tl.float32)
        for part in range(NUM_SLICES):
            raw_TK += _product(x_ptr, D, weights_ptr, first_t, part * SLICE_D, first_k, T, D, K,
                               TILE_T, SLICE_D, TILE_K, IS_SPLIT)  # fmt: skip
        _store(scores_ptr + far * max_tokens * K, raw_TK, bias_ptr + far * K,
               activation_ptr + far * K, first_t, first_k, T, K, TILE_T, TILE_K)  # fmt: skip


def _tile_k(capacity: int) -> int:
    """Probes that one program scores: rows have the same bits wherever they are scored."""
    return int(min(max(TILE_T, triton.next_power_of_2(capacity)), MAX_TILE_K))


@dataclass(frozen=True)
class Tiling:
    """How the scores of at most this many tokens are spread over the GPU."""

    most_tokens: int
    tile_t: int
    num_warps: int
    num_stages: int  # tiles on their way from memory at once


def stash_tilings(tile_k: int, *, is_split: bool, shared_nbytes: int) -> tuple[Tiling, ...]:
    """Fewest tokens first; `shared_nbytes` is what one program can have of an SM's memory.

    These programs run beside the product that makes the logits, and each keeps that off its SM:
    few and large ones take least from it (bench/gpu_beside.py). Only bfloat16 is known to have the
    same bits in tiles of any size.
    """
    if not is_split:
        return (Tiling(NO_END, TILE_T, tile_k // 8, 3),)
    small = Tiling(32, TILE_T, tile_k // 8, 6)
    middle = Tiling(128, 64, 4, 5)
    large = Tiling(NO_END, 128, 8, 4) if tile_k <= 32 else replace(middle, most_tokens=NO_END)

    def fitting(one: Tiling) -> Tiling:
        nbytes = 2 * SLICE_D * (one.tile_t + 2 * tile_k)
        return replace(one, num_stages=min(one.num_stages, max(shared_nbytes // nbytes, 2)))

    return tuple(map(fitting, (small, middle, large)))


class StashScorer:
    """Launches the kernel above; compiled beforehand, since it is on the way of every step."""

    def __init__(self, tables: Tables) -> None:
        self._tables = tables
        bank = (tables.weights_SHDK, tables.bias_SK, tables.activation_SK)
        self._read = (tables.stash_SRD, *bank, tables.scores_STK, tables.stashed_S)
        num_sites, halves, width, capacity = tables.weights_SHDK.shape
        self.max_tokens = tables.stash_SRD.shape[1]
        self._sizes = (tables.max_tokens, width, capacity)
        tile_k = _tile_k(capacity)
        self._grid = (triton.cdiv(capacity, tile_k), num_sites)
        self._constants: dict[str, Any] = {
            "SLICE_D": SLICE_D,
            "TILE_K": tile_k,
            "IS_SPLIT": halves == 2,
            "NUM_SLICES": triton.cdiv(width, SLICE_D),
        }
        self._kernels: list[tuple[Tiling, Kernel]] = []

    def prepare(self, driver: Driver) -> None:
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
            kernel = Kernel(driver, compiled, by_name(score_stash, given))
            self._kernels.append((tiling, kernel))

    def is_due(self, num_tokens: int) -> bool:
        """Of more tokens than the stash holds, the forward itself has the scores."""
        return 0 < num_tokens <= self.max_tokens and self._tables.num_stashed > 0

    def launch_for(self, num_tokens: int) -> Launch:
        tiling, kernel = next(one for one in self._kernels if num_tokens <= one[0].most_tokens)
        return kernel.launch((-(-num_tokens // tiling.tile_t), *self._grid), T=num_tokens)


class Scorer:
    """Launches the kernel; taps of one engine run one by one, and share its scratch memory."""

    def __init__(self, width: int, capacity: int, max_tokens: int, device: torch.device) -> None:
        tile_k = _tile_k(capacity)
        self._tiles_k = triton.cdiv(capacity, tile_k)
        self._slices = triton.cdiv(width, SLICE_D)
        block = self._slices * self._tiles_k * tile_k * TILE_T
        tiles = min(triton.cdiv(max_tokens, TILE_T), max(MAX_PARTIALS // block, 1))
        self.max_wide_tokens = tiles * TILE_T
        self._partial = torch.zeros(tiles * block, device=device)
        self._ticket = torch.zeros(tiles * self._tiles_k, dtype=torch.int32, device=device)
        tiling = {"TILE_T": TILE_T, "SLICE_D": SLICE_D, "TILE_K": tile_k}
        self._tiling: dict[str, Any] = tiling | {
            "NUM_SLICES": self._slices,
            "num_warps": tile_k // 8,
        }

    @property
    def nbytes(self) -> int:
        return int(self._partial.nbytes + self._ticket.nbytes)

    def __call__(
        self,
        hidden_TD: torch.Tensor,
        weights_HDK: torch.Tensor,
        bias_K: torch.Tensor,
        activation_K: torch.Tensor,
        scores_TK: torch.Tensor,
        ran: torch.Tensor,
    ) -> None:
        """One launch on the current stream; tables.score_twin is what it must equal."""
        if hidden_TD.stride(1) != 1:
            hidden_TD = hidden_TD.contiguous()  # the kernel walks along a row in steps of one
        num_tokens = hidden_TD.shape[0]
        halves, width, capacity = weights_HDK.shape
        tiles_t = triton.cdiv(num_tokens, TILE_T)
        given = (hidden_TD, hidden_TD.stride(0), weights_HDK, bias_K, activation_K, scores_TK)
        sizes = (ran, num_tokens, width, capacity)
        tiling = self._tiling | {"IS_SPLIT": halves == 2}
        if num_tokens > self.max_wide_tokens:
            score_long[(tiles_t, self._tiles_k)](*given, *sizes, **tiling)
            return
        grid = (tiles_t, self._slices, self._tiles_k)
        score_wide[grid](*given, *sizes, self._partial, self._ticket, **tiling)
