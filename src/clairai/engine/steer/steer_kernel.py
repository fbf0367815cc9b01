"""Steers rows of the residual stream on a GPU, in one launch for each site.

Runs in: the worker. T = tokens in this step, D = model width, G = gates of a request. The tables
are in steer_tables.py; steer_twin.py computes the same in plain torch.

One Triton instance for each row, which it holds in registers as float32. Where a stateful gate
reads, the instance of a request's first row handles all its rows in order and the other instances
none. vLLM's CUDA graphs capture the launch and replay it: what changes between steps is read from
memory at fixed addresses, and arguments given by value are constants of the graph.
"""

from __future__ import annotations

from typing import Final

import torch
import triton
import triton.language as tl

from clairai.engine.steer import steer_tables as t
from clairai.engine.steer.steer_tables import SteerTables
from clairai.engine.steer.steering_plan import MAX_GATES, MAX_OPS

READ: Final = tl.constexpr(t.READ)
ABLATE: Final = tl.constexpr(t.ABLATE)
CLAMP: Final = tl.constexpr(t.CLAMP)
REPLACE: Final = tl.constexpr(t.REPLACE)
SKIPS_SPECIAL: Final = tl.constexpr(t.SKIPS_SPECIAL)
IS_MATCHED: Final = tl.constexpr(t.IS_MATCHED)
IS_SOFT: Final = tl.constexpr(t.IS_SOFT)
IS_HELD: Final = tl.constexpr(t.IS_HELD)
IS_LATCHED: Final = tl.constexpr(t.IS_LATCHED)
ACTIVATION_SHIFT: Final = tl.constexpr(t.ACTIVATION_SHIFT)
FIRST_REAL: Final = tl.constexpr(t.FIRST_REAL)
WORDS: Final = tl.constexpr(t.OP_WORDS)
ENTRY: Final = tl.constexpr(t.MAP_WORDS)
NUM_GATES: Final = tl.constexpr(MAX_GATES)
NUM_OPS: Final = tl.constexpr(MAX_OPS)


@triton.jit
def _sigmoid(z):
    """Through exp(-|z|), which never overflows; NaN stays NaN."""
    small = tl.exp(-tl.abs(z))
    return tl.where(z >= 0, 1.0, small) / (1.0 + small)


@triton.jit
def _gate_value(values_G, gate):
    """The value of one gate; 0 if no gate has that number."""
    return tl.sum(tl.where(tl.arange(0, NUM_GATES) == gate, values_G, 0.0), axis=0)


@triton.jit
def _gate_opening(product, bias, threshold, sharpness, release, flags, state):
    """How row_64 a gate is open, 0 to 1, given its state; a NaN score leaves it closed."""
    activation = flags >> ACTIVATION_SHIFT
    score = product + bias
    score = tl.where((activation == 1) & (score < 0), 0.0, score)
    score = tl.where(activation == 2, _sigmoid(score), score)
    soft = _sigmoid(sharpness * (score - threshold))
    soft = tl.where(soft == soft, soft, 0.0)
    hard = tl.where(score >= threshold, 1.0, 0.0)
    opened = tl.where((flags & IS_SOFT) != 0, soft, hard)
    is_held = ((flags & IS_HELD) != 0) & (score >= release)
    is_kept = ((flags & IS_LATCHED) != 0) | is_held
    return tl.where(is_kept, tl.maximum(opened, state), opened)


@triton.jit
def _factor(stream_D, vector_D, low, high, inverse, kind, flags):
    """How much of the vector is added at full strength."""
    factor = inverse * 0.0 + 1.0
    if (kind == ABLATE) | (kind == CLAMP):
        along = tl.sum(stream_D * vector_D, axis=0) * inverse
        kept = tl.where(kind == CLAMP, tl.minimum(tl.maximum(along, low), high), 0.0)
        # Compared first: with a fused multiply-add, kept - along can leave a rounding error.
        factor = tl.where(kept == along, 0.0, (kept - along) * inverse)
    elif (flags & IS_MATCHED) != 0:
        factor = tl.sqrt(tl.sum(stream_D * stream_D, axis=0)) * inverse
    return factor


@triton.jit
def is_special_token(row, token_ids_ptr, num_ids, special_ptr, vocabulary):
    token_id = tl.load(token_ids_ptr + row, mask=row < num_ids, other=-1).to(tl.int64)
    is_known = (token_id >= 0) & (token_id < vocabulary)
    return tl.load(special_ptr + token_id, mask=is_known, other=0) != 0


@triton.jit
def fetch_op(words_ptr, reals_ptr, op, num_ops, vectors_ptr, num_rows, D, BLOCK_D: tl.constexpr):
    """Load one op and its vector row; all zeros past the last op."""
    is_there = op < num_ops
    word_ptr = words_ptr + op * WORDS
    real_ptr = reals_ptr + op * WORDS + FIRST_REAL
    kind = tl.load(word_ptr, mask=is_there, other=0)
    row = tl.load(word_ptr + 1, mask=is_there, other=-1)
    gate = tl.load(word_ptr + 2, mask=is_there, other=-1)
    flags = tl.load(word_ptr + 3, mask=is_there, other=0)
    real_0 = tl.load(real_ptr, mask=is_there, other=0.0)
    real_1 = tl.load(real_ptr + 1, mask=is_there, other=0.0)
    real_2 = tl.load(real_ptr + 2, mask=is_there, other=0.0)
    real_3 = tl.load(real_ptr + 3, mask=is_there, other=0.0)
    d = tl.arange(0, BLOCK_D)
    end = tl.where((row >= 0) & (row < num_rows), D, 0)
    vector_D = tl.load(vectors_ptr + row.to(tl.int64) * D + d, mask=d < end, other=0.0)
    return kind, gate, flags, real_0, real_1, real_2, real_3, vector_D


@triton.jit
def run_ops(stream_D, gates_at, gates_G, words_ptr, reals_ptr, num_ops, vectors_ptr, num_rows,
            is_special, state_G, kind, gate, flags, real_0, real_1, real_2, real_3, vector_D, D,
            BLOCK_D: tl.constexpr):  # fmt: skip
    """Run a program's ops at this site on one row, held as float32; its first op has been fetched.

    Returns the row, whether it was changed, and the new state of the gates. The next op is fetched
    before this one runs: its loads take longer than the arithmetic.
    """
    g = tl.arange(0, NUM_GATES)
    is_changed = num_ops < 0
    is_read = num_ops < 0
    for op in range(num_ops):
        kind_1, gate_1, flags_1, a_1, b_1, c_1, d_1, vector_1_D = fetch_op(
            words_ptr, reals_ptr, op + 1, num_ops, vectors_ptr, num_rows, D, BLOCK_D)  # fmt: skip
        is_skipped = is_special & ((flags & SKIPS_SPECIAL) != 0)
        if kind == READ:
            product = tl.sum(stream_D * vector_D, axis=0)
            state = _gate_value(state_G, gate)
            opened = _gate_opening(product, real_0, real_1, real_2, real_3, flags, state)
            gates_G = tl.where(g == gate, tl.where(is_skipped, 0.0, opened), gates_G)
            # A stateless gate keeps no state: its number means nothing where plans share a program.
            is_kept = ((flags & (IS_HELD | IS_LATCHED)) != 0) & (is_skipped == 0)
            state_G = tl.where(g == tl.where(is_kept, gate, -1), opened, state_G)
            is_read = num_ops > 0
        else:
            amount = real_0 * tl.where(gate < 0, 1.0, _gate_value(gates_G, gate))
            amount = tl.where(is_skipped, 0.0, amount)
            if amount != 0:
                factor = amount * _factor(stream_D, vector_D, real_1, real_2, real_3, kind, flags)
                keep = tl.where(kind == REPLACE, 1.0 - amount, 1.0)
                is_acting = (factor != 0) | (keep != 1)
                stream_D = tl.where(is_acting, keep * stream_D + factor * vector_D, stream_D)
                is_changed = is_changed | is_acting
        kind, gate, flags, vector_D = kind_1, gate_1, flags_1, vector_1_D
        real_0, real_1, real_2, real_3 = a_1, b_1, c_1, d_1
    if is_read:
        tl.store(gates_at + g, gates_G)
    return stream_D, is_changed, state_G


@triton.jit
def _steer_row(x_at, residual_at, gates_at, words_ptr, reals_ptr, num_ops, vectors_ptr, num_rows,
               is_special, state_G, D,
               BLOCK_D: tl.constexpr, IS_PAIR: tl.constexpr):  # fmt: skip
    """Steer one row in place, and return the new state of the gates."""
    d = tl.arange(0, BLOCK_D)
    stream_D = tl.load(x_at + d, mask=d < D, other=0.0).to(tl.float32)
    if IS_PAIR:
        # The stream is the sum in the model's own precision, as the norm would pass it on.
        stream_D += tl.load(residual_at + d, mask=d < D, other=0.0).to(tl.float32)
        stream_D = stream_D.to(x_at.dtype.element_ty).to(tl.float32)
    gates_G = tl.load(gates_at + tl.arange(0, NUM_GATES))
    kind, gate, flags, real_0, real_1, real_2, real_3, vector_D = fetch_op(
        words_ptr, reals_ptr, 0, num_ops, vectors_ptr, num_rows, D, BLOCK_D)  # fmt: skip
    stream_D, is_changed, state_G = run_ops(
        stream_D, gates_at, gates_G, words_ptr, reals_ptr, num_ops, vectors_ptr, num_rows,
        is_special, state_G, kind, gate, flags, real_0, real_1, real_2, real_3, vector_D, D,
        BLOCK_D)  # fmt: skip
    if is_changed:
        steered_D = stream_D.to(x_at.dtype.element_ty)
        if IS_PAIR:
            tl.store(residual_at + d, steered_D, mask=d < D)
            steered_D = tl.zeros_like(steered_D)
        tl.store(x_at + d, steered_D, mask=d < D)
    return state_G


@triton.jit(do_not_specialize=["site"])
def steer(x_ptr, stride_x, residual_ptr, stride_residual, map_ptr, words_ptr, reals_ptr,
          num_ops_ptr, vectors_ptr, gates_ptr, state_ptr, states_ptr, reads_ptr, token_ids_ptr,
          special_ptr, ran_ptr, site, num_sites, num_programs, num_rows, num_gate_slots, num_ids,
          vocabulary, D,
          BLOCK_D: tl.constexpr, IS_PAIR: tl.constexpr, KEEPS_STATES: tl.constexpr):  # fmt: skip
    first = tl.program_id(0)
    if first == 0:
        tl.store(ran_ptr + site, tl.load(ran_ptr + site) + 1)
    entry_ptr = map_ptr + first * ENTRY
    run = tl.load(entry_ptr + 1)
    # Padding, and most rows where few are steered: two loads decide that nothing is to do.
    if (run != 0) | (tl.load(entry_ptr) > 0):
        gate_slot = tl.load(entry_ptr + 2)
        has_slot = (run != 0) & (gate_slot >= 0) & (gate_slot < num_gate_slots)
        gate_slot = tl.where(has_slot, gate_slot, 0).to(tl.int64)
        reads_at = reads_ptr + gate_slot * num_sites + site
        reads = tl.load(reads_at, mask=has_slot, other=0).to(tl.int32)
        # Where a stateful gate reads, one instance takes the whole run, elsewhere its own row.
        count = tl.where(reads != 0, tl.minimum(run, tl.num_programs(0) - first), 1)
        g = tl.arange(0, NUM_GATES)
        restored = tl.where(tl.load(entry_ptr + 3) == 0, reads, 0)  # 0 for a fresh start
        state_at = state_ptr + gate_slot * NUM_GATES + g
        state_G = tl.load(state_at, mask=((restored >> g) & 1) != 0, other=0.0)
        for offset in range(count):
            row = first + offset
            program = tl.load(map_ptr + row * ENTRY)
            is_known = (program > 0) & (program < num_programs)
            at = tl.where(is_known, program, 0).to(tl.int64) * num_sites + site
            num_ops = tl.minimum(tl.load(num_ops_ptr + at, mask=is_known, other=0), NUM_OPS)
            if num_ops > 0:
                row_64 = row.to(tl.int64)
                is_special = is_special_token(row, token_ids_ptr, num_ids, special_ptr, vocabulary)
                state_G = _steer_row(
                    x_ptr + row_64 * stride_x, residual_ptr + row_64 * stride_residual,
                    gates_ptr + row_64 * NUM_GATES, words_ptr + at * (NUM_OPS * WORDS),
                    reals_ptr + at * (NUM_OPS * WORDS), num_ops, vectors_ptr, num_rows, is_special,
                    state_G, D, BLOCK_D, IS_PAIR)  # fmt: skip
            if KEEPS_STATES:
                tl.store(states_ptr + row.to(tl.int64) * NUM_GATES + g, state_G,
                         mask=((reads >> g) & 1) != 0)  # fmt: skip
        advanced = tl.where(run > 0, reads, 0)
        tl.store(state_at, state_G, mask=((advanced >> g) & 1) != 0)


class SteerLauncher:
    """Launches the kernel on the current stream; it must equal steer_twin.steer_twin."""

    def __init__(self, width: int) -> None:
        self._block = triton.next_power_of_2(width)
        self._num_warps = min(max(self._block // 512, 1), 16)

    def __call__(
        self, x_TD: torch.Tensor, residual_TD: torch.Tensor | None, tables: SteerTables, site: int
    ) -> None:
        if not len(x_TD):
            return
        if x_TD.stride(1) != 1 or (residual_TD is not None and residual_TD.stride(1) != 1):
            raise ValueError("the numbers of a row are not contiguous; the kernel needs stride 1")
        rows = (x_TD, x_TD.stride(0))
        pair = rows if residual_TD is None else (residual_TD, residual_TD.stride(0))
        steer[(len(x_TD),)](
            *rows, *pair, *tables.kernel_arguments(site), tables.width,
            BLOCK_D=self._block, IS_PAIR=residual_TD is not None,
            KEEPS_STATES=tables.keeps_states, num_warps=self._num_warps,
        )  # fmt: skip
