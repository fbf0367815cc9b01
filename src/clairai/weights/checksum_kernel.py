"""The kernel that sums, or copies and sums, spans of bytes on a GPU.

The sum is that of checksum.py. A span is a row of a table in GPU memory: its address, its number of
words, the number of parts before it, and the address of its copy. One launch handles all spans and
reads each number once: a program finds the span of its part by bisection, so that the table is as
short as the list of tensors. torch handles a last partial word.

A tile is rows of words, and a thread has the same words of every row: it adds them up alone, and
all rows of a tile are loaded at once, 16 bytes a load.
"""

from __future__ import annotations

from typing import Final

import torch
import triton
import triton.language as tl

from clairai.weights import checksum as words

TILE_R: Final = 8
TILE_C: Final = 512
TILES: Final = 32  # a MiB, so that searching the table costs little
TILE_W: Final = TILE_R * TILE_C
PART_WORDS: Final = TILE_W * TILES
FIELDS: Final = 4
CONSTANTS: Final = {
    "TILE_R": TILE_R,
    "TILE_C": TILE_C,
    "TILES": TILES,
    "PLACE": words.PLACE,
    "ROW_STEP": TILE_C * words.PLACE & words.MASK,
    "TILE_STEP": TILE_W * words.PLACE & words.MASK,
    "MIX": words.MIX,
}
NUM_WARPS: Final = 8


@triton.jit
def _mix(x_RC, MIX: tl.constexpr):
    """Unsigned throughout: products wrap, and shifts bring in zeros."""
    x_RC = (x_RC ^ (x_RC >> 33)) * MIX
    return x_RC ^ (x_RC >> 29)


@triton.jit
def _find_span(part, table_ptr, num_spans, num_halvings):
    """The last span whose first part is this one or earlier; empty spans have no part."""
    low = 0
    high = num_spans - 1
    for _ in range(num_halvings):
        middle = (low + high + 1) // 2
        is_before = tl.load(table_ptr + middle * 4 + 2) <= part
        low = tl.where(is_before, middle, low)
        high = tl.where(is_before, high, middle - 1)
    return low


# Not specialised: it is compiled for one span, before the engine serves.
@triton.jit(do_not_specialize=["num_spans", "num_halvings"])
def sum_parts(table_ptr, sums_ptr, num_spans, num_halvings, TILE_R: tl.constexpr,
              TILE_C: tl.constexpr, TILES: tl.constexpr, PLACE: tl.constexpr,
              ROW_STEP: tl.constexpr, TILE_STEP: tl.constexpr, MIX: tl.constexpr,
              IS_COPIED: tl.constexpr):  # fmt: skip
    """Add each part's sum to its tensor's. A word is read once, so the copy is what is summed."""
    part = tl.program_id(0).to(tl.int64)
    span = _find_span(part, table_ptr, num_spans, num_halvings)
    row_ptr = table_ptr + span * 4
    first = (part - tl.load(row_ptr + 2)) * (TILE_R * TILE_C * TILES)
    count = tl.minimum(tl.load(row_ptr + 1) - first, TILE_R * TILE_C * TILES).to(tl.int32)
    source_ptr = (tl.load(row_ptr) + first * 8).to(tl.pointer_type(tl.int64))
    source_ptr = tl.multiple_of(source_ptr, 16)
    if IS_COPIED:
        target_ptr = (tl.load(row_ptr + 3) + first * 8).to(tl.pointer_type(tl.int64))
        target_ptr = tl.multiple_of(target_ptr, 16)
    place = first.to(tl.uint64, bitcast=True) * PLACE
    row_R = tl.arange(0, TILE_R).to(tl.uint64) * ROW_STEP
    across_C = tl.arange(0, TILE_C).to(tl.uint64) * PLACE
    at_RC = tl.arange(0, TILE_R)[:, None] * TILE_C + tl.arange(0, TILE_C)[None, :]
    total_C = tl.zeros([TILE_C], dtype=tl.uint64)
    for _ in range(count // (TILE_R * TILE_C)):
        word_RC = tl.load(source_ptr + at_RC, eviction_policy="evict_first")
        if IS_COPIED:
            tl.store(target_ptr + at_RC, word_RC, eviction_policy="evict_first")
            target_ptr += TILE_R * TILE_C
        x_RC = word_RC.to(tl.uint64, bitcast=True) + (place + row_R)[:, None] + across_C[None, :]
        total_C += tl.sum(_mix(x_RC, MIX), axis=0)
        source_ptr += TILE_R * TILE_C
        place += TILE_STEP
    is_there_RC = at_RC < count % (TILE_R * TILE_C)
    word_RC = tl.load(source_ptr + at_RC, mask=is_there_RC, other=0)
    if IS_COPIED:
        tl.store(target_ptr + at_RC, word_RC, mask=is_there_RC)
    x_RC = word_RC.to(tl.uint64, bitcast=True) + (place + row_R)[:, None] + across_C[None, :]
    total_C += tl.sum(tl.where(is_there_RC, _mix(x_RC, MIX), 0), axis=0)
    total = tl.sum(total_C, axis=0).to(tl.int64, bitcast=True)
    tl.atomic_add(sums_ptr + span, total, sem="relaxed")


def launch_sum(table_NF: torch.Tensor, sums_N: torch.Tensor, num_parts: int) -> None:
    """Launch once, on the current stream."""
    _launch(table_NF, sums_N, num_parts, is_copied=False)


def launch_copy_and_sum(table_NF: torch.Tensor, sums_N: torch.Tensor, num_parts: int) -> None:
    """Launch once, on the current stream."""
    _launch(table_NF, sums_N, num_parts, is_copied=True)


def _launch(
    table_NF: torch.Tensor, sums_N: torch.Tensor, num_parts: int, *, is_copied: bool
) -> None:
    num_spans = len(table_NF)
    given = (table_NF, sums_N, num_spans, num_spans.bit_length())
    sum_parts[(num_parts,)](*given, **CONSTANTS, IS_COPIED=is_copied, num_warps=NUM_WARPS)
