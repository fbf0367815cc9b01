"""Every row is decoded within the bound of its encoder; planted bugs are found."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings

from clairai.errors import EncodingError
from clairai.store.codecs.base import EncodedArrays, Encoder, RowArray
from clairai.store.codecs.fp8 import Fp8
from clairai.store.codecs.full8 import Full8
from clairai.store.codecs.int4 import Int4
from clairai.store.codecs.raw import Raw, narrow, widen
from clairai.store.codecs.rp8 import Rp8
from clairai.store.codecs.topk8 import TopK8
from tests.support.encoder_oracle import ENCODERS, LARGEST, faults, hostile_rows, like_a_model


@pytest.mark.parametrize("encoder", ENCODERS, ids=str)
@settings(derandomize=True, deadline=None, max_examples=80)
@given(rows_ND=hostile_rows)
def test_any_rows_are_decoded_within_the_bound(encoder: Encoder, rows_ND: RowArray) -> None:
    assert faults(encoder, rows_ND) == []


def _rows(values: list[list[float]]) -> RowArray:
    return np.array(values, np.float32)


EDGES: dict[str, RowArray] = {
    "no rows": np.zeros((0, 5), np.float32),
    "width 1": _rows([[3], [-LARGEST], [np.nan], [0]]),
    "zeros": np.zeros((2, 9), np.float32),
    "constants": np.full((2, 9), -7.25, np.float32),
    "not one finite": _rows([[np.nan, np.inf, -np.inf] * 3]),
    "the largest of both signs": _rows([[LARGEST, -LARGEST, 1, 0] * 3]),
    "the least subnormals": _rows([[1e-45, -1e-45, 3e-45, 0, 1.1e-44] * 2]),
    "huge beside tiny": _rows([[1e38, 1e-38, -1e-30, 1e30] * 3]),
    "equals": _rows([[2, -2, 2, -2, 1, 2, -1, 2, 0]]),
}


@pytest.mark.parametrize("encoder", ENCODERS, ids=str)
@pytest.mark.parametrize("edge", EDGES)
def test_edge_cases_are_decoded_within_the_bound(encoder: Encoder, edge: str) -> None:
    assert faults(encoder, EDGES[edge]) == []


@pytest.mark.parametrize("encoder", ENCODERS, ids=str)
def test_rows_like_those_of_a_model_are_decoded_within_the_bound(encoder: Encoder) -> None:
    assert faults(encoder, like_a_model(6, 300)) == []


@pytest.mark.parametrize("encoder", ENCODERS, ids=str)
def test_a_row_is_encoded_the_same_alone_and_among_others(encoder: Encoder) -> None:
    """Rows are encoded in blocks, and these are more than one block."""
    rows_ND = like_a_model(80, 16384)
    together = encoder.encode(rows_ND)
    for place in (0, 1, 63, 64, 79):
        alone = encoder.encode(rows_ND[place : place + 1])
        assert all((together[name][place] == alone[name][0]).all() for name in together)


@pytest.mark.parametrize("width", [64, 576, 4096])
def test_full8_keeps_a_cosine_of_999_in_1000_on_rows_with_huge_components(width: int) -> None:
    assert _cosine_min(Full8(), like_a_model(64, width)) >= 0.9995


def test_full8_keeps_it_on_the_worst_row_there_is() -> None:
    """Both ends of a group as small as possible, and every value between them half a step off."""
    group_C = np.full(128, 0.5, np.float32)
    group_C[0], group_C[1], group_C[2::2] = -126, 126, -0.5
    assert 0.9995 <= _cosine_min(Full8(), np.tile(group_C, (1, 32))) < 0.9996


@pytest.mark.parametrize("spread", [1, 8, 40, 250])
def test_full8_keeps_it_whatever_the_sizes_in_a_row(spread: int) -> None:
    rng = np.random.default_rng(spread)
    powers = rng.uniform(-spread / 2, spread / 2, (300, 300))
    rows_ND = (rng.choice([-1, 1], (300, 300)) * np.exp2(powers)).astype(np.float32)
    assert _cosine_min(Full8(), rows_ND) >= 0.9995


def test_one_scale_for_a_whole_row_would_not_keep_it() -> None:
    rows_ND = like_a_model(64, 4096)
    assert _cosine_min(Full8(group=4096), rows_ND) < 0.999


def _cosine_min(encoder: Encoder, rows_ND: RowArray) -> float:
    back_ND = encoder.decode(encoder.encode(rows_ND), width=rows_ND.shape[1]).astype(np.float64)
    norms_N = np.linalg.norm(back_ND, axis=1) * np.linalg.norm(rows_ND.astype(np.float64), axis=1)
    return float(((back_ND * rows_ND).sum(axis=1) / norms_N).min())


def test_topk8_keeps_the_first_of_equals_and_their_signs() -> None:
    rows_ND = _rows([[1, -5, 5, 0, -5, 5]])
    encoded = TopK8(k=3).encode(rows_ND)
    assert encoded["indices"].tolist() == [[1, 2, 4]]
    assert TopK8(k=3).decode(encoded, width=6).tolist() == [[0, -5, 5, 0, -5, 0]]


def test_topk8_stores_indices_in_two_bytes_as_long_as_they_fit() -> None:
    for width, dtype in ((1 << 16, "uint16"), ((1 << 16) + 1, "uint32")):
        rows_ND = np.zeros((1, width), np.float32)
        rows_ND[0, -1] = -4
        encoded = TopK8(k=2).encode(rows_ND)
        assert encoded["indices"].dtype == dtype
        assert TopK8(k=2).decode(encoded, width=width)[0, -1] == -4


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_raw_keeps_every_one_of_the_65536_values_of_a_type(dtype: str) -> None:
    bits = np.arange(1 << 16, dtype=np.uint16).reshape(4, -1)
    rows_ND = widen(bits if dtype == "bfloat16" else bits.view(np.float16), dtype)
    encoder = Raw(dtype)
    back_ND = encoder.decode(encoder.encode(rows_ND), width=1 << 14)
    is_nan = np.isnan(rows_ND)
    assert (np.isnan(back_ND) == is_nan).all()
    assert (back_ND.view(np.uint32)[~is_nan] == rows_ND.view(np.uint32)[~is_nan]).all()


@pytest.mark.parametrize(
    ("dtype", "value"), [("bfloat16", 1.001), ("float16", 1e-9), ("float16", 1e6)]
)
def test_raw_refuses_rows_that_are_not_of_the_type(dtype: str, value: float) -> None:
    with pytest.raises(EncodingError, match=f"1 values are not of {dtype}"):
        Raw(dtype).encode(_rows([[1, value]]))


def test_a_nan_whose_bits_are_all_low_stays_one_in_bfloat16() -> None:
    rows_ND = np.array([[0x7F800001, 0xFF800001]], np.uint32).view(np.float32)
    assert np.isnan(widen(narrow(rows_ND, "bfloat16"), "bfloat16")).all()


class _ScaleOfTheWholeBatch(Full8):
    def _encode(self, rows_ND: RowArray) -> EncodedArrays:
        encoded = super()._encode(rows_ND)
        return encoded | {"high": np.full_like(encoded["high"], encoded["high"].max(initial=0))}


class _NanAsTheTop(Full8):
    def _encode(self, rows_ND: RowArray) -> EncodedArrays:
        return super()._encode(np.nan_to_num(rows_ND))


class _RowsSwapped(Fp8):
    def _decode(self, encoded: EncodedArrays, width: int) -> RowArray:
        return super()._decode(encoded, width)[::-1]


class _OtherSeed(Rp8):
    def project(self, rows_ND: RowArray) -> RowArray:
        return Rp8(k=self.k, seed=self.seed + 1).project(rows_ND)


class _SignsLost(TopK8):
    def _encode(self, rows_ND: RowArray) -> EncodedArrays:
        encoded = super()._encode(rows_ND)
        return encoded | {"signs": np.zeros_like(encoded["signs"])}


class _HalvesExchanged(Int4):
    def _encode(self, rows_ND: RowArray) -> EncodedArrays:
        encoded = super()._encode(rows_ND)
        codes = encoded["codes"]
        return encoded | {"codes": codes << np.uint8(4) | codes >> np.uint8(4)}


class _Truncated(Int4):
    def _encode(self, rows_ND: RowArray) -> EncodedArrays:
        return super()._encode(rows_ND * np.float32(0.9))


PLANTED = [
    *(_ScaleOfTheWholeBatch(), _NanAsTheTop(), _RowsSwapped(), _OtherSeed(k=64), _SignsLost()),
    *(_HalvesExchanged(), _Truncated()),
]


@pytest.mark.parametrize("encoder", PLANTED, ids=lambda encoder: type(encoder).__name__)
def test_a_planted_bug_is_found(encoder: Encoder) -> None:
    rows_ND = like_a_model(4, 300)
    rows_ND[2, 5] = np.nan
    assert faults(encoder, rows_ND) != []
