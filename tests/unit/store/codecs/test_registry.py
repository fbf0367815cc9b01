"""An encoder is made from its name and parameters, and wrong ones are refused."""

from __future__ import annotations

import json
from dataclasses import FrozenInstanceError
from typing import Any

import numpy as np
import pytest

from clairai.errors import ConfigError, EncodingError
from clairai.store.codecs import base
from clairai.store.codecs.base import Encoder
from clairai.store.codecs.registry import ENCODERS, named
from clairai.store.codecs.rp8 import Rp8
from tests.support.encoder_oracle import ENCODERS as SMALL
from tests.support.encoder_oracle import like_a_model


@pytest.mark.parametrize("encoder", SMALL, ids=str)
def test_an_encoder_is_made_again_from_what_a_shard_stores(encoder: Encoder) -> None:
    parameters = json.loads(json.dumps(encoder.parameters))
    assert named(encoder.name, parameters) == encoder


def test_every_encoder_has_defaults_and_one_name() -> None:
    assert sorted(ENCODERS) == ["fp8", "full8", "int4", "raw", "rp8", "topk8"]
    assert all(named(name).name == name for name in ENCODERS)


@pytest.mark.parametrize(
    ("name", "parameters", "reason"),
    [
        ("rp9", {}, "no encoder is named 'rp9'; give one of raw, full8"),
        (None, {}, "no encoder is named"),
        (["rp8"], {}, "no encoder is named"),
        ("rp8", {"dims": 4}, "encoder rp8 has no 'dims'; it takes k, seed"),
        ("fp8", {"k": 4}, "it takes no parameters"),
        ("rp8", {"k": 0}, "rp8: k is 0; give a whole number from 1 to 8192"),
        ("rp8", {"k": 8193}, "from 1 to 8192"),
        ("rp8", {"k": True}, "k is True"),
        ("rp8", {"k": 4.0}, "k is 4.0"),
        ("rp8", {"k": "512"}, "k is '512'"),
        ("rp8", {"seed": -1}, "seed is -1"),
        ("rp8", {"seed": 2**64}, "from 0 to 18446744073709551615"),
        ("topk8", {"k": 0}, "topk8: k is 0"),
        ("full8", {"group": 1}, "full8: group is 1; give a whole number from 2"),
        ("int4", {"group": 7}, "int4: group is 7; give an even number"),
        ("raw", {"dtype": "float64"}, "give one of float32, float16, bfloat16"),
        ("raw", {"dtype": ["float32"]}, "give one of float32"),
    ],
)
def test_a_wrong_name_or_parameter_is_refused(
    name: object, parameters: dict[str, Any], reason: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        named(name, parameters)
    assert reason in str(caught.value)


def test_an_encoder_cannot_be_changed() -> None:
    with pytest.raises(FrozenInstanceError):
        Rp8().k = 3  # type: ignore[misc]


@pytest.mark.parametrize(
    "rows",
    [
        np.zeros((2, 3)),
        np.zeros((2, 3), np.float16),
        np.zeros(3, np.float32),
        np.zeros((1, 2, 3), np.float32),
        np.zeros((2, 0), np.float32),
        np.zeros((1, base.MAX_WIDTH + 1), np.float32),
    ],
    ids=lambda rows: f"{rows.dtype}{rows.shape}",
)
@pytest.mark.parametrize("name", ENCODERS)
def test_rows_of_another_kind_are_refused(name: str, rows: Any) -> None:
    with pytest.raises(EncodingError):
        named(name).encode(rows)


def test_a_projection_that_would_not_fit_in_memory_is_refused() -> None:
    with pytest.raises(EncodingError, match="give a smaller k"):
        Rp8(k=8192).encode(np.zeros((1, 40_000), np.float32))


@pytest.mark.parametrize("encoder", SMALL, ids=str)
def test_arrays_of_another_shape_type_or_name_are_refused(encoder: Encoder) -> None:
    good = encoder.encode(like_a_model(3, 20))
    assert encoder.decode(good, width=20).shape[0] == 3
    for name, array in good.items():
        others = (array[:2], array[:, :-1], array.astype(np.float64), array[:, :, None])
        wrong = [good | {name: other} for other in others if len(good) > 1 or len(other) == 3]
        wrong += [{k: v for k, v in good.items() if k != name}, good | {"extra": array}]
        for arrays in wrong:
            with pytest.raises(EncodingError):
                encoder.decode(arrays, width=20)
    with pytest.raises(EncodingError):
        encoder.decode(good, width=0)


@pytest.mark.parametrize(
    ("name", "array", "value"),
    [
        ("full8", "low", np.nan),
        ("full8", "low", 1e9),
        ("full8", "high", np.inf),
        ("rp8", "high", -1e9),
        ("topk8", "indices", 20),
        ("topk8", "indices", 0),
        ("topk8", "codes", 254),
        ("topk8", "low", -1),
        ("fp8", "scale", 3),
        ("fp8", "scale", 0),
        ("fp8", "scale", np.nan),
        ("fp8", "scale", -2),
        ("int4", "top", -1),
        ("int4", "top", np.inf),
    ],
)
def test_stored_values_that_no_encoder_makes_are_refused(
    name: str, array: str, value: float
) -> None:
    encoder = named(name, {"k": 4} if name in ("rp8", "topk8") else {})
    encoded = encoder.encode(like_a_model(3, 20))
    encoded[array][1, -1] = value
    with pytest.raises(EncodingError, match="changed after encoding"):
        encoder.decode(encoded, width=20)
