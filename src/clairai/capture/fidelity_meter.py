"""Takes samples of rows before and after an encoder; gives how much was lost, for every shard.

A shard is sealed by its size, its age, or because somebody asked or ended. So something is measured
in time for each of these: a few rows at least, and more when the last time was long ago.
"""

from __future__ import annotations

import math
import time
from dataclasses import dataclass, field
from typing import Final

import numpy as np

from clairai.capture.staging_reader import FidelitySample
from clairai.store.codecs.base import Encoder
from clairai.store.codecs.fidelity import SAMPLE_ROWS, compare

TIME_SHARE: Final = 100  # one part in this many of the time is spent on large samples, at most
FEW_ROWS: Final = 4  # rows; they cost little
OWED_NBYTES: Final = 16 << 20  # a quarter of a shard


@dataclass
class _EncoderSamples:
    """What was measured of one encoder, and what was not."""

    samples: list[FidelitySample] = field(default_factory=list)
    nbytes: int = 0  # given since the last measure
    turn: int = 0  # the gauge's, at the last measure
    due_s: float = 0.0  # when a large sample can be afforded


class FidelityMeter:
    """Measures what comes."""

    def __init__(self) -> None:
        self._accounts: dict[Encoder, _EncoderSamples] = {}
        self._turn = 1

    def add(self, encoder: Encoder, sample: FidelitySample) -> None:
        """The newest are kept: they are of the rows that come next, or with them."""
        held = self._accounts.setdefault(encoder, _EncoderSamples()).samples
        held.append(sample)
        while sum(len(one.rows_KD) for one in held) > SAMPLE_ROWS and len(held) > 1:
            held.pop(0)

    def turn(self) -> None:
        """What comes next may be in another shard than what came before."""
        self._turn += 1

    def read(self, encoder: Encoder, nbytes: int) -> dict[str, float]:
        """Numbers for so many bytes of rows; none if those before them will do."""
        account = self._accounts.setdefault(encoder, _EncoderSamples())
        account.nbytes += nbytes
        now_s = time.monotonic()
        is_owed = account.turn < self._turn or account.nbytes >= OWED_NBYTES
        if not account.samples or not (is_owed or now_s >= account.due_s):
            return {}
        num_rows = SAMPLE_ROWS if now_s >= account.due_s else FEW_ROWS
        numbers = _measure(encoder, account.samples, num_rows)
        taken_s = time.monotonic() - now_s
        if num_rows == SAMPLE_ROWS:
            account.due_s = now_s + TIME_SHARE * taken_s
        account.samples, account.nbytes, account.turn = [], 0, self._turn
        return numbers


def _measure(encoder: Encoder, samples: list[FidelitySample], num_rows: int) -> dict[str, float]:
    """Of the newest rows of the samples."""
    rows_KD = np.concatenate([one.rows_KD for one in samples])[-num_rows:]
    encoded = {
        name: np.concatenate([one.encoded[name] for one in samples])[-num_rows:]
        for name in samples[0].encoded
    }
    measured = compare(encoder, rows_KD, encoded).numbers
    # Rows near the end of float32's range can be off by more than it holds.
    return {name: value for name, value in measured.items() if math.isfinite(value)}
