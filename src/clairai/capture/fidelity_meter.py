"""Measures how much an encoder loses, on samples of the rows that it encodes.

Only a consumer knows which rows become one shard, and other threads than the collector's decide
when a shard is sealed. So every batch of rows gets numbers: measured on a few rows of its own, on a
large sample when time allows, or those of rows that came at most FRESH_S before. Then every shard
says what its encoder lost, whoever seals it and whenever.

Runs in: the capture writer process, or the worker where there is none.
"""

from __future__ import annotations

import math
import time
from dataclasses import dataclass
from typing import Final

import numpy as np

from clairai.capture.staging_reader import FidelitySample
from clairai.store.codecs.base import Encoder
from clairai.store.codecs.fidelity import SAMPLE_ROWS, compare

TIME_SHARE: Final = 100  # large samples take at most one part in this many of the time
FEW_ROWS: Final = 4  # cheap enough for several batches a second
FRESH_S: Final = 0.25  # in which the numbers of one batch hold for the next ones


@dataclass
class _Measure:
    """The last one of an encoder."""

    numbers: dict[str, float]
    fresh_until_s: float
    large_due_s: float  # when a large sample can be afforded again


class FidelityMeter:
    """Measures batches of encoded rows. One thread uses it."""

    def __init__(self) -> None:
        self._samples: dict[Encoder, list[FidelitySample]] = {}  # of the batch that is coming
        self._last: dict[Encoder, _Measure] = {}

    def add(self, encoder: Encoder, sample: FidelitySample) -> None:
        """Sampled rows of the coming batch; the newest SAMPLE_ROWS are kept."""
        samples = self._samples.setdefault(encoder, [])
        samples.append(sample)
        while sum(len(one.rows_KD) for one in samples) > SAMPLE_ROWS and len(samples) > 1:
            samples.pop(0)

    def measure(self, encoder: Encoder) -> dict[str, float]:
        """Numbers for the batch, as a shard stores them; none if nothing was sampled."""
        samples, last = self._samples.pop(encoder, []), self._last.get(encoder)
        begin_s = time.monotonic()
        if last is not None and begin_s < last.fresh_until_s:
            return last.numbers
        if not samples:
            return {}
        is_large = last is None or begin_s >= last.large_due_s
        numbers = _compare_newest(encoder, samples, SAMPLE_ROWS if is_large else FEW_ROWS)
        due_s = begin_s + TIME_SHARE * (time.monotonic() - begin_s)
        if last is not None and not is_large:
            due_s = last.large_due_s
        self._last[encoder] = _Measure(numbers, begin_s + FRESH_S, due_s)
        return numbers

    def expire(self) -> None:
        """What comes next is measured anew: its rows are of other weights."""
        for last in self._last.values():
            last.fresh_until_s = 0.0


def _compare_newest(
    encoder: Encoder, samples: list[FidelitySample], num_rows: int
) -> dict[str, float]:
    rows_KD = np.concatenate([one.rows_KD for one in samples])[-num_rows:]
    encoded = {
        name: np.concatenate([one.encoded[name] for one in samples])[-num_rows:]
        for name in samples[0].encoded
    }
    numbers = compare(encoder, rows_KD, encoded).numbers
    # Rows near the end of float32's range can be off by more than float32 can hold.
    return {name: value for name, value in numbers.items() if math.isfinite(value)}
