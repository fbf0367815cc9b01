"""The kernel of a tap that is no norm: copies the residual rows to the stash and does nothing else.

Runs in: the worker. T = tokens in this step, D = model width, R = rows of the stash.

A forward waits for this kernel at every tapped layer, so it is as short as a launch can be: each
thread moves one piece of a row. The rows are scored from the stash when the forward is over
(stash_kernel.py).
"""

from __future__ import annotations

from typing import Any, Final

import torch
import triton
import triton.language as tl

from clairai.engine.kernel_launch import WARP_THREADS

MAX_BLOCK_D: Final = 1024
NUMBERS_OF_A_THREAD: Final = 8  # 16 bytes of a 16-bit dtype: one load and one store


@triton.jit
def copy_to_stash(x_ptr, stride_x, stash_ptr, ran_ptr, D, BLOCK_D: tl.constexpr):
    """One program for each row and block of the width."""
    row, block = tl.program_id(0), tl.program_id(1)
    d = block * BLOCK_D + tl.arange(0, BLOCK_D)
    far = row.to(tl.int64)
    x_D = tl.load(x_ptr + far * stride_x + d, mask=d < D)
    tl.store(stash_ptr + far * D + d, x_D, mask=d < D)
    if (row == 0) & (block == 0):
        tl.store(ran_ptr, 1)  # set and not counted: a count would wait for a load


class StashCopier:
    """Launches the kernel on the current stream; it must equal score_tables.copy_to_stash_twin."""

    def __init__(self, width: int) -> None:
        block = min(triton.next_power_of_2(width), MAX_BLOCK_D)
        self._width, self._num_blocks = width, triton.cdiv(width, block)
        num_warps = max(block // (NUMBERS_OF_A_THREAD * WARP_THREADS), 1)
        self._shape: dict[str, Any] = {"BLOCK_D": block, "num_warps": num_warps}

    def __call__(self, rows_TD: torch.Tensor, stash_RD: torch.Tensor, ran: torch.Tensor) -> None:
        num_rows = min(len(rows_TD), len(stash_RD))
        if not num_rows:
            return
        if rows_TD.stride(1) != 1:
            rows_TD = rows_TD[:num_rows].contiguous()  # the kernel takes the numbers side by side
        given = (rows_TD, rows_TD.stride(0), stash_RD, ran, self._width)
        copy_to_stash[(num_rows, self._num_blocks)](*given, **self._shape)
