"""Takes samples of rows before and after an encoder; gives how much was lost, now and then."""

from __future__ import annotations

import math
import time
from typing import Final

import numpy as np

from clairai.capture.taken import Sample
from clairai.store.codecs.base import Encoder
from clairai.store.codecs.fidelity import SAMPLE, compare

SHARE: Final = 20  # one part in this many of the time is spent on measuring, at most


class Gauge:
    """Measures what comes, as often as its share of the time allows."""

    def __init__(self) -> None:
        self._samples: dict[Encoder, list[Sample]] = {}
        self._cost_s: dict[Encoder, float] = {}
        self._last_s: dict[Encoder, float] = {}

    def add(self, encoder: Encoder, sample: Sample) -> None:
        """The newest are kept: they are of the rows that come next, or with them."""
        held = self._samples.setdefault(encoder, [])
        held.append(sample)
        while sum(len(one.rows_KD) for one in held) > SAMPLE and len(held) > 1:
            held.pop(0)

    def read(self, encoder: Encoder) -> dict[str, float]:
        """Numbers of what was added since the last time; nothing if it is too soon."""
        now_s = time.monotonic()
        due_s = self._last_s.get(encoder, 0.0) + SHARE * self._cost_s.get(encoder, 0.0)
        held = self._samples.get(encoder)
        if not held or now_s < due_s:
            return {}
        del self._samples[encoder]
        rows_KD = np.concatenate([one.rows_KD for one in held])
        encoded = {
            name: np.concatenate([one.encoded[name] for one in held]) for name in held[0].encoded
        }
        measured = compare(encoder, rows_KD, encoded).numbers
        # Rows near the end of float32's range can be off by more than it holds.
        numbers = {name: value for name, value in measured.items() if math.isfinite(value)}
        self._last_s[encoder] = time.monotonic()
        self._cost_s[encoder] = self._last_s[encoder] - now_s
        return numbers
