"""The kernel of a norm that is ours: RMSNorm, steering and a copy for the stash in one launch.

Runs in: the worker. T = tokens in this step, D = model width, G = gates of a request.

The norm is where the residual stream is added up, so reading and changing it costs no extra memory
traffic here: the row is in registers. The kernel does what vLLM's RMSNorm does (ir/ops/layernorm.py
0.26:43, fused_add_rms_norm), steers rows that are steered (steer_kernel.py), and stores the stream
a second time, in the stash, from where it is scored after the forward. One program for each row.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from clairai.engine.steer.steer_kernel import (
    ENTRY,
    NUM_GATES,
    NUM_OPS,
    WORDS,
    fetch_op,
    is_special_token,
    run_ops,
)
from clairai.engine.steer.steer_tables import SteerTables


@triton.jit
def _sum_row(row, x_ptr, stride_x, residual_ptr, stride_residual, D, BLOCK_D: tl.constexpr):
    """The stream's row, before it is rounded to the model's precision."""
    d = tl.arange(0, BLOCK_D)
    far = row.to(tl.int64)
    x_D = tl.load(x_ptr + far * stride_x + d, mask=d < D, other=0.0).to(tl.float32)
    residual_at = residual_ptr + far * stride_residual + d
    return x_D + tl.load(residual_at, mask=d < D, other=0.0).to(tl.float32)


@triton.jit
def _load_weight(weight_ptr, D, BLOCK_D: tl.constexpr):
    d = tl.arange(0, BLOCK_D)
    return tl.load(weight_ptr + d, mask=d < D, other=0.0)


@triton.jit
def _store_row(row, stream_D, weight_D, normed_ptr, stream_ptr, stash_ptr, stash_rows, epsilon, D,
          BLOCK_D: tl.constexpr):  # fmt: skip
    """Store the row, its norm, and its copy in the stash."""
    d = tl.arange(0, BLOCK_D)
    at = row.to(tl.int64) * D + d
    scale = tl.rsqrt(tl.sum(stream_D * stream_D, axis=0) / D + epsilon)
    normed_D = (stream_D * scale).to(weight_D.dtype).to(tl.float32) * weight_D.to(tl.float32)
    rounded_D = stream_D.to(stream_ptr.dtype.element_ty)
    tl.store(normed_ptr + at, normed_D.to(normed_ptr.dtype.element_ty), mask=d < D)
    tl.store(stream_ptr + at, rounded_D, mask=d < D)
    tl.store(stash_ptr + at, rounded_D, mask=d < tl.where(row < stash_rows, D, 0))


@triton.jit(do_not_specialize=["stash_rows"])
def norm(x_ptr, stride_x, residual_ptr, stride_residual, weight_ptr, normed_ptr, stream_ptr,
         stash_ptr, stash_rows, ran_ptr, epsilon, D, BLOCK_D: tl.constexpr):  # fmt: skip
    row = tl.program_id(0)
    stream_D = _sum_row(row, x_ptr, stride_x, residual_ptr, stride_residual, D, BLOCK_D)
    weight_D = _load_weight(weight_ptr, D, BLOCK_D)
    _store_row(row, stream_D, weight_D, normed_ptr, stream_ptr, stash_ptr, stash_rows, epsilon, D,
          BLOCK_D)  # fmt: skip
    if row == 0:
        tl.store(ran_ptr, 1)  # set and not counted: a count would wait for a load


@triton.jit
def _steer_row(row, stream_D, state_G, map_ptr, words_ptr, reals_ptr, num_ops_ptr, vectors_ptr,
             gates_ptr, token_ids_ptr, special_ptr, site, num_sites, num_programs, num_rows,
             num_ids, vocabulary, D, DTYPE: tl.constexpr, BLOCK_D: tl.constexpr):  # fmt: skip
    """The row after its steering program, and the new state of its gates."""
    program = tl.load(map_ptr + row * ENTRY)
    is_known = (program > 0) & (program < num_programs)
    at = tl.where(is_known, program, 0).to(tl.int64) * num_sites + site
    words_ptr += at * (NUM_OPS * WORDS)
    reals_ptr += at * (NUM_OPS * WORDS)
    num_ops = tl.minimum(tl.load(num_ops_ptr + at, mask=is_known, other=0), NUM_OPS)
    gates_at = gates_ptr + row.to(tl.int64) * NUM_GATES
    gates_G = tl.load(gates_at + tl.arange(0, NUM_GATES))
    # The first op is loaded before it is known whether there is one.
    kind, gate, flags, real_0, real_1, real_2, real_3, vector_D = fetch_op(
        words_ptr, reals_ptr, 0, is_known.to(tl.int32), vectors_ptr, num_rows, D, BLOCK_D
    )  # fmt: skip
    is_special = is_special_token(row, token_ids_ptr, num_ids, special_ptr, vocabulary)
    if num_ops > 0:
        # Ops act on the stream in the model's own precision, and leave it in that.
        steered_D, is_changed, state_G = run_ops(
            stream_D.to(DTYPE).to(tl.float32), gates_at, gates_G, words_ptr, reals_ptr, num_ops,
            vectors_ptr, num_rows, is_special, state_G, kind, gate, flags, real_0, real_1, real_2,
            real_3, vector_D, D, BLOCK_D)  # fmt: skip
        stream_D = tl.where(is_changed, steered_D.to(DTYPE).to(tl.float32), stream_D)
    return stream_D, state_G


@triton.jit(do_not_specialize=["stash_rows", "site"])
def norm_steered(x_ptr, stride_x, residual_ptr, stride_residual, weight_ptr, normed_ptr,
                 stream_ptr, stash_ptr, stash_rows, ran_ptr, epsilon, D,
                 map_ptr, words_ptr, reals_ptr, num_ops_ptr, vectors_ptr, gates_ptr, state_ptr,
                 states_ptr, reads_ptr, token_ids_ptr, special_ptr, steered_ptr, site, num_sites,
                 num_programs, num_rows, num_seats, num_ids, vocabulary, BLOCK_D: tl.constexpr,
                 KEEPS_STATES: tl.constexpr):  # fmt: skip
    """Each program does its row; where a gate has a state, the first one does the whole request."""
    first = tl.program_id(0)
    # A program stops at the first value it has to wait for: independent loads come first.
    stream_D = _sum_row(first, x_ptr, stride_x, residual_ptr, stride_residual, D, BLOCK_D)
    weight_D = _load_weight(weight_ptr, D, BLOCK_D)
    entry_ptr = map_ptr + first * ENTRY
    run, seat, is_fresh = tl.load(entry_ptr + 1), tl.load(entry_ptr + 2), tl.load(entry_ptr + 3)
    if (tl.load(entry_ptr) <= 0) & (run == 0):
        # A padding row, or one that is not steered, as most are where few requests steer.
        _store_row(first, stream_D, weight_D, normed_ptr, stream_ptr, stash_ptr, stash_rows,
                   epsilon, D, BLOCK_D)  # fmt: skip
    else:
        is_seated = (run != 0) & (seat >= 0) & (seat < num_seats)
        far = tl.where(is_seated, seat, 0).to(tl.int64)
        reads = tl.load(reads_ptr + far * num_sites + site, mask=is_seated, other=0).to(tl.int32)
        g = tl.arange(0, NUM_GATES)
        remembered = tl.where(is_fresh == 0, reads, 0)
        state_at = state_ptr + far * NUM_GATES + g
        state_G = tl.load(state_at, mask=((remembered >> g) & 1) != 0, other=0.0)
        # Where a gate has a state, this program does all rows of the request, in order.
        count = tl.where(reads != 0, tl.minimum(run, tl.num_programs(0) - first), 1)
        for offset in range(count):
            row = first + offset
            if offset > 0:
                stream_D = _sum_row(row, x_ptr, stride_x, residual_ptr, stride_residual, D, BLOCK_D)
            stream_D, state_G = _steer_row(
                row, stream_D, state_G, map_ptr, words_ptr, reals_ptr, num_ops_ptr, vectors_ptr,
                gates_ptr, token_ids_ptr, special_ptr, site, num_sites, num_programs, num_rows,
                num_ids, vocabulary, D, stream_ptr.dtype.element_ty, BLOCK_D)  # fmt: skip
            _store_row(row, stream_D, weight_D, normed_ptr, stream_ptr, stash_ptr, stash_rows,
                       epsilon, D, BLOCK_D)  # fmt: skip
            if KEEPS_STATES:
                tl.store(states_ptr + row.to(tl.int64) * NUM_GATES + g, state_G,
                         mask=((reads >> g) & 1) != 0)  # fmt: skip
        tl.store(state_at, state_G, mask=((tl.where(run > 0, reads, 0) >> g) & 1) != 0)
    if first == 0:
        tl.store(ran_ptr, 1)
        tl.store(steered_ptr + site, 1)


class FusedNorm:
    """Launches the kernel of one norm on the current stream."""

    def __init__(self, width: int, epsilon: float, stash_RD: torch.Tensor, ran: torch.Tensor):
        block = triton.next_power_of_2(width)
        self._kept = (stash_RD, len(stash_RD), ran, epsilon, width)
        self._shape: dict[str, Any] = {
            "BLOCK_D": block,
            "num_warps": min(max(block // 512, 1), 16),
        }

    def __call__(
        self, x_TD: torch.Tensor, residual_TD: torch.Tensor, weight_D: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The norm's output and the stream; both must equal those of norm_twin."""
        given, made = self._given(x_TD, residual_TD, weight_D)
        if len(x_TD):
            norm[(len(x_TD),)](*given, *self._kept, **self._shape)
        return made

    def steered(
        self,
        x_TD: torch.Tensor,
        residual_TD: torch.Tensor,
        weight_D: torch.Tensor,
        tables: SteerTables,
        site: int,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        given, made = self._given(x_TD, residual_TD, weight_D)
        if len(x_TD):
            steering = tables.kernel_arguments(site)
            norm_steered[(len(x_TD),)](
                *given, *self._kept, *steering, **self._shape, KEEPS_STATES=tables.keeps_states
            )
        return made

    def _given(
        self, x_TD: torch.Tensor, residual_TD: torch.Tensor, weight_D: torch.Tensor
    ) -> tuple[tuple[Any, ...], tuple[torch.Tensor, torch.Tensor]]:
        if x_TD.stride(1) != 1 or residual_TD.stride(1) != 1:
            x_TD, residual_TD = x_TD.contiguous(), residual_TD.contiguous()
        size = {"dtype": x_TD.dtype, "device": x_TD.device}
        made = torch.empty(x_TD.shape, **size), torch.empty(x_TD.shape, **size)
        rows = (x_TD, x_TD.stride(0), residual_TD, residual_TD.stride(0))
        return (*rows, weight_D, *made), made


def norm_twin(
    x_TD: torch.Tensor, residual_TD: torch.Tensor, weight_D: torch.Tensor, epsilon: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """vLLM's own arithmetic in plain torch: ir/ops/layernorm.py fused_add_rms_norm, 0.26:43."""
    sum_TD = x_TD.float() + residual_TD.float()
    scale_T1 = torch.rsqrt(sum_TD.pow(2).mean(dim=-1, keepdim=True) + epsilon)
    normed_TD = (sum_TD * scale_T1).to(weight_D.dtype) * weight_D
    return normed_TD.to(x_TD.dtype), sum_TD.to(x_TD.dtype)
