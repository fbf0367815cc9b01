"""Encoding in torch gives the bytes of the numpy codecs, for any encoder, rows and dtype."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings

from clairai.engine.capture.encode import encode_twin, signs_twin
from clairai.errors import EncodingError
from clairai.store.codecs.base import ArraySpec, EncodedArrays, Encoder, RowArray
from clairai.store.codecs.full8 import Full8
from clairai.store.codecs.philox import random_signs
from clairai.store.codecs.raw import Raw, widen
from clairai.store.codecs.registry import ENCODERS, named
from clairai.store.codecs.rp8 import Rp8
from clairai.store.codecs.topk8 import TopK8
from tests.support.encoder_oracle import ENCODERS as SMALL
from tests.support.encoder_oracle import hostile_rows, like_a_model

DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}


def differences(encoder: Encoder, rows_ND: torch.Tensor, expected: EncodedArrays) -> list[str]:
    """Arrays that differ in name, type, shape or any bit."""
    found = {name: tensor.numpy() for name, tensor in encode_twin(rows_ND, encoder).items()}
    if set(found) != set(expected):
        return [f"{sorted(found)} and not {sorted(expected)}"]
    return [
        name
        for name, array in expected.items()
        if (found[name].dtype, found[name].shape) != (array.dtype, array.shape)
        or found[name].tobytes() != array.tobytes()
    ]


@pytest.mark.parametrize("encoder", SMALL, ids=str)
@settings(derandomize=True, deadline=None, max_examples=40)
@given(rows_ND=hostile_rows)
def test_any_rows_have_the_same_bytes(encoder: Encoder, rows_ND: RowArray) -> None:
    expected = encoder.encode(rows_ND)
    assert differences(encoder, torch.from_numpy(rows_ND.copy()), expected) == []


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", ENCODERS)
@pytest.mark.parametrize("width", [1, 65, 577])
def test_rows_of_a_model_have_the_same_bytes_in_its_own_dtype(
    name: str, dtype: str, width: int
) -> None:
    encoder = named(name, {"dtype": dtype} if name == "raw" else {})
    wide_ND = like_a_model(9, max(width, 4))[:, :width].copy()
    rows_ND = torch.from_numpy(wide_ND).to(DTYPES[dtype])
    rows_ND[3, width // 2], rows_ND[4, 0] = torch.nan, -torch.inf
    assert differences(encoder, rows_ND, encoder.encode(rows_ND.float().numpy())) == []


@pytest.mark.parametrize(("seed", "width", "k"), [(0, 1, 1), (7, 130, 300), (2**64 - 1, 64, 128)])
def test_signs_are_the_same(seed: int, width: int, k: int) -> None:
    found_DK = signs_twin(seed, width, k, torch.device("cpu"))
    assert (found_DK.numpy() == random_signs(seed, width, k)).all()


def test_raw_keeps_the_bits_of_every_bfloat16() -> None:
    bits = np.arange(1 << 16, dtype=np.uint16).reshape(64, -1)
    rows_ND = torch.from_numpy(bits).view(torch.bfloat16)
    values = encode_twin(rows_ND, Raw("bfloat16"))["values"].numpy()
    assert (values == bits).all()
    assert np.array_equal(widen(values, "bfloat16"), rows_ND.float().numpy(), equal_nan=True)


def test_all_floats_of_16_bits_become_the_8_bit_floats_of_torch() -> None:
    """The rounding of numpy and of torch agree on every 16-bit float."""
    bits = np.arange(0x7C00, dtype=np.uint16).reshape(31, -1)
    rows_ND = torch.from_numpy(bits.view(np.float16).astype(np.float32))
    encoder = named("fp8")
    expected = encoder.encode(rows_ND.numpy())
    assert differences(encoder, rows_ND, expected) == []
    codes = torch.from_numpy(np.arange(256, dtype=np.uint8)[None])
    arrays = {"codes": codes.numpy(), "scale": np.ones((1, 1), np.float32)}
    meant = codes.view(torch.float8_e4m3fn).float().numpy()
    assert np.array_equal(encoder.decode(arrays, width=256), meant, equal_nan=True)


def test_rows_that_the_twin_cannot_encode_are_refused() -> None:
    with pytest.raises(EncodingError, match="rows are float32 and not bfloat16"):
        encode_twin(torch.zeros(1, 4), Raw("bfloat16"))
    with pytest.raises(EncodingError, match="give float32, bfloat16 or float16"):
        encode_twin(torch.zeros(1, 4, dtype=torch.float64), Full8())
    with pytest.raises(EncodingError, match="rows of width 0"):
        encode_twin(torch.zeros(1, 0), Full8())
    with pytest.raises(EncodingError, match="has no form in torch"):
        encode_twin(torch.zeros(1, 4), _Unknown())


class _Unknown(Encoder):
    name = "unknown"

    def layout(self, width: int) -> dict[str, ArraySpec]:
        return {"codes": ArraySpec("uint8", width)}

    def _encode(self, rows_ND: RowArray) -> EncodedArrays:
        raise NotImplementedError

    def _decode(self, encoded: EncodedArrays, width: int) -> RowArray:
        raise NotImplementedError


@pytest.mark.parametrize(
    ("twin", "encoder"),
    [(Full8(group=64), Full8()), (Rp8(k=64, seed=1), Rp8(k=64)), (TopK8(k=63), TopK8())],
)
def test_the_comparison_sees_bytes_of_another_encoder(twin: Encoder, encoder: Encoder) -> None:
    rows_ND = like_a_model(4, 200)
    expected = encoder.encode(rows_ND)
    assert differences(twin, torch.from_numpy(rows_ND), expected) != []
    assert differences(encoder, torch.from_numpy(rows_ND), expected) == []
    expected["codes"][2, 3] ^= 1
    assert differences(encoder, torch.from_numpy(rows_ND), expected) == ["codes"]
