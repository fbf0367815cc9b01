"""Everything a request can name in the engine core at one moment, with its numbers.

A snapshot never changes: a request is resolved from one, while changes make the next.
N = points of a vector, D = model width.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType

from clairai.engine.steer.steering_plan import PlanRow
from clairai.errors import VectorError
from clairai.fields.catalog import Catalog, KnownVector
from clairai.fields.steer import SteerEntry
from clairai.points import Point
from clairai.probe.bank import model_key
from clairai.probe.model import Probe
from clairai.probe.numeric_bounds import row_length
from clairai.vector.model import Vector


@dataclass(frozen=True)
class PreparedVector(KnownVector):
    """A vector that fits this engine, and its rows as a plan carries them."""

    vector: Vector
    rows: Mapping[Point, PlanRow]

    @classmethod
    def of(cls, vector: Vector) -> PreparedVector:
        digests = vector.row_digests
        lengths: dict[Point, float | None] = {}
        rows: dict[Point, PlanRow] = {}
        for point, row_D in vector.rows.items():
            lengths[point] = row_length(row_D)
            rows[point] = PlanRow(str(point), digests[point], row_D.tobytes())
        return cls(vector.digest, MappingProxyType(lengths), vector, MappingProxyType(rows))


@dataclass(frozen=True)
class SteeringTiers:
    """What steers every request: on all tokens, on prompts, on generated tokens."""

    base: tuple[SteerEntry, ...] = ()
    prefill: tuple[SteerEntry, ...] = ()
    decode: tuple[SteerEntry, ...] = ()
    version: int = 0

    def entries(self) -> tuple[SteerEntry, ...]:
        """All, in the order in which they act."""
        return *self.base, *self.prefill, *self.decode


@dataclass(frozen=True)
class SteeringSnapshot(Catalog):
    """The engine core's catalog: vectors and probes with their numbers, and the global tiers."""

    vectors: Mapping[str, PreparedVector] = field(default_factory=dict)
    probes: Mapping[str, Probe] = field(default_factory=dict)
    width: int = 0
    model: str | None = None
    tiers: SteeringTiers = field(default_factory=SteeringTiers)
    version: int = 0  # of the vectors

    def prepare(self, vector: Vector, *, what: str) -> PreparedVector:
        """Check that a vector fits this engine; `what` names it in errors."""
        if vector.width != self.width:
            raise VectorError(
                f"{what} has width {vector.width} and the model has {self.width}; "
                "use a vector made for this model"
            )
        made_for, served = vector.model, self.model
        if made_for and served and model_key(made_for) != model_key(served):
            raise VectorError(
                f"{what} was made for {made_for!r} and this engine serves {served!r}; use a vector "
                "made for it, or save it without `model`"
            )
        self.check_tapped(what, vector.points)
        return PreparedVector.of(vector)
