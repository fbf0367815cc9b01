"""How long steering can make a row of the residual stream, and how long it may be.

A row that leaves the range of the model's dtype becomes infinity, then NaN, and so does the KV
cache of its request. What an operation adds is bounded by its vector and scale; what it multiplies
compounds from point to point, so the operations of a whole plan are judged together.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from clairai.errors import RequestError
from clairai.fields.steer import Op
from clairai.probe.numeric_bounds import MAX_STREAM_LENGTH


@dataclass(frozen=True)
class RowLimits:
    """The rows of a model: `usual` without steering, `longest` with it."""

    usual: float
    longest: float
    dtype: str


# bfloat16 and float32 have the range of float32; MAX_STREAM_LENGTH leaves room for squares.
WIDE_ROWS: Final = RowLimits(usual=1e6, longest=MAX_STREAM_LENGTH, dtype="float32")
FLOAT16_ROWS: Final = RowLimits(usual=100.0, longest=65504.0, dtype="float16")


def row_limits(dtype: str) -> RowLimits:
    return FLOAT16_ROWS if dtype == "float16" else WIDE_ROWS


@dataclass(frozen=True)
class RowGrowth:
    """A row of length L becomes no longer than `gain * (L + push)`; `gain` is at least 1."""

    gain: float = 1.0
    push: float = 0.0

    def then(self, other: RowGrowth) -> RowGrowth:
        """Both, in either order."""
        return RowGrowth(self.gain * other.gain, self.push + other.push)

    def check(self, limits: RowLimits, *, what: str) -> None:
        length = self.gain * (limits.usual + self.push)
        if length <= limits.longest:  # false for NaN too
            return
        raise RequestError(
            f"{what}: a row of length {limits.usual:g} could become {length:.3g} long, and rows of "
            f"this model are {limits.dtype}: at most {limits.longest:g}; use a smaller scale, or "
            "fewer points"
        )


@dataclass(frozen=True)
class Operation:
    """What one entry does at each of its points, without the vector's numbers."""

    op: Op
    scale: float
    is_matched: bool = False
    low: float | None = None
    high: float | None = None

    def growth(self, length: float) -> RowGrowth:
        """At one point, where the vector's row has this length."""
        scale = abs(self.scale)
        if self.op == "add":
            return RowGrowth(1 + scale) if self.is_matched else RowGrowth(push=scale * length)
        gain = max(1.0, abs(1 - self.scale))  # of what is kept, or of its part along the vector
        if self.op == "replace":
            return RowGrowth(gain, scale * length)
        if self.op == "ablate":
            return RowGrowth(gain)
        return RowGrowth(gain, scale * max(abs(self.low or 0.0), abs(self.high or 0.0)))
