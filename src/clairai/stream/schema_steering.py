"""The JSON of steering, as models. Takes nothing; gives what schema.py puts into the document."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field

Op = Literal["add", "ablate", "clamp", "replace"]
Phase = Literal["both", "prompt", "generation", "last_prompt"]


class _Model(BaseModel):
    model_config = ConfigDict(extra="forbid")


class InlineVector(_Model):
    """A vector that comes with its request: packed little-endian numbers in base64, by point."""

    dtype: Literal["f32", "f16", "bf16"] = "f32"
    points: dict[str, str]


class Window(_Model):
    """Positions `[first, end)` of a phase; `end` null: on and on."""

    phase: Phase = "both"
    positions: list[tuple[int, int | None]] | None = None
    skip_special: bool = False


class Gate(_Model):
    """A probe's score of the same token opens and closes an entry."""

    probe: str
    threshold: float | None = Field(None, description="the probe's own if left out")
    sharpness: float | None = Field(None, description="open or closed if left out")
    latch: bool = False
    release: float | None = Field(None, description="closes below this")


class SteerEntry(_Model):
    """One vector's work on a request."""

    vector: str | InlineVector
    digest: str | None = Field(None, description="refused if the name means another content")
    scale: float = 1.0
    op: Op = "add"
    match_norm: bool = False
    low: float | None = None
    high: float | None = None
    points: list[str] | None = Field(None, description="all of the vector's if left out")
    when: Phase | Window = "both"
    gate: Gate | None = None


class StopRule(_Model):
    """Act when a probe is at or over a threshold for so many tokens: end the answer, say so in the
    engine's log, or steer the rest of it."""

    probe: str
    threshold: float | None = Field(None, description="the probe's own if left out")
    tokens: int = Field(1, description="in a row")
    action: Literal["stop", "alert", "steer"] = "stop"
    steer: list[SteerEntry] = Field([], description="for the action steer")


class AppliedEntry(BaseModel):
    """An entry as the engine applies it: with its content's digest, and all of its points."""

    model_config = ConfigDict(extra="allow")

    vector: str | None = Field(description="null: it came with the request")
    digest: str
    scale: float
    op: Op
    points: list[str]


class SteeringEcho(BaseModel):
    """`clairai` of an answer, and of the first chunk of a stream: what the engine applies."""

    model_config = ConfigDict(extra="allow")

    steering: list[AppliedEntry] = []
    stop: list[dict[str, Any]] | None = Field(None, description="rules, with their thresholds")
    weights: int | None = Field(None, description="version of the weights that it began with")


class SteeringEvent(_Model):
    """Event `steering`: the first of a run that is steered, or has a rule."""

    clairai: SteeringEcho


class VectorInfo(BaseModel):
    model_config = ConfigDict(extra="allow")

    name: str
    points: list[str]
    width: int
    digest: str
    norms: list[float] = Field(description="one for each point")
    description: str | None = None
    method: str | None = None
    scale: float = Field(1.0, description="suggested")


class VectorCapacity(_Model):
    """What unfinished requests may have in use at once."""

    rows: int
    programs: int


class VectorList(_Model):
    data: list[VectorInfo]
    version: int
    points: list[str] = Field(description="where this engine can steer")
    width: int
    capacity: VectorCapacity


class Amendment(_Model):
    """What steers the rest of a running request; an empty list: nothing."""

    steer: list[SteerEntry]


class Amended(_Model):
    """From which position on it holds, for each answer of the request, and what."""

    positions: list[int]
    steering: list[dict[str, Any]]


class Tiers(BaseModel):
    """What steers every request that is admitted from now on."""

    model_config = ConfigDict(extra="forbid")

    base: list[dict[str, Any]]
    prefill: list[dict[str, Any]]
    decode: list[dict[str, Any]]
    version: int


class TiersChange(_Model):
    """A tier that is left out stays as it is; an empty list clears it."""

    base: list[SteerEntry] = []
    prefill: list[SteerEntry] = []
    decode: list[SteerEntry] = []


PARTS = (SteerEntry, StopRule, SteeringEcho, SteeringEvent, TiersChange, Amendment)
