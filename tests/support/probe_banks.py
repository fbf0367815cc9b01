"""A step publisher with a small bank, and new directions for its probes."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from clairai.engine.publish.step_publisher import StepPublisher
from clairai.probe.model import Probe
from tests.support.probes import probe
from tests.support.toy_publisher import FIRST, SECOND, WIDTH, running_publisher


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
def banked(runtime: Path) -> Iterator[StepPublisher]:
    with running_publisher(runtime, weights=0) as made:
        made.install(made.bank.add(probes()))
        yield made
