"""The JSON of captures, as models. Takes nothing; gives what schema.py puts into the document."""

from __future__ import annotations

import json
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field

Selector = Literal["all", "prompt", "generated", "last_prompt"]
CaptureState = Literal["open", "writing", "kept", "discarded", "failed"]


class _CaptureModel(BaseModel):
    model_config = ConfigDict(extra="forbid")


class Span(_CaptureModel):
    """Positions from, up to and not including, to; negative: from the end of the prompt."""

    from_: int = Field(0, alias="from")
    to: int | None = None


class ChatMessage(_CaptureModel):
    """All tokens of the chat's message with this index."""

    message: int = Field(ge=0)


Positions = Selector | Span | ChatMessage


class EncoderChoice(BaseModel):
    """An encoder and its parameters."""

    model_config = ConfigDict(extra="allow")

    name: Literal["raw", "rp8", "full8", "topk8", "fp8", "int4"]


class CaptureRequest(_CaptureModel):
    """Which rows of a request are kept; what is left out is as the engine's setting has it."""

    points: list[str] | str | None = Field(None, description='names, patterns or "all"')
    positions: Positions | list[Positions] | None = None
    encoder: str | EncoderChoice | None = None
    to: list[str] | None = Field(None, description="names of the engine's consumers")
    tags: dict[str, Any] = {}


class CaptureHandle(BaseModel):
    """`clairai.capture` of an answer, and of the last chunk of a stream. A row is one token at one
    point."""

    model_config = ConfigDict(extra="forbid")

    id: str = Field(pattern="^[0-9a-f]{16}$", description="for GET /v1/captures/{id}")
    state: CaptureState
    rows: int
    lost: int = Field(description="rows that were wanted and are missing at a consumer")
    discarded: int = Field(description="rows that a rule was not met for")
    reason: str | None = None


class CaptureInfo(CaptureHandle):
    points: list[str]
    encoder: str
    answers: int


class ConsumerState(_CaptureModel):
    name: str
    state: str
    reason: str


class CaptureMemory(_CaptureModel):
    """Bytes."""

    stash_nbytes: int = Field(description="of the device, for all rows of a step")
    staging_nbytes: int = Field(description="of the host, for rows on their way")
    pending_nbytes: int = Field(description="of the host, for rows that wait for a rule, now")


class CaptureList(_CaptureModel):
    """The newest first; rows are those since the engine started."""

    data: list[CaptureInfo]
    consumers: list[ConsumerState]
    rows: int
    dropped: int
    discarded: int
    memory: CaptureMemory


CAPTURE_PARTS = (CaptureRequest, CaptureHandle)


# MERGED
# The JSON of steering, as models. Takes nothing; gives what schema.py puts into the document.


SteeringOp = Literal["add", "ablate", "clamp", "replace"]
SteeringPhase = Literal["both", "prompt", "generation", "last_prompt"]


class _SteeringModel(BaseModel):
    model_config = ConfigDict(extra="forbid")


class InlineVector(_SteeringModel):
    """A vector that comes with its request: packed little-endian numbers in base64, by point."""

    dtype: Literal["f32", "f16", "bf16"] = "f32"
    points: dict[str, str]


class Window(_SteeringModel):
    """Positions `[first, end)` of a phase; `end` null: on and on."""

    phase: SteeringPhase = "both"
    positions: list[tuple[int, int | None]] | None = None
    skip_special: bool = False


class Gate(_SteeringModel):
    """A probe's score of the same token opens and closes an entry."""

    probe: str
    threshold: float | None = Field(None, description="the probe's own if left out")
    sharpness: float | None = Field(None, description="open or closed if left out")
    latch: bool = False
    release: float | None = Field(None, description="closes below this")


class SteerEntry(_SteeringModel):
    """One vector's work on a request."""

    vector: str | InlineVector
    digest: str | None = Field(None, description="refused if the name means another content")
    scale: float = 1.0
    op: SteeringOp = "add"
    match_norm: bool = False
    low: float | None = None
    high: float | None = None
    points: list[str] | None = Field(None, description="all of the vector's if left out")
    when: SteeringPhase | Window = "both"
    gate: Gate | None = None


class StopRule(_SteeringModel):
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
    op: SteeringOp
    points: list[str]


class SteeringEcho(BaseModel):
    """`clairai` of an answer, and of the first chunk of a stream: what the engine applies."""

    model_config = ConfigDict(extra="allow")

    steering: list[AppliedEntry] = []
    stop: list[dict[str, Any]] | None = Field(None, description="rules, with their thresholds")
    weights: int | None = Field(None, description="version of the weights that it began with")


class SteeringEvent(_SteeringModel):
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


class VectorCapacity(_SteeringModel):
    """What unfinished requests may have in use at once."""

    rows: int
    programs: int


class VectorList(_SteeringModel):
    data: list[VectorInfo]
    version: int
    points: list[str] = Field(description="where this engine can steer")
    width: int
    capacity: VectorCapacity


class Amendment(_SteeringModel):
    """What steers the rest of a running request; an empty list: nothing."""

    steer: list[SteerEntry]


class Amended(_SteeringModel):
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


class TiersChange(_SteeringModel):
    """A tier that is left out stays as it is; an empty list clears it."""

    base: list[SteerEntry] = []
    prefill: list[SteerEntry] = []
    decode: list[SteerEntry] = []


STEERING_PARTS = (SteerEntry, StopRule, SteeringEcho, SteeringEvent, TiersChange, Amendment)


# MERGED
# The JSON of new weights, as models. Takes nothing; gives what document.py puts into the
# document.
#
# The proxy hands a manifest on as it came: what is wrong with one the engine says.


class _WeightsModel(BaseModel):
    model_config = ConfigDict(extra="forbid")


class _WeightsAnswer(BaseModel):
    """The engine's own; it may say more."""

    model_config = ConfigDict(extra="allow")


class WeightsState(_WeightsAnswer):
    """The weights that serve."""

    version: int = Field(description="counts hand-overs; 0: those the engine was started with")
    label: str
    digest: str = Field(description="of the content; empty if nobody handed it over")
    epoch: str
    device: str = Field(description='"cpu", or a GPU\'s UUID')
    num_tensors: int
    is_torn: bool = Field(description="a load stopped half-way; nobody is served")


class SendableTensor(_WeightsAnswer):
    name: str
    dtypes: list[str]
    shape: list[int]


class TensorList(_WeightsAnswer):
    """What can be sent."""

    data: list[SendableTensor]


class ManifestTensor(_WeightsModel):
    """One tensor, dense and in C order, in one buffer."""

    name: str
    dtype: str
    shape: list[int]
    buffer: int
    offset: int
    nbytes: int
    checksum: str = ""


class WeightsManifest(_WeightsModel):
    """One hand-over: all of it takes effect at once, or none."""

    version: Literal[1]
    transfer: str = Field(pattern="^[0-9a-f]{32}$")
    epoch: str = Field(pattern="^[0-9a-f]{16}$")
    device: str
    buffers: list[int]
    tensors: list[ManifestTensor]
    label: str = ""


class WeightsPlanned(_WeightsAnswer):
    """The plan is good."""

    transfer: str
    nbytes: int


class WeightsCommitted(_WeightsAnswer):
    """They serve."""

    version: int
    digest: str
    nbytes: int
    load_s: float
    bank_version: int | None = Field(None, description="of the probes, if any came along")
    vectors_version: int | None = Field(None, description="of steering vectors, likewise")


WEIGHTS_PARTS = (WeightsManifest,)


# MERGED
# The JSON of every route and every event, as models. `python -m clairai.proxy.schema` prints it.
#
# Takes nothing; gives the OpenAPI document that the page's TypeScript types are generated from.


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
    *CAPTURE_PARTS,
    *STEERING_PARTS,
    *WEIGHTS_PARTS,
)


def main() -> None:
    from clairai.proxy.app import create_app
    from clairai.proxy.proxy_settings import ProxySettings

    app = create_app(ProxySettings(upstream="http://127.0.0.1:8000"))
    print(json.dumps(app.openapi(), indent=2))  # noqa: T201


if __name__ == "__main__":
    main()
