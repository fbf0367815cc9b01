"""Fidelity is measured on the rows themselves, and the measures tell good encoders from bad."""

from __future__ import annotations

import json
from dataclasses import asdict

import numpy as np
import pytest

from clairai.store.codecs.base import RowArray
from clairai.store.codecs.fidelity import SAMPLE_ROWS, compare, measure, sample_places
from clairai.store.codecs.full8 import Full8
from clairai.store.codecs.raw import Raw
from clairai.store.codecs.registry import ENCODERS, named
from clairai.store.codecs.rp8 import Rp8
from tests.support.encoder_oracle import LARGEST, like_a_model


def test_the_sample_depends_on_the_number_of_rows_alone_and_never_changes() -> None:
    assert sample_places(10).tolist() == list(range(10))
    assert sample_places(0).tolist() == []
    assert sample_places(1000, 5).tolist() == [29, 534, 535, 542, 568]
    assert len(sample_places(100_000)) == SAMPLE_ROWS


@pytest.mark.parametrize("period", [2, 3, 16, 30, 32])
def test_a_sample_has_rows_of_every_layer_where_layers_alternate(period: int) -> None:
    assert len(set((sample_places(period * 500) % period).tolist())) >= period * 0.85


@pytest.mark.parametrize("name", ENCODERS)
def test_a_measure_goes_through_json_unchanged(name: str) -> None:
    encoder = named(name, {"dtype": "float32"} if name == "raw" else {})
    found = asdict(measure(encoder, like_a_model(300, 256)))
    assert json.loads(json.dumps(found, allow_nan=False)) == found
    assert found == asdict(measure(encoder, like_a_model(300, 256)))
    assert found["num_rows"] == SAMPLE_ROWS
    assert measure(encoder, like_a_model(300, 256)).numbers == found


def test_a_lossless_encoder_measures_no_loss() -> None:
    found = measure(Raw("float32"), like_a_model(200, 64))
    assert (found.relative_error_max, found.distortion_p95) == (0, 0)
    assert found.cosine_min == pytest.approx(1)


def test_full8_stays_within_its_bound() -> None:
    found = measure(Full8(), like_a_model(300, 4096))
    assert found.cosine_min is not None
    assert found.relative_error_max is not None
    assert found.cosine_min >= 0.9995
    assert 1e-4 < found.relative_error_max < 0.0316


def test_swapped_rows_are_noticed() -> None:
    rows_ND, encoder = like_a_model(20, 64), Full8()
    encoded = encoder.encode(rows_ND)
    good = compare(encoder, rows_ND, encoded)
    swapped = {name: array[[1, 0, *range(2, 20)]] for name, array in encoded.items()}
    bad = compare(encoder, rows_ND, swapped)
    assert good.cosine_min is not None
    assert bad.cosine_min is not None
    assert good.cosine_min > 0.9995 > bad.cosine_min


def test_values_of_the_wrong_sign_are_noticed() -> None:
    """A decoder that flips the sign keeps every distance, so the cosine must show it."""
    rows_ND, encoder = like_a_model(20, 64), Rp8(k=512)
    encoded = encoder.encode(rows_ND)
    mirrored = {**encoded, "codes": 252 - encoded["codes"], "low": -encoded["high"]}
    found = compare(encoder, rows_ND, mirrored | {"high": -encoded["low"]})
    assert found.cosine_min == pytest.approx(-1, abs=1e-3)
    assert found.distortion_p95 is not None
    assert found.distortion_p95 < 0.15


def _row(*values: float) -> RowArray:
    return np.array([values], np.float32)


def test_rows_that_are_not_finite_are_counted_and_not_averaged() -> None:
    rows_ND = np.concatenate([_row(1, np.nan), _row(2, np.inf), _row(1, 2), _row(0, 0), _row(0, 0)])
    found = measure(Full8(), rows_ND)
    assert (found.num_rows, found.num_not_finite, found.num_overflowed) == (5, 2, 0)
    assert found.cosine_min == pytest.approx(1)
    assert (found.relative_error_max, found.distortion_p95) == (0, 0)


def test_finite_rows_that_are_decoded_as_infinite_are_counted() -> None:
    found = measure(Rp8(k=4), np.full((3, 400), LARGEST, np.float32))
    assert (found.num_not_finite, found.num_overflowed) == (0, 3)
    assert found.cosine_mean is None


def test_without_rows_nothing_is_measured() -> None:
    found = measure(Full8(), np.zeros((0, 8), np.float32))
    assert set(asdict(found).values()) == {0, None}
    assert found.numbers == {"num_rows": 0, "num_not_finite": 0, "num_overflowed": 0}
