"""A small valid vector for tests, with only given parts changed."""

from __future__ import annotations

from typing import Any

from clairai.points import Point
from clairai.vector.model import Vector
from tests.support.probes import numbers


def vector(name: object = "v", **changes: Any) -> Vector:
    fields: dict[str, Any] = {
        "name": name,
        "rows": {Point("post_block", 1): numbers(3, -4, 0), Point("pre_attn", 1): numbers(1, 2, 2)},
    }
    return Vector(**(fields | changes))
