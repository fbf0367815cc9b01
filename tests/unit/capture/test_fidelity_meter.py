"""Every shard says what its encoder lost, whoever seals it and whenever."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import clairai
from clairai.capture import fidelity_meter
from clairai.capture.fidelity_meter import FEW_ROWS, FRESH_S, TIME_SHARE, FidelityMeter
from clairai.capture.staging_reader import FidelitySample
from clairai.store.codecs.base import Encoder
from clairai.store.codecs.fidelity import SAMPLE_ROWS, compare
from clairai.store.codecs.registry import named
from clairai.store.write import Writer, WriterLimits
from tests.support.capture_parts import capture_plan
from tests.support.capture_rig import rig

FULL8, RP8 = named("full8"), named("rp8", {"k": 16})
WAIT_S = 60.0


def sample(encoder: Encoder, num_rows: int, seed: int = 0) -> FidelitySample:
    rows_KD = np.random.default_rng(seed).standard_normal((num_rows, 96)).astype(np.float32)
    return FidelitySample(rows_KD, encoder.encode(rows_KD))


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """A clock on which every measure takes a second, so the next large one is far away."""
    now = [1000.0]

    def monotonic() -> float:
        now[0] += 1.0
        return now[0]

    stub = type("Time", (), {"monotonic": staticmethod(monotonic)})
    monkeypatch.setattr(fidelity_meter, "time", stub)
    return now


def test_a_measure_is_the_comparison_of_the_sampled_rows() -> None:
    one = sample(FULL8, 20)
    meter = FidelityMeter()
    meter.add(FULL8, one)
    assert meter.measure(FULL8) == compare(FULL8, one.rows_KD, dict(one.encoded)).numbers


def test_large_samples_take_a_small_part_of_the_time(clock: list[float]) -> None:
    meter = FidelityMeter()
    num_large, begin_s = 0, clock[0]
    for _ in range(400):
        meter.add(FULL8, sample(FULL8, FEW_ROWS + 1))
        num_large += meter.measure(FULL8)["num_rows"] > FEW_ROWS
    assert 1 < num_large <= (clock[0] - begin_s) / TIME_SHARE + 1


@pytest.mark.usefixtures("clock")
def test_batches_that_come_now_and_then_are_measured_on_rows_of_their_own() -> None:
    meter = FidelityMeter()
    for number in range(20):
        one = sample(FULL8, 2, number)
        meter.add(FULL8, one)
        assert meter.measure(FULL8) == compare(FULL8, one.rows_KD, dict(one.encoded)).numbers
    assert meter.measure(FULL8) == {}  # no rows came since


def test_batches_that_come_quickly_share_the_numbers_of_the_first(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now_s = [1000.0]
    stub = type("Time", (), {"monotonic": staticmethod(lambda: now_s[0])})
    monkeypatch.setattr(fidelity_meter, "time", stub)
    meter = FidelityMeter()

    def measured(seed: int) -> dict[str, float]:
        meter.add(FULL8, sample(FULL8, 2, seed))
        return meter.measure(FULL8)

    first = measured(0)
    assert first
    now_s[0] += 0.9 * FRESH_S
    assert measured(1) == first
    meter.expire()
    second = measured(2)  # as for other weights
    assert second not in (first, {})
    now_s[0] += FRESH_S
    assert measured(3) not in (second, {})


@pytest.mark.usefixtures("clock")
def test_encoders_are_measured_separately() -> None:
    meter = FidelityMeter()
    for encoder in (FULL8, RP8):
        meter.add(encoder, sample(encoder, 3))
    assert meter.measure(FULL8)["cosine_min"] > 0.99
    assert meter.measure(RP8)["num_rows"] == 3
    assert meter.measure(named("int4")) == {}  # nothing was sampled


def test_waiting_samples_are_bounded() -> None:
    meter = FidelityMeter()
    for number in range(50):
        meter.add(FULL8, sample(FULL8, 30, number))
    assert meter.measure(FULL8)["num_rows"] <= SAMPLE_ROWS


def test_a_number_that_a_shard_cannot_store_is_left_out(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Endless:
        numbers: Any = {"num_rows": 1.0, "relative_error_max": float("inf")}  # noqa: RUF012

    monkeypatch.setattr(fidelity_meter, "compare", lambda *_: Endless)
    meter = FidelityMeter()
    meter.add(FULL8, sample(FULL8, 1))
    assert meter.measure(FULL8) == {"num_rows": 1.0}


def test_rows_that_cannot_be_measured_are_kept(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def broken(*_: object) -> dict[str, float]:
        raise FloatingPointError("oh")

    monkeypatch.setattr(FidelityMeter, "measure", broken)
    with rig() as made:
        made.enter("a", 1, capture_plan())
        made.step(("a", 0, 2))
        assert made.found(1).rows == 2
    assert [block.fidelity for block in made.consumers["toy"].blocks] == [{}]
    assert "cannot be measured" in caplog.text


class SlowFolder(Writer):
    """A real folder whose flush waits for the test."""

    policy, where = "drop", "here"

    def __init__(self, path: Path, **options: Any) -> None:
        # Nothing is sealed by its age: the test says when.
        super().__init__(path, limits=WriterLimits(seal_after_s=3600.0), **options)
        self.asked, self.allowed, self.flushed = (threading.Event() for _ in range(3))

    def flush(self, timeout_s: float = WAIT_S) -> None:
        self.asked.set()
        assert self.allowed.wait(WAIT_S)
        super().flush(timeout_s)
        self.flushed.set()


def shards(folder: Path) -> Iterator[tuple[int, bool]]:
    """The rows of each shard, and whether it says what its encoder lost."""
    store = clairai.open(folder)
    for entry in store.shards:
        yield entry.rows, bool(store.shard(entry).head.fidelity)


@pytest.mark.usefixtures("clock")
def test_rows_that_come_between_a_commit_and_its_flush_do_not_leave_a_shard_unmeasured(
    tmp_path: Path,
) -> None:
    folder = SlowFolder(tmp_path / "store")
    with rig(toy=folder) as made:  # type: ignore[arg-type]  # a consumer all the same
        made.enter("a", 1, capture_plan())
        made.enter("b", 2, capture_plan())
        made.step(("a", 0, 2))
        made.capture.begin([], ["b"])
        made.backend.commit()  # for whoever waits for b
        assert folder.asked.wait(WAIT_S)
        made.step(("a", 2, 1))  # still goes to the shard that the flush will seal
        made.settle()
        folder.allowed.set()
        assert folder.flushed.wait(WAIT_S)
        made.step(("a", 3, 1))  # the first row of the next shard
        made.settle()
    assert list(shards(tmp_path / "store")) == [(3, True), (1, True)]


@pytest.mark.usefixtures("clock")
def test_a_request_with_files_of_its_own_is_measured_whenever_its_rows_come(
    tmp_path: Path,
) -> None:
    folder = SlowFolder(tmp_path / "store", layout="per_file")
    folder.allowed.set()
    with rig(toy=folder) as made:  # type: ignore[arg-type]
        made.enter("a", 1, capture_plan())
        made.enter("b", 2, capture_plan())
        made.step(("a", 0, 2))
        made.settle()
        made.step(("b", 0, 2))
        made.settle()
    assert list(shards(tmp_path / "store")) == [(2, True), (2, True)]
