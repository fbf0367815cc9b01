"""Encodes rows of the residual stream on their device.

The bytes equal those of `store/codecs`, bit for bit. `encode_twin` does it in plain torch: for CPU
engines, and as the oracle of the rp8 kernel, which `encode` uses on a GPU.

N = rows, D = model width, G = groups of a row, C = values in a group, K = kept or projected.

Runs in: the worker.
"""

from __future__ import annotations

import math
from functools import lru_cache, singledispatch

import torch

from clairai.errors import EncodingError
from clairai.store.codecs import fp8, int4, minmax8
from clairai.store.codecs.base import Encoder
from clairai.store.codecs.fp8 import Fp8
from clairai.store.codecs.full8 import Full8
from clairai.store.codecs.int4 import Int4
from clairai.store.codecs.philox import BITS, MASK, MULTIPLIERS, ROUNDS, WEYL
from clairai.store.codecs.raw import Raw
from clairai.store.codecs.rp8 import FIXED_BITS, Rp8
from clairai.store.codecs.topk8 import NAN_SIZE, TopK8


def signs_twin(seed: int, width: int, k: int, device: torch.device) -> torch.Tensor:
    """The signs of a random projection: +1 and -1 in int8 [D, K], as `codecs.philox` makes them."""
    row_D1 = torch.arange(width, device=device)[:, None]
    block_1B = torch.arange(-(-k // BITS), device=device)[None]
    words_DBW = torch.stack(_philox(block_1B, row_D1, seed), dim=2)
    bits_DBWI = words_DBW[..., None] >> torch.arange(32, device=device) & 1
    return (1 - 2 * bits_DBWI.reshape(width, -1)[:, :k]).to(torch.int8)


def _philox(first: torch.Tensor, second: torch.Tensor, seed: int) -> list[torch.Tensor]:
    c0, c1 = torch.broadcast_tensors(first, second)
    c2 = c3 = torch.zeros_like(c0)
    keys = [seed & MASK, seed >> 32]
    for _ in range(ROUNDS):
        (high0, low0), (high1, low1) = _product(c0, MULTIPLIERS[0]), _product(c2, MULTIPLIERS[1])
        c0, c1, c2, c3 = high1 ^ c1 ^ keys[0], low1, high0 ^ c3 ^ keys[1], low0
        keys = [(key + step) & MASK for key, step in zip(keys, WEYL, strict=True)]
    return [c0, c1, c2, c3]


def _product(word: torch.Tensor, factor: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The upper and the lower 32 bits; torch has no unsigned 64-bit product."""
    lower, upper = (word & 0xFFFF) * factor, (word >> 16) * factor
    return (upper + (lower >> 16)) >> 16, (lower + ((upper & 0xFFFF) << 16)) & MASK


Encoded = dict[str, torch.Tensor]


def encode_twin(rows_ND: torch.Tensor, encoder: Encoder) -> Encoded:
    """Rows in float32, bfloat16 or float16."""
    if rows_ND.dtype not in (torch.float32, torch.bfloat16, torch.float16):
        raise EncodingError(f"rows are {rows_ND.dtype}; give float32, bfloat16 or float16")
    encoder.nbytes_per_row(rows_ND.shape[1])  # refuses a width that it does not take
    return _encode(encoder, rows_ND)


@singledispatch
def _encode(encoder: Encoder, _rows_ND: torch.Tensor) -> Encoded:
    raise EncodingError(f"{encoder.name} has no form in torch; encode the rows with numpy")


@_encode.register
def _raw(encoder: Raw, rows_ND: torch.Tensor) -> Encoded:
    dtype = str(rows_ND.dtype).removeprefix("torch.")
    if dtype != encoder.dtype:
        raise EncodingError(f"raw: rows are {dtype} and not {encoder.dtype}; name their own dtype")
    rows_ND = rows_ND.contiguous()
    return {"values": rows_ND.view(torch.uint16) if dtype == "bfloat16" else rows_ND}


@_encode.register
def _full8(encoder: Full8, rows_ND: torch.Tensor) -> Encoded:
    num_rows, width = rows_ND.shape
    size = min(encoder.group, width)
    missing = -width % size
    padded_ND = torch.cat((rows_ND.float(), rows_ND[:, -1:].float().expand(-1, missing)), dim=1)
    codes, low_NG, high_NG = _to_bytes(padded_ND.reshape(num_rows, -(-width // size), size))
    codes_ND = codes.reshape(num_rows, width + missing)[:, :width]
    return {"codes": codes_ND.contiguous(), "low": low_NG, "high": high_NG}


@_encode.register
def _rp8(encoder: Rp8, rows_ND: torch.Tensor) -> Encoded:
    projected_NK = project_twin(rows_ND, encoder)
    codes_N1K, low_N1, high_N1 = _to_bytes(projected_NK[:, None])
    return {"codes": codes_N1K[:, 0], "low": low_N1, "high": high_N1}


def project_twin(rows_ND: torch.Tensor, encoder: Rp8) -> torch.Tensor:
    signs_DK = _signs(encoder.seed, rows_ND.shape[1], encoder.k, rows_ND.device)
    _, exponent_N1 = torch.frexp(_largest(rows_ND).double())
    shift_N1 = FIXED_BITS - exponent_N1
    # Integers, whose sums are exact in any order.
    whole_ND = rows_ND.double().mul_(_power(shift_N1)).round_()
    sums_NK = whole_ND @ signs_DK
    return (sums_NK * _power(-shift_N1) * (1 / math.sqrt(encoder.k))).float()


@lru_cache(maxsize=4)  # requests may ask for different ones; each takes MiBs on the device
def _signs(seed: int, width: int, k: int, device: torch.device) -> torch.Tensor:
    return signs_twin(seed, width, k, device).double()


@_encode.register
def _topk8(encoder: TopK8, rows_ND: torch.Tensor) -> Encoded:
    width, rows_ND = rows_ND.shape[1], rows_ND.float()
    kept = encoder.kept(width)
    sizes_ND = rows_ND.abs().view(torch.int32).masked_fill(rows_ND.isnan(), NAN_SIZE)
    order_ND = torch.sort(sizes_ND, dim=1, descending=True, stable=True).indices
    indices_NK = order_ND[:, :kept].sort(dim=1).values
    values_NK = rows_ND.gather(1, indices_NK)
    codes_N1K, low_N1, high_N1 = _to_bytes(values_NK.abs()[:, None])
    dtype = getattr(torch, encoder.layout(width)["indices"].dtype)
    return {
        "indices": indices_NK.to(dtype),
        "codes": codes_N1K[:, 0],
        "signs": _packed_bits(values_NK.signbit() & ~values_NK.isnan()),
        "low": low_N1,
        "high": high_N1,
    }


@_encode.register
def _fp8(_encoder: Fp8, rows_ND: torch.Tensor) -> Encoded:
    is_finite_ND = rows_ND.isfinite()
    size_N1 = _largest(rows_ND).double()
    mantissa_N1, exponent_N1 = torch.frexp(size_N1)
    power_N1 = exponent_N1 - 9 + (mantissa_N1 > fp8.LARGEST / 512)
    power_N1 = power_N1.clamp_min(fp8.MIN_SCALE).masked_fill(size_N1 == 0, 0)
    scaled_ND = rows_ND.double().masked_fill(~is_finite_ND, 0) * _power(-power_N1)
    codes_ND = scaled_ND.float().to(torch.float8_e4m3fn).view(torch.uint8)
    return {
        "codes": codes_ND.masked_fill(~is_finite_ND, fp8.NAN),
        "scale": _power(power_N1).float(),
    }


@_encode.register
def _int4(encoder: Int4, rows_ND: torch.Tensor) -> Encoded:
    num_rows, width = rows_ND.shape
    size = min(encoder.group, width + width % 2)
    padded_ND = torch.nn.functional.pad(rows_ND.double(), (0, -width % size))
    values_NGC = padded_ND.reshape(num_rows, -(-width // size), size)
    finite_NGC = values_NGC.masked_fill(~values_NGC.isfinite(), 0)
    top_NG1 = finite_NGC.abs().amax(dim=2, keepdim=True)
    steps = (finite_NGC * int4.TOP / top_NG1.masked_fill(top_NG1 == 0, 1)).round().to(torch.int8)
    steps = steps.masked_fill(~values_NGC.isfinite(), int4.NOT_FINITE)
    halves = steps.reshape(num_rows, padded_ND.shape[1])[:, : width + width % 2] & 15
    codes = halves.to(torch.uint8)
    return {"codes": codes[:, ::2] | codes[:, 1::2] << 4, "top": top_NG1[:, :, 0].float()}


def _to_bytes(values_NGC: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """As codecs.minmax8 does it."""
    is_finite = values_NGC.isfinite()
    low_NG = values_NGC.masked_fill(~is_finite, math.inf).amin(dim=2)
    high_NG = values_NGC.masked_fill(~is_finite, -math.inf).amax(dim=2)
    is_empty_NG = low_NG > high_NG
    low_NG, high_NG = (
        low_NG.masked_fill(is_empty_NG, 0) + 0,
        high_NG.masked_fill(is_empty_NG, 0) + 0,
    )
    low = low_NG[:, :, None].double()
    span = high_NG[:, :, None].double() - low
    offset = torch.where(is_finite, values_NGC.double(), low) - low
    codes = (offset * minmax8.TOP / span.masked_fill(span == 0, 1)).round().to(torch.uint8)
    codes = codes.masked_fill(values_NGC.isnan(), minmax8.NAN)
    codes = codes.masked_fill(values_NGC == -math.inf, minmax8.MINUS_INFINITY)
    return codes.masked_fill(values_NGC == math.inf, minmax8.PLUS_INFINITY), low_NG, high_NG


def _largest(rows_ND: torch.Tensor) -> torch.Tensor:
    """The largest finite magnitude of each row, as a column."""
    return rows_ND.abs().masked_fill(~rows_ND.isfinite(), 0).amax(dim=1, keepdim=True)


def _power(exponent: torch.Tensor) -> torch.Tensor:
    """2**exponent in float64, made from its bits: torch's ldexp goes through float32."""
    return ((exponent.long() + 1023) << 52).view(torch.float64)


def _packed_bits(is_set_NK: torch.Tensor) -> torch.Tensor:
    num_rows, kept = is_set_NK.shape
    padded = torch.nn.functional.pad(is_set_NK.long(), (0, -kept % 8))
    weights_8 = 1 << torch.arange(8, device=is_set_NK.device)
    return (padded.reshape(num_rows, -(-kept // 8), 8) * weights_8).sum(dim=2).to(torch.uint8)


def encode(rows_ND: torch.Tensor, encoder: Encoder) -> Encoded:
    """Rows in float32, bfloat16 or float16."""
    if rows_ND.device.type != "cuda" or not isinstance(encoder, Rp8):
        return encode_twin(rows_ND, encoder)
    from clairai.engine.capture.rp8_kernel import encode_rp8

    return encode_rp8(
        rows_ND, _kernel_signs(encoder.seed, rows_ND.shape[1], encoder.k, rows_ND.device)
    )


@lru_cache(maxsize=4)  # the engine's default projection, and a few of requests
def _kernel_signs(seed: int, width: int, k: int, device: torch.device) -> torch.Tensor:
    """Transposed: tensor cores want the bytes that are summed side by side."""
    return signs_twin(seed, width, k, device).t().contiguous()
