"""Takes rows of the residual stream on a GPU; gives their random projection in bytes, as rp8 does.

M = rows, D = model width, K = projected, L = limbs of a whole number.

The bits are those of store/codecs/rp8.py. A row becomes whole numbers of 35 bits, and those five
limbs of eight: a tensor core multiplies limbs by signs without any rounding, whatever the order of
its sums, and the five sums are put together as one whole number of 64 bits.
"""

from __future__ import annotations

import math
import struct
from typing import Any, Final

import torch
import triton
import triton.language as tl

from clairai.store.codecs import ends8
from clairai.store.codecs.rp8 import FIXED_BITS

NUM_LIMBS: Final = tl.constexpr(5)
BITS: Final = tl.constexpr(FIXED_BITS)
TOP: Final = tl.constexpr(ends8.TOP)
NAN: Final = tl.constexpr(ends8.NAN)
MINUS_INFINITY: Final = tl.constexpr(ends8.MINUS_INFINITY)
PLUS_INFINITY: Final = tl.constexpr(ends8.PLUS_INFINITY)
# Added and taken away again, it leaves a float64 below 2**51 rounded to a whole number, to even.
MAGIC: Final = tl.constexpr(3.0 * 2**51)
TILE_M: Final = 32
TILE_K: Final = 64
TILE_D: Final = 64


@triton.jit
def _power(exponent):
    """Two to this, in float64, by its bits."""
    return ((exponent.to(tl.int64) + 1023) << 52).to(tl.float64, bitcast=True)


@triton.jit
def find_scale(rows_ptr, exponent_ptr, infinite_ptr, D, BLOCK_D: tl.constexpr):
    """Of each row: the exponent of its largest finite value; how many are infinite; -1 for NaN."""
    row, d = tl.program_id(0).to(tl.int64), tl.arange(0, BLOCK_D)
    x_D = tl.load(rows_ptr + row * D + d, mask=d < D, other=0.0).to(tl.float32)
    size_D = tl.abs(x_D)
    is_infinite_D = size_D == float("inf")
    is_nan_D = x_D != x_D
    largest = tl.max(tl.where(is_infinite_D | is_nan_D, 0.0, size_D), axis=0)
    bits = largest.to(tl.float64).to(tl.int64, bitcast=True)
    exponent = tl.where(largest == 0, 0, (bits >> 52) - 1022)
    tl.store(exponent_ptr + row, exponent.to(tl.int32))
    count = tl.sum(is_infinite_D.to(tl.int32), axis=0)
    num_nan = tl.sum(is_nan_D.to(tl.int32), axis=0)
    tl.store(infinite_ptr + row, tl.where(num_nan > 0, -1, count))


@triton.jit
def _limb(whole):
    """The lowest eight bits as a number from -128 to 127, and the rest."""
    limb = ((whole + 128) & 255) - 128
    return limb, (whole - limb) >> 8


@triton.jit(do_not_specialize=["M", "factor_bits"])
def project(rows_ptr, exponent_ptr, infinite_ptr, signs_ptr, out_ptr, M, D, K, factor_bits,
            TILE_M: tl.constexpr, TILE_K: tl.constexpr, TILE_D: tl.constexpr):  # fmt: skip
    """rows @ signs * factor, exact but for the last roundings; the factor is given by its bits."""
    m = tl.program_id(0) * TILE_M + tl.arange(0, TILE_M)
    k = tl.program_id(1) * TILE_K + tl.arange(0, TILE_K)
    exponent_M = tl.load(exponent_ptr + m, mask=m < M, other=0)
    infinite_M = tl.load(infinite_ptr + m, mask=m < M, other=0)
    scale_M1 = _power(-(exponent_M - BITS))[:, None]
    far_M1 = m.to(tl.int64)[:, None] * D
    zero_MK = tl.zeros([TILE_M, TILE_K], dtype=tl.float32)
    sum_0, sum_1, sum_2, sum_3, sum_4 = zero_MK, zero_MK, zero_MK, zero_MK, zero_MK
    sum_infinite = zero_MK
    for first in range(0, D, TILE_D):
        d = first + tl.arange(0, TILE_D)
        is_there_MD = (m < M)[:, None] & (d < D)[None, :]
        x_MD = tl.load(rows_ptr + far_M1 + d[None, :], mask=is_there_MD, other=0.0).to(tl.float32)
        is_there_DK = (d < D)[:, None] & (k < K)[None, :]
        signs_at = signs_ptr + d.to(tl.int64)[:, None] * K + k[None, :]
        signs_DK = tl.load(signs_at, mask=is_there_DK, other=0).to(tl.float32).to(tl.bfloat16)
        infinite_MD = (x_MD == float("inf")).to(tl.float32) - (x_MD == -float("inf")).to(tl.float32)
        x_MD = tl.where((infinite_MD == 0) & (x_MD == x_MD), x_MD, 0.0)
        whole_MD = (x_MD.to(tl.float64) * scale_M1 + MAGIC - MAGIC).to(tl.int64)
        limb_0, whole_MD = _limb(whole_MD)
        limb_1, whole_MD = _limb(whole_MD)
        limb_2, whole_MD = _limb(whole_MD)
        limb_3, whole_MD = _limb(whole_MD)
        sum_0 = tl.dot(limb_0.to(tl.float32).to(tl.bfloat16), signs_DK, sum_0)
        sum_1 = tl.dot(limb_1.to(tl.float32).to(tl.bfloat16), signs_DK, sum_1)
        sum_2 = tl.dot(limb_2.to(tl.float32).to(tl.bfloat16), signs_DK, sum_2)
        sum_3 = tl.dot(limb_3.to(tl.float32).to(tl.bfloat16), signs_DK, sum_3)
        sum_4 = tl.dot(whole_MD.to(tl.float32).to(tl.bfloat16), signs_DK, sum_4)
        sum_infinite = tl.dot(infinite_MD.to(tl.bfloat16), signs_DK, sum_infinite)
    sum_MK = (sum_4.to(tl.int64) << 8) + sum_3.to(tl.int64)
    sum_MK = (sum_MK << 8) + sum_2.to(tl.int64)
    sum_MK = (sum_MK << 8) + sum_1.to(tl.int64)
    sum_MK = (sum_MK << 8) + sum_0.to(tl.int64)
    factor = factor_bits.to(tl.int64).to(tl.float64, bitcast=True)
    value_MK = sum_MK.to(tl.float64) * _power(exponent_M - BITS)[:, None] * factor
    # Of the infinite values of a row so many have one sign, and the others the other.
    count_MK = infinite_M[:, None].to(tl.float32) + zero_MK
    value_MK = tl.where((count_MK > 0) & (sum_infinite == count_MK), float("inf"), value_MK)
    value_MK = tl.where((count_MK > 0) & (sum_infinite == -count_MK), -float("inf"), value_MK)
    is_nan_MK = (count_MK < 0) | (tl.abs(sum_infinite) < count_MK)
    value_MK = tl.where(is_nan_MK, float("nan"), value_MK)
    at = out_ptr + m.to(tl.int64)[:, None] * K + k[None, :]
    tl.store(at, value_MK.to(tl.float32), mask=(m < M)[:, None] & (k < K)[None, :])


@triton.jit
def to_bytes(values_ptr, codes_ptr, low_ptr, high_ptr, K, BLOCK_K: tl.constexpr):
    """As ends8.to_bytes, of one group for each row."""
    row, k = tl.program_id(0).to(tl.int64), tl.arange(0, BLOCK_K)
    value_K = tl.load(values_ptr + row * K + k, mask=k < K, other=float("nan"))
    is_finite_K = tl.abs(value_K) < float("inf")
    low = tl.min(tl.where(is_finite_K, value_K, float("inf")), axis=0)
    high = tl.max(tl.where(is_finite_K, value_K, -float("inf")), axis=0)
    is_empty = low > high
    low, high = tl.where(is_empty, 0.0, low) + 0.0, tl.where(is_empty, 0.0, high) + 0.0
    span = high.to(tl.float64) - low.to(tl.float64)
    offset_K = tl.where(is_finite_K, value_K, low).to(tl.float64) - low.to(tl.float64)
    place_K = offset_K * TOP / tl.where(span > 0, span, 1.0)
    code_K = (place_K + MAGIC - MAGIC).to(tl.int32)
    code_K = tl.where(value_K != value_K, NAN, code_K)
    code_K = tl.where(value_K == -float("inf"), MINUS_INFINITY, code_K)
    code_K = tl.where(value_K == float("inf"), PLUS_INFINITY, code_K)
    tl.store(codes_ptr + row * K + k, code_K.to(tl.uint8), mask=k < K)
    tl.store(low_ptr + row, low)
    tl.store(high_ptr + row, high)


def encode_rp8(rows_MD: torch.Tensor, signs_DK: torch.Tensor) -> dict[str, torch.Tensor]:
    """Three launches on the current stream; encode_twin is what it must equal, bit for bit."""
    rows_MD = rows_MD.contiguous()
    num_rows, width = rows_MD.shape
    k = signs_DK.shape[1]
    made: dict[str, Any] = {"device": rows_MD.device}
    exponent_M, infinite_M = torch.empty(2, num_rows, dtype=torch.int32, **made)
    values_MK = torch.empty(num_rows, k, **made)
    codes_MK = torch.empty(num_rows, k, dtype=torch.uint8, **made)
    ends = torch.empty(2, num_rows, 1, **made)
    if num_rows:
        block = triton.next_power_of_2(width)
        find_scale[(num_rows,)](rows_MD, exponent_M, infinite_M, width, BLOCK_D=block)
        tiles = (triton.cdiv(num_rows, TILE_M), triton.cdiv(k, TILE_K))
        project[tiles](
            rows_MD, exponent_M, infinite_M, signs_DK, values_MK, num_rows, width, k,
            struct.unpack("<q", struct.pack("<d", 1 / math.sqrt(k)))[0],
            TILE_M=TILE_M, TILE_K=TILE_K, TILE_D=TILE_D,
        )  # fmt: skip
        ended = (codes_MK, ends[0], ends[1])
        to_bytes[(num_rows,)](values_MK, *ended, k, BLOCK_K=triton.next_power_of_2(k))
    return {"codes": codes_MK, "low": ends[0], "high": ends[1]}
