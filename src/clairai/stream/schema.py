"""The JSON of every route and every event, as models. `python -m clairai.stream.schema` prints it.

Takes nothing; gives the OpenAPI document that the page's TypeScript types are generated from.
"""

from __future__ import annotations

import json
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from clairai.stream import schema_capture, schema_steering, schema_weights
from clairai.stream.schema_capture import CaptureHandle, CaptureRequest
from clairai.stream.schema_steering import SteerEntry, StopRule

Score = float | None  # null: no such score
Weights: Any = Field(
    None,
    description="version of the model's weights that these rows are of, in an engine that takes "
    "others; null: of several, or none has come",
)


class _Model(BaseModel):
    model_config = ConfigDict(extra="forbid", protected_namespaces=())


class ErrorDetail(_Model):
    """OpenAI's shape."""

    message: str
    type: str
    param: str | None
    code: str | int | None


class ErrorBody(_Model):
    """Every refusal of the proxy; also the data of the event `error`."""

    error: ErrorDetail


class ClairaiFields(_Model):
    """What a completion request may ask under its key `clairai`."""

    probes: Literal["all"] | list[str] = "all"
    prompt_scores: bool = False
    events: Literal["named"] | None = None
    steer: list[SteerEntry] = []
    stop: list[StopRule] = []
    capture: bool | CaptureRequest | None = Field(
        None, description="true: as the engine's setting says; false: nothing"
    )


class ChatRequest(BaseModel):
    """OpenAI's and vLLM's fields go to the engine as they are; `clairai` is for the proxy."""

    model_config = ConfigDict(extra="allow")

    messages: list[Any]
    clairai: ClairaiFields | None = None


class CompletionRequest(BaseModel):
    """OpenAI's and vLLM's fields go to the engine as they are; `clairai` is for the proxy."""

    model_config = ConfigDict(extra="allow")

    prompt: str | list[Any]
    clairai: ClairaiFields | None = None


class ProbeScores(_Model):
    """`choices[i].probe_scores`: row j scores generated token `start + j`."""

    names: list[str]
    start: int
    scores: list[list[Score]]
    lost: int | None = Field(None, description="rows of this object that are null because lost")
    weights: int | None = Weights


class PromptScores(_Model):
    """`choices[0].prompt_scores`: row j scores prompt token j."""

    names: list[str]
    start: Literal[0]
    token_ids: list[int]
    tokens: list[str]
    scores: list[list[Score]]
    lost: int | None = None
    weights: int | None = Weights


class TokenEvent(_Model):
    """Event `token`: `tokens[k]` is the text to show for token `start + k`."""

    part: Literal["prompt", "answer"]
    choice: int
    start: int
    token_ids: list[int]
    tokens: list[str]
    text: str


class ProbeUpdateEvent(_Model):
    """Event `probe_update`: row j scores token `start + j` of its part."""

    part: Literal["prompt", "answer"]
    choice: int
    names: list[str]
    start: int
    scores: list[list[Score]]
    lost: int | None = None
    weights: int | None = Weights


class ProbeFinalEvent(_Model):
    """Event `probe_final`, one per choice; one entry per probe in each list."""

    choice: int
    names: list[str]
    count: int = Field(description="generated tokens with a score")
    mean: list[Score]
    max: list[Score]
    argmax: list[int | None]
    above: list[int | None] = Field(description="tokens at or over the threshold, null without one")
    lost: int


class DoneEvent(_Model):
    """Event `done`: the last of a run that went well."""

    id: str | None
    model: str | None
    finish_reasons: list[str | None]
    stop_reasons: list[str | int | None] = Field(
        description="a text or token that ended a choice, or our rule that did"
    )
    usage: dict[str, Any] | None
    capture: CaptureHandle | None = Field(None, description="what became of captured rows")
    weights: int | None = Field(None, description="version of the weights that it began with")


class Histogram(_Model):
    """Scores of reference texts, in bins of equal width from `low` to `high`."""

    low: float
    high: float
    counts: list[int]


class ProbeInfo(_Model):
    model_config = ConfigDict(extra="allow", protected_namespaces=())

    name: str
    point: str
    activation: Literal["none", "relu", "sigmoid"]
    threshold: float | None
    calibration: tuple[float, float] | None
    digest: str
    description: str | None = None
    auroc: float | None = None
    histogram: Histogram | None = None


class ProbeList(_Model):
    data: list[ProbeInfo]
    capacity: int
    version: int


class ReaderState(_Model):
    """How this proxy stands with the ring."""

    delivered: int
    lost: int
    lag: int
    orphaned: int
    attached: bool


class EngineDescription(_Model):
    model_config = ConfigDict(extra="allow", protected_namespaces=())

    model: str
    points: list[str]
    width: int
    capacity: int
    epoch: str
    published: int
    reader: ReaderState


class Message(_Model):
    role: str
    content: str


class Example(_Model):
    title: str
    probe: str | None = None
    messages: list[Message]


class ExampleList(_Model):
    data: list[Example]


class Health(_Model):
    status: Literal["starting", "ready", "degraded", "failed"]
    reason: str | None
    model: str | None
    version: str


# Not the answer of any route: parts of streams and of completions.
PARTS = (
    ChatRequest,
    CompletionRequest,
    ClairaiFields,
    ProbeScores,
    PromptScores,
    TokenEvent,
    ProbeUpdateEvent,
    ProbeFinalEvent,
    DoneEvent,
    *schema_capture.PARTS,
    *schema_steering.PARTS,
    *schema_weights.PARTS,
)


def main() -> None:
    from clairai.stream.app import create_app
    from clairai.stream.settings import ProxySettings

    app = create_app(ProxySettings(upstream="http://127.0.0.1:8000"))
    print(json.dumps(app.openapi(), indent=2))  # noqa: T201


if __name__ == "__main__":
    main()
