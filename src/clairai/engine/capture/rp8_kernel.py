"""Encodes rows as rp8 on a GPU: their random projection, in bytes.

M = rows, D = model width, K = projected, P = planes: five limbs, and which values are infinite.
S = K rounded up: sums are that far apart.

The bits equal those of store/codecs/rp8.py. A row becomes integers of 35 bits, split into five
limbs of eight: a tensor core multiplies bytes by signs without rounding, in whatever order it sums,
and the five sums are combined to one integer of 64 bits. A kernel of its own splits the rows once,
because that takes many more instructions than the product.

Each kernel is compiled once for a model, whatever the number of rows and K: a request chooses K,
and nobody shall wait for a compiler. So no argument that depends on them is specialised.

Runs in: the worker.
"""

from __future__ import annotations

import math
import struct
from typing import Final

import torch
import triton
import triton.language as tl

from clairai.store.codecs import minmax8
from clairai.store.codecs.rp8 import FIXED_BITS

NUM_PLANES: Final = 6
BITS: Final = tl.constexpr(FIXED_BITS)
TOP: Final = tl.constexpr(minmax8.TOP)
NAN: Final = tl.constexpr(minmax8.NAN)
MINUS_INFINITY: Final = tl.constexpr(minmax8.MINUS_INFINITY)
PLUS_INFINITY: Final = tl.constexpr(minmax8.PLUS_INFINITY)
# Adding and subtracting it rounds a float64 below 2**51 to an integer, ties to even.
MAGIC: Final = tl.constexpr(3.0 * 2**51)
MAX_ROWS: Final = 1024  # at once; they take 40 MiB for a model 4096 wide
TILE_D: Final = 128
# Rows (of all planes) and columns of one program, its warps, and its pipeline stages.
TILING: Final = {"TILE_R": 64, "TILE_K": 64, "num_warps": 4, "num_stages": 4}
COMBINED_K: Final = 512  # sums that are combined at a time
ALIGNED_K: Final = 16


@triton.jit
def _power(exponent):
    """2**exponent in float64, made from its bits."""
    return ((exponent.to(tl.int64) + 1023) << 52).to(tl.float64, bitcast=True)


@triton.jit
def _limb(whole):
    """The lowest eight bits as an integer of -128 to 127, and the rest."""
    limb = ((whole + 128) & 255) - 128
    return limb, (whole - limb) >> 8


@triton.jit(do_not_specialize=["M"], do_not_specialize_on_alignment=["infinite_ptr"])
def split_into_planes(
    rows_ptr, planes_ptr, exponent_ptr, infinite_ptr, M, D, BLOCK_D: tl.constexpr
):
    """Split each row into its planes.

    Also stores the exponent of its largest finite value, and how many are infinite; -1 for NaN.
    """
    row, d = tl.program_id(0).to(tl.int64), tl.arange(0, BLOCK_D)
    x_D = tl.load(rows_ptr + row * D + d, mask=d < D, other=0.0).to(tl.float32)
    is_nan_D, is_infinite_D = x_D != x_D, tl.abs(x_D) == float("inf")
    infinite_D = tl.where(is_infinite_D, tl.where(x_D > 0, 1, -1), 0)
    x_D = tl.where(is_infinite_D | is_nan_D, 0.0, x_D)
    largest = tl.max(tl.abs(x_D), axis=0)
    bits = largest.to(tl.float64).to(tl.int64, bitcast=True)
    exponent = tl.where(largest == 0, 0, (bits >> 52) - 1022)
    tl.store(exponent_ptr + row, exponent.to(tl.int32))
    count, num_nan = tl.sum(tl.abs(infinite_D), axis=0), tl.sum(is_nan_D.to(tl.int32), axis=0)
    tl.store(infinite_ptr + row, tl.where(num_nan > 0, -1, count))
    whole_D = (x_D.to(tl.float64) * _power(-(exponent - BITS)) + MAGIC - MAGIC).to(tl.int64)
    out_ptr, step = planes_ptr + row * D + d, M.to(tl.int64) * D
    limb_D, whole_D = _limb(whole_D)
    tl.store(out_ptr, limb_D.to(tl.int8), mask=d < D)
    limb_D, whole_D = _limb(whole_D)
    tl.store(out_ptr + step, limb_D.to(tl.int8), mask=d < D)
    limb_D, whole_D = _limb(whole_D)
    tl.store(out_ptr + 2 * step, limb_D.to(tl.int8), mask=d < D)
    limb_D, whole_D = _limb(whole_D)
    tl.store(out_ptr + 3 * step, limb_D.to(tl.int8), mask=d < D)
    tl.store(out_ptr + 4 * step, whole_D.to(tl.int8), mask=d < D)
    tl.store(out_ptr + 5 * step, infinite_D.to(tl.int8), mask=d < D)


@triton.jit(do_not_specialize=["R", "K"])
def project_planes(planes_ptr, signs_ptr, sums_ptr, R, D, K, S,
            TILE_R: tl.constexpr, TILE_K: tl.constexpr, TILE_D: tl.constexpr):  # fmt: skip
    """planes @ signs, in integers; R = rows of all planes."""
    r = tl.program_id(0) * TILE_R + tl.arange(0, TILE_R)
    k = tl.program_id(1) * TILE_K + tl.arange(0, TILE_K)
    row_at = planes_ptr + r.to(tl.int64)[:, None] * D
    sign_at = signs_ptr + k.to(tl.int64)[:, None] * D
    sum_RK = tl.zeros([TILE_R, TILE_K], dtype=tl.int32)
    for first in range(0, D, TILE_D):
        d = first + tl.arange(0, TILE_D)
        plane_RD = tl.load(row_at + d[None, :], mask=(r < R)[:, None] & (d < D)[None, :], other=0)
        sign_KD = tl.load(sign_at + d[None, :], mask=(k < K)[:, None] & (d < D)[None, :], other=0)
        sum_RK = tl.dot(plane_RD, tl.trans(sign_KD), sum_RK, out_dtype=tl.int32)
    at = sums_ptr + r.to(tl.int64)[:, None] * S + k[None, :]
    tl.store(at, sum_RK, mask=(r < R)[:, None] & (k < K)[None, :])


@triton.jit
def _combine(in_ptr, step, count, unit, factor, k, K):
    """The values of some columns of a row, from their five sums; NaN past the last column."""
    sum_K = tl.load(in_ptr + 4 * step + k, mask=k < K, other=0).to(tl.int64)
    sum_K = (sum_K << 8) + tl.load(in_ptr + 3 * step + k, mask=k < K, other=0)
    sum_K = (sum_K << 8) + tl.load(in_ptr + 2 * step + k, mask=k < K, other=0)
    sum_K = (sum_K << 8) + tl.load(in_ptr + step + k, mask=k < K, other=0)
    sum_K = (sum_K << 8) + tl.load(in_ptr + k, mask=k < K, other=0)
    value_K = (sum_K.to(tl.float64) * unit * factor).to(tl.float32)
    # infinite_K: infinite values of the row that have sign +, minus those with sign -.
    infinite_K = tl.load(in_ptr + 5 * step + k, mask=k < K, other=0)
    value_K = tl.where((count > 0) & (infinite_K == count), float("inf"), value_K)
    value_K = tl.where((count > 0) & (infinite_K == -count), -float("inf"), value_K)
    is_nan_K = (count < 0) | (tl.abs(infinite_K) < count)
    return tl.where(is_nan_K | (k >= K), float("nan"), value_K)


@triton.jit(
    do_not_specialize=["M", "K", "factor_bits"],
    do_not_specialize_on_alignment=["infinite_ptr", "codes_ptr", "low_ptr", "high_ptr"],
)
def combine_sums(sums_ptr, exponent_ptr, infinite_ptr, codes_ptr, low_ptr, high_ptr, M, K, S,
                 factor_bits, TILE_K: tl.constexpr):  # fmt: skip
    """Combine the five sums of each value, scale by the factor, which is given by its bits, and
    encode the row as codecs.minmax8 encodes one group: once for its ends, once for its codes.
    """
    row = tl.program_id(0).to(tl.int64)
    in_ptr, step = sums_ptr + row * S, M.to(tl.int64) * S
    factor = factor_bits.to(tl.int64).to(tl.float64, bitcast=True)
    unit = _power(tl.load(exponent_ptr + row) - BITS)
    count = tl.load(infinite_ptr + row)
    low = unit.to(tl.float32) * 0.0 + float("inf")
    high = -low
    for first in range(0, K, TILE_K):
        value_K = _combine(in_ptr, step, count, unit, factor, first + tl.arange(0, TILE_K), K)
        is_finite_K = tl.abs(value_K) < float("inf")
        low = tl.minimum(low, tl.min(tl.where(is_finite_K, value_K, float("inf")), axis=0))
        high = tl.maximum(high, tl.max(tl.where(is_finite_K, value_K, -float("inf")), axis=0))
    is_empty = low > high
    low, high = tl.where(is_empty, 0.0, low) + 0.0, tl.where(is_empty, 0.0, high) + 0.0
    for first in range(0, K, TILE_K):
        k = first + tl.arange(0, TILE_K)
        value_K = _combine(in_ptr, step, count, unit, factor, k, K)
        tl.store(codes_ptr + row * K + k, _codes(value_K, low, high), mask=k < K)
    tl.store(low_ptr + row, low)
    tl.store(high_ptr + row, high)


@triton.jit
def _codes(value_K, low, high):
    """Where each value lies between the ends, as a byte."""
    is_finite_K = tl.abs(value_K) < float("inf")
    span = high.to(tl.float64) - low.to(tl.float64)
    offset_K = tl.where(is_finite_K, value_K, low).to(tl.float64) - low.to(tl.float64)
    place_K = offset_K * TOP / tl.where(span > 0, span, 1.0)
    code_K = (place_K + MAGIC - MAGIC).to(tl.int32)
    code_K = tl.where(value_K != value_K, NAN, code_K)
    code_K = tl.where(value_K == -float("inf"), MINUS_INFINITY, code_K)
    code_K = tl.where(value_K == float("inf"), PLUS_INFINITY, code_K)
    return code_K.to(tl.uint8)


def encode_rp8(rows_MD: torch.Tensor, signs_KD: torch.Tensor) -> dict[str, torch.Tensor]:
    """On the current stream. Equals `encode_twin`, bit for bit."""
    rows_MD = rows_MD.contiguous()
    num_rows, (k, width) = len(rows_MD), signs_KD.shape
    device = rows_MD.device
    codes_MK = torch.empty(num_rows, k, dtype=torch.uint8, device=device)
    low_M1, high_M1 = torch.empty(2, num_rows, 1, device=device)
    max_rows = min(num_rows, MAX_ROWS)
    planes = torch.empty(NUM_PLANES * max_rows, width, dtype=torch.int8, device=device)
    stride = triton.cdiv(k, ALIGNED_K) * ALIGNED_K
    sums = torch.empty(NUM_PLANES * max_rows, stride, dtype=torch.int32, device=device)
    scales = torch.empty(2, max_rows, dtype=torch.int32, device=device)
    for first in range(0, num_rows, MAX_ROWS):
        part = slice(first, first + MAX_ROWS)
        encoded = (codes_MK[part], low_M1[part], high_M1[part])
        _launch(rows_MD[part], signs_KD, (planes, sums, scales), encoded)
    return {"codes": codes_MK, "low": low_M1, "high": high_M1}


def _launch(
    rows_MD: torch.Tensor,
    signs_KD: torch.Tensor,
    scratch: tuple[torch.Tensor, ...],
    encoded: tuple[torch.Tensor, ...],
) -> None:
    """The three launches for at most MAX_ROWS rows."""
    num_rows, (k, width) = len(rows_MD), signs_KD.shape
    planes, sums, (exponent_M, infinite_M) = scratch
    split_into_planes[(num_rows,)](
        rows_MD, planes, exponent_M, infinite_M, num_rows, width,
        BLOCK_D=triton.next_power_of_2(width), num_warps=8,
    )  # fmt: skip
    rows, stride = NUM_PLANES * num_rows, sums.shape[1]
    tiles = (triton.cdiv(rows, TILING["TILE_R"]), triton.cdiv(k, TILING["TILE_K"]))
    project_planes[tiles](
        planes, signs_KD, sums, rows, width, k, stride, TILE_D=TILE_D, **TILING
    )  # fmt: skip
    factor_bits = struct.unpack("<q", struct.pack("<d", 1 / math.sqrt(k)))[0]
    combine_sums[(num_rows,)](
        sums, exponent_M, infinite_M, *encoded, num_rows, k, stride, factor_bits,
        TILE_K=COMBINED_K,
    )  # fmt: skip
