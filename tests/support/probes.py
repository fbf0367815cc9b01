"""A small valid probe, with only the fields changed that a test is about."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from clairai.points import Point
from clairai.probe.model import Probe


def numbers(*values: float) -> NDArray[np.float32]:
    return np.array(values, np.float32)


def probe(name: object = "p", **changes: Any) -> Probe:
    fields: dict[str, Any] = {
        "name": name,
        "point": Point("post_block", 1),
        "direction_D": numbers(1, -2, 3),
    }
    return Probe(**(fields | changes))
