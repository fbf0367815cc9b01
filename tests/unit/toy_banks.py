"""Takes a folder; gives a station with a small bank, and rows to turn its probes to."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from clairai.probe.model import Probe
from clairai.tap.station import Station
from tests.unit.tiny_probes import probe
from tests.unit.toy_station import FIRST, SECOND, WIDTH, running_station


def probes() -> tuple[Probe, ...]:
    """Two at each of two points; the bank's order is by point."""
    made = {"a": FIRST, "c": SECOND, "b": FIRST, "d": SECOND}
    return tuple(
        probe(name, point=point, bias=at, activation="relu")
        for at, (name, point) in enumerate(made.items())
    )


def rows(count: int = 4, width: int = WIDTH) -> Any:
    return np.random.default_rng(3).standard_normal((count, width)).astype(np.float32)


@contextmanager
def banked(runtime: Path) -> Iterator[Station]:
    with running_station(runtime, weights=0) as made:
        made.install(made.columns.add(probes()))
        yield made
