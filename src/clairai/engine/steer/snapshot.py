"""Takes vectors and probes by name; gives what is known of them at one moment, never changed."""

# D = model width

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType

import numpy as np

from clairai.engine.steer.steering_plan import PlanRow
from clairai.errors import PointError, RequestError, VectorError
from clairai.fields.json_fields import suggest_names
from clairai.fields.steer import SteerEntry
from clairai.points import Point
from clairai.probe.bank import join_names, model_key
from clairai.probe.model import Probe
from clairai.vector.model import Vector, norm


@dataclass(frozen=True)
class PreparedRow:
    """A row ready to travel, and what decides whether an op can use it."""

    row: PlanRow
    length: float
    peak: float  # its largest number's size


@dataclass(frozen=True)
class PreparedVector:
    """A vector that fits this engine."""

    vector: Vector
    rows: Mapping[Point, PreparedRow]

    @classmethod
    def of(cls, vector: Vector) -> PreparedVector:
        block_ND, digests = vector.block_ND, vector.row_digests
        peaks = np.maximum(block_ND.max(axis=1), -block_ND.min(axis=1)).tolist()
        rows = {
            point: PreparedRow(
                PlanRow(str(point), digests[point], row_D.tobytes()), norm(row_D), peak
            )
            for (point, row_D), peak in zip(vector.rows.items(), peaks, strict=True)
        }
        return cls(vector, MappingProxyType(rows))


@dataclass(frozen=True)
class SteerableModel:
    """What is served, and where it can be steered."""

    points: frozenset[Point]
    width: int
    model: str | None = None
    can_skip_special: bool = True

    def hold(self, vector: Vector, *, what: str) -> PreparedVector:
        """Checked against this engine; `what` is what errors call it."""
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

    def check_tapped(self, what: str, points: Iterable[Point]) -> None:
        missing = [str(point) for point in points if point not in self.points]
        if missing:
            raise PointError(
                f"{what} is for {join_names(missing)}, not tapped here; tapped are "
                f"{join_names(map(str, sorted(self.points)))}: use those, or add to `points`"
            )


@dataclass(frozen=True)
class SteeringTiers:
    """What steers every request: on all tokens, on those of prompts, on generated ones."""

    base: tuple[SteerEntry, ...] = ()
    prefill: tuple[SteerEntry, ...] = ()
    decode: tuple[SteerEntry, ...] = ()
    version: int = 0

    def entries(self) -> tuple[SteerEntry, ...]:
        """All, in the order in which they act."""
        return *self.base, *self.prefill, *self.decode


@dataclass(frozen=True)
class SteeringSnapshot:
    """Everything a request can name, at one moment."""

    engine: SteerableModel
    vectors: Mapping[str, PreparedVector] = field(default_factory=dict)
    probes: Mapping[str, Probe] = field(default_factory=dict)
    tiers: SteeringTiers = field(default_factory=SteeringTiers)
    version: int = 0  # of the vectors

    def vector(self, name: str, *, what: str) -> PreparedVector:
        held = self.vectors.get(name)
        if held is None:
            raise RequestError(
                f"{what}: no vector is named {name!r}; {suggest_names(name, self.vectors)}"
            )
        return held

    def probe(self, name: str, *, what: str) -> Probe:
        probe = self.probes.get(name)
        if probe is None:
            raise RequestError(
                f"{what}: no probe is named {name!r}; {suggest_names(name, self.probes)}"
            )
        return probe
