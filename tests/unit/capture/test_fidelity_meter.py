"""Every shard says what its encoder lost: something is measured in time for each."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from clairai.capture import fidelity_meter as gauges
from clairai.capture.fidelity_meter import FEW_ROWS, OWED_NBYTES, TIME_SHARE, FidelityMeter
from clairai.capture.staging_reader import FidelitySample
from clairai.store.codecs.base import Encoder
from clairai.store.codecs.fidelity import SAMPLE_ROWS, compare
from clairai.store.codecs.registry import named
from tests.support.capture_parts import order
from tests.support.capture_rig import rig

FULL8, RP8 = named("full8"), named("rp8", {"k": 16})


def sample(encoder: Encoder, num_rows: int, seed: int = 0) -> FidelitySample:
    rows_KD = np.random.default_rng(seed).standard_normal((num_rows, 96)).astype(np.float32)
    return FidelitySample(rows_KD, encoder.encode(rows_KD))


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The time; every look at it takes a second."""
    now = [1000.0]

    def monotonic() -> float:
        now[0] += 1.0
        return now[0]

    monkeypatch.setattr(gauges, "time", type("Time", (), {"monotonic": staticmethod(monotonic)}))
    return now


def test_what_is_measured_is_what_was_lost() -> None:
    one = sample(FULL8, 20)
    gauge = FidelityMeter()
    gauge.add(FULL8, one)
    assert gauge.read(FULL8, 10) == compare(FULL8, one.rows_KD, dict(one.encoded)).numbers


def test_large_samples_take_a_small_part_of_the_time(clock: list[float]) -> None:
    gauge = FidelityMeter()
    measured = 0
    begin_s = clock[0]
    for _ in range(400):
        gauge.add(FULL8, sample(FULL8, 1))
        measured += bool(gauge.read(FULL8, 1))
    assert 1 < measured <= (clock[0] - begin_s) / TIME_SHARE + 1


@pytest.mark.parametrize("cause", ["a request begins", "many bytes"])
def test_what_may_be_a_new_shard_is_measured_at_once_by_a_few_rows(
    clock: list[float], cause: str
) -> None:
    gauge = FidelityMeter()
    gauge.add(FULL8, sample(FULL8, 40))
    assert gauge.read(FULL8, 1)["num_rows"] == 40
    gauge.add(FULL8, sample(FULL8, 40))
    assert gauge.read(FULL8, 1) == {}  # too soon
    if cause == "a request begins":
        gauge.turn()
    assert gauge.read(FULL8, OWED_NBYTES if cause == "many bytes" else 1)["num_rows"] == FEW_ROWS
    assert clock


def test_encoders_are_measured_apart(clock: list[float]) -> None:
    gauge = FidelityMeter()
    for encoder in (FULL8, RP8):
        gauge.add(encoder, sample(encoder, 3))
    assert gauge.read(FULL8, 1)["cosine_min"] > 0.99
    assert gauge.read(RP8, 1)["num_rows"] == 3
    assert gauge.read(named("int4"), 1) == {}  # nothing was sampled
    assert clock


def test_samples_that_wait_are_bounded() -> None:
    gauge = FidelityMeter()
    for number in range(50):
        gauge.add(FULL8, sample(FULL8, 30, number))
    assert gauge.read(FULL8, 1)["num_rows"] <= SAMPLE_ROWS


def test_a_measure_beyond_what_a_shard_can_hold_is_left_out(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Endless:
        numbers: Any = {"num_rows": 1.0, "relative_error_max": float("inf")}  # noqa: RUF012

    monkeypatch.setattr(gauges, "compare", lambda *_: Endless)
    gauge = FidelityMeter()
    gauge.add(FULL8, sample(FULL8, 1))
    assert gauge.read(FULL8, 1) == {"num_rows": 1.0}


def test_rows_that_cannot_be_measured_are_kept(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def broken(*_: object) -> dict[str, float]:
        raise FloatingPointError("oh")

    monkeypatch.setattr(gauges.FidelityMeter, "read", broken)
    with rig() as made:
        made.enter("a", 1, order())
        made.step(("a", 0, 2))
        assert made.found(1).rows == 2
    assert [block.fidelity for block in made.consumers["toy"].blocks] == [{}]
    assert "cannot be measured" in caplog.text
