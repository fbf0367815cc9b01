"""Takes parts of tensors on a GPU; gives their checksums, and a copy of them in the same pass.

The sum is the one of checksum.py: words are mixed with their place and added up, in any order. A
part is a row of a table in the GPU's memory: where it lies, which word of its tensor it begins
with, how many words it has, which tensor's it is, and where its copy goes. One launch does them
all, each number read from memory once; the last bytes of a tensor, less than a word, are torch's.
"""

from __future__ import annotations

from typing import Final

import torch
import triton
import triton.language as tl

from clairai.weights import checksum as words

TILE_W: Final = 2048  # words that a program has in its registers
TILES: Final = 32  # half a MiB: with shorter parts a model's table took as long as its kernel
PART_WORDS: Final = TILE_W * TILES
FIELDS: Final = 5
CONSTANTS: Final = {
    "TILE_W": TILE_W,
    "PLACE": words.PLACE,
    "STEP": TILE_W * words.PLACE & words.MASK,
    "MIX": words.MIX,
}
NUM_WARPS: Final = 8


@triton.jit
def _mixed(word_W, place_W, MIX: tl.constexpr):
    """Unsigned throughout: products wrap, and a shift brings zeros."""
    x_W = word_W.to(tl.uint64, bitcast=True) + place_W
    x_W = (x_W ^ (x_W >> 33)) * MIX
    return x_W ^ (x_W >> 29)


@triton.jit
def _places(first, TILE_W: tl.constexpr, PLACE: tl.constexpr):
    """Of the first tile; each later one is further by TILE_W times PLACE, without a product."""
    return (first + tl.arange(0, TILE_W)).to(tl.uint64, bitcast=True) * PLACE


@triton.jit
def sum_parts(table_ptr, sums_ptr, TILE_W: tl.constexpr, PLACE: tl.constexpr,
              STEP: tl.constexpr, MIX: tl.constexpr):  # fmt: skip
    """Each part's sum is added to its tensor's."""
    row_ptr = table_ptr + tl.program_id(0).to(tl.int64) * 5
    source_ptr = tl.multiple_of(tl.load(row_ptr), 16).to(tl.pointer_type(tl.int64))
    count = tl.load(row_ptr + 2).to(tl.int32)
    place_W = _places(tl.load(row_ptr + 1), TILE_W, PLACE)
    at_W = tl.arange(0, TILE_W)
    total_W = tl.zeros([TILE_W], dtype=tl.uint64)
    for _ in range(count // TILE_W):
        total_W += _mixed(tl.load(source_ptr + at_W), place_W, MIX)
        source_ptr += TILE_W
        place_W += STEP
    is_there_W = at_W < count % TILE_W
    word_W = tl.load(source_ptr + at_W, mask=is_there_W, other=0)
    total_W += tl.where(is_there_W, _mixed(word_W, place_W, MIX), 0)
    total = tl.sum(total_W, axis=0).to(tl.int64, bitcast=True)
    tl.atomic_add(sums_ptr + tl.load(row_ptr + 3), total, sem="relaxed")


@triton.jit
def copy_parts(table_ptr, sums_ptr, TILE_W: tl.constexpr, PLACE: tl.constexpr,
               STEP: tl.constexpr, MIX: tl.constexpr):  # fmt: skip
    """As sum_parts; what is summed is what is stored, from the same registers."""
    row_ptr = table_ptr + tl.program_id(0).to(tl.int64) * 5
    source_ptr = tl.multiple_of(tl.load(row_ptr), 16).to(tl.pointer_type(tl.int64))
    target_ptr = tl.multiple_of(tl.load(row_ptr + 4), 16).to(tl.pointer_type(tl.int64))
    count = tl.load(row_ptr + 2).to(tl.int32)
    place_W = _places(tl.load(row_ptr + 1), TILE_W, PLACE)
    at_W = tl.arange(0, TILE_W)
    total_W = tl.zeros([TILE_W], dtype=tl.uint64)
    for _ in range(count // TILE_W):
        word_W = tl.load(source_ptr + at_W)
        tl.store(target_ptr + at_W, word_W)
        total_W += _mixed(word_W, place_W, MIX)
        source_ptr += TILE_W
        target_ptr += TILE_W
        place_W += STEP
    is_there_W = at_W < count % TILE_W
    word_W = tl.load(source_ptr + at_W, mask=is_there_W, other=0)
    tl.store(target_ptr + at_W, word_W, mask=is_there_W)
    total_W += tl.where(is_there_W, _mixed(word_W, place_W, MIX), 0)
    total = tl.sum(total_W, axis=0).to(tl.int64, bitcast=True)
    tl.atomic_add(sums_ptr + tl.load(row_ptr + 3), total, sem="relaxed")


def sum_all(table_PF: torch.Tensor, sums_N: torch.Tensor) -> None:
    """One launch on the current stream."""
    sum_parts[(len(table_PF),)](table_PF, sums_N, **CONSTANTS, num_warps=NUM_WARPS)


def copy_all(table_PF: torch.Tensor, sums_N: torch.Tensor) -> None:
    """One launch on the current stream."""
    copy_parts[(len(table_PF),)](table_PF, sums_N, **CONSTANTS, num_warps=NUM_WARPS)
