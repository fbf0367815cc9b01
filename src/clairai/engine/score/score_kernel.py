"""The kernel that scores residual rows: product, bias and activation in one launch.

Runs in: the worker. T = tokens in this step, D = model width, K = probe capacity of a site,
H = halves of a weight.

Triton needs no compiler on the user's machine, and its interpreter runs the kernel where there is
no GPU. The launch is captured in vLLM's CUDA graphs: all that it reads lies at fixed addresses, and
what is passed by value (sizes) is fixed for the graph.
"""

from __future__ import annotations

from typing import Any, Final

import torch
import triton
import triton.language as tl

from clairai.engine.kernel_launch import load_kernel

TILE_T: Final = 16  # the least that a tensor core multiplies
SLICE_D: Final = 128
MAX_TILE_K: Final = 64
MAX_PARTIALS: Final = 1 << 21  # numbers, 8 MiB: with more tokens than fit, score_long


@triton.jit
def product(x_ptr, stride_x, weights_ptr, first_t, first_d, first_k, T, D, K,
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
def store_scores(scores_ptr, raw_TK, bias_ptr, activation_ptr, first_t, first_k, T, K,
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


@triton.jit
def _partials(partial_ptr, block, TILE_T: tl.constexpr, TILE_K: tl.constexpr,
              NUM_SLICES: tl.constexpr):  # fmt: skip
    cell = tl.arange(0, TILE_T)[:, None] * TILE_K + tl.arange(0, TILE_K)[None, :]
    return partial_ptr + block * (NUM_SLICES * TILE_T * TILE_K) + cell


@triton.jit
def store_slice(partial_ptr, ticket_ptr, block, part, product_TK,
              TILE_T: tl.constexpr, TILE_K: tl.constexpr, NUM_SLICES: tl.constexpr):  # fmt: skip
    """Store the product of slice `part`; True if all other slices are there already."""
    partials = _partials(partial_ptr, block, TILE_T, TILE_K, NUM_SLICES)
    tl.store(partials + part * (TILE_T * TILE_K), product_TK)
    tl.debug_barrier()  # all threads' stores come before this program's ticket
    # Release: our slice is visible before the ticket. Acquire: the program that draws the last
    # ticket sees all slices. Pairs with this same line in the other programs.
    drawn = tl.atomic_add(ticket_ptr + block, 1, sem="acq_rel", scope="gpu")
    return drawn == NUM_SLICES - 1


@triton.jit
def sum_slices(partial_ptr, block, TILE_T: tl.constexpr, TILE_K: tl.constexpr,
           NUM_SLICES: tl.constexpr):  # fmt: skip
    """In the order of the slices, whichever program adds them: same row, same bits."""
    partials = _partials(partial_ptr, block, TILE_T, TILE_K, NUM_SLICES)
    raw_TK = tl.zeros([TILE_T, TILE_K], dtype=tl.float32)
    for part in tl.static_range(NUM_SLICES):
        raw_TK += tl.load(partials + part * (TILE_T * TILE_K), cache_modifier=".cg")
    return raw_TK


@triton.jit(do_not_specialize=["T"])
def score_wide(x_ptr, stride_x, weights_ptr, bias_ptr, activation_ptr, scores_ptr,
               ran_ptr, T, D, K, partial_ptr, ticket_ptr,
               TILE_T: tl.constexpr, SLICE_D: tl.constexpr, TILE_K: tl.constexpr,
               IS_SPLIT: tl.constexpr, NUM_SLICES: tl.constexpr):  # fmt: skip
    """Few tokens: a program for each slice of the width; the last one to finish adds them up."""
    tile, part, column = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    first_t, first_k = tile * TILE_T, column * TILE_K
    product_TK = product(x_ptr, stride_x, weights_ptr, first_t, part * SLICE_D, first_k, T, D, K,
                         TILE_T, SLICE_D, TILE_K, IS_SPLIT)  # fmt: skip
    block = (tile * tl.num_programs(2) + column).to(tl.int64)
    if store_slice(partial_ptr, ticket_ptr, block, part, product_TK, TILE_T, TILE_K, NUM_SLICES):
        raw_TK = sum_slices(partial_ptr, block, TILE_T, TILE_K, NUM_SLICES)
        store_scores(
            scores_ptr, raw_TK, bias_ptr, activation_ptr, first_t, first_k, T, K, TILE_T, TILE_K
        )
        tl.store(ticket_ptr + block, 0)  # for the next tap, which starts when this kernel has ended
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
        raw_TK += product(x_ptr, stride_x, weights_ptr, first_t, part * SLICE_D, first_k, T, D, K,
                          TILE_T, SLICE_D, TILE_K, IS_SPLIT)  # fmt: skip
    store_scores(
        scores_ptr, raw_TK, bias_ptr, activation_ptr, first_t, first_k, T, K, TILE_T, TILE_K
    )
    if (tile == 0) & (column == 0):
        tl.store(ran_ptr, tl.load(ran_ptr) + 1)


def choose_tile_k(capacity: int) -> int:
    """Probes that one program scores; the same everywhere, so that scores have the same bits."""
    return int(min(max(TILE_T, triton.next_power_of_2(capacity)), MAX_TILE_K))


class Scorer:
    """Launches the kernel. Taps of one engine run one after the other and share the scratch."""

    def __init__(self, width: int, capacity: int, max_tokens: int, device: torch.device) -> None:
        tile_k = choose_tile_k(capacity)
        self._tiles_k = triton.cdiv(capacity, tile_k)
        self._slices = triton.cdiv(width, SLICE_D)
        block = self._slices * self._tiles_k * tile_k * TILE_T
        tiles = min(triton.cdiv(max_tokens, TILE_T), max(MAX_PARTIALS // block, 1))
        self.max_wide_tokens = tiles * TILE_T
        self._compiled_for: set[int] = set()  # sites, by where they count their runs
        self._partial = torch.zeros(tiles * block, device=device)
        self._ticket = torch.zeros(tiles * self._tiles_k, dtype=torch.int32, device=device)
        tiling = {"TILE_T": TILE_T, "SLICE_D": SLICE_D, "TILE_K": tile_k}
        self._tiling: dict[str, Any] = tiling | {
            "NUM_SLICES": self._slices,
            "num_warps": tile_k // 8,
        }

    @property
    def scratch(self) -> tuple[torch.Tensor, torch.Tensor]:
        """The products of slices, and the tickets of the programs that stored them."""
        return self._partial, self._ticket

    def __call__(
        self,
        hidden_TD: torch.Tensor,
        weights_HDK: torch.Tensor,
        bias_K: torch.Tensor,
        activation_K: torch.Tensor,
        scores_TK: torch.Tensor,
        ran: torch.Tensor,
    ) -> None:
        """One launch on the current stream; it must equal score_tables.score_twin."""
        if hidden_TD.stride(1) != 1:
            hidden_TD = (
                hidden_TD.contiguous()
            )  # the kernel expects the numbers of a row side by side
        num_tokens = hidden_TD.shape[0]
        halves, width, capacity = weights_HDK.shape
        tiles_t = triton.cdiv(num_tokens, TILE_T)
        read = (hidden_TD, hidden_TD.stride(0), weights_HDK, bias_K, activation_K)
        given = (*read, scores_TK, ran, num_tokens, width, capacity)
        tiling = self._tiling | {"IS_SPLIT": halves == 2}
        if ran.data_ptr() not in self._compiled_for:
            self._compile(given, tiling)
            self._compiled_for.add(ran.data_ptr())
        if num_tokens > self.max_wide_tokens:
            score_long[(tiles_t, self._tiles_k)](*given, **tiling)
            return
        grid = (tiles_t, self._slices, self._tiles_k)
        score_wide[grid](*given, self._partial, self._ticket, **tiling)

    def _compile(self, given: tuple[Any, ...], tiling: dict[str, Any]) -> None:
        """Compile and load both kernels for a site, in the first forward: vLLM's own warm-up.

        That forward has as many tokens as a step can have, and so needs only one of the two; the
        other would be compiled in the first step of a few hundred tokens, when users wait for it.
        Triton compiles again for memory that is aligned otherwise, as that of another site may be.
        """
        load_kernel(score_wide.warmup(*given, self._partial, self._ticket, **tiling, grid=(1,)))
        load_kernel(score_long.warmup(*given, **tiling, grid=(1,)))
