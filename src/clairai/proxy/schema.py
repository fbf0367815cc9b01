"""The JSON of every route and event, as structs from which the OpenAPI document is generated.

What the engine answers is generated from the wire structs themselves; what the proxy writes, it
writes from the structs below. `python -m clairai.proxy.schema` prints the document, from which the
TypeScript types of the dashboard are generated.
"""

from __future__ import annotations

import json
from typing import Annotated, Any, Final, Literal, get_args

import msgspec
from msgspec import UNSET, Meta, Struct, UnsetType
from msgspec.structs import fields

from clairai.fields.positions import PositionSelector
from clairai.fields.rules import RuleAction
from clairai.fields.steer import Op
from clairai.fields.when import Phase
from clairai.proxy.completions.completion_request import ClairaiOptions
from clairai.weights.manifest import Manifest, PlannedTensor
from clairai.wire import capture_messages, control_messages, steering_messages, weights_messages

REF: Final = "#/components/schemas/{name}"
Score = float | None  # null: no such score
_WEIGHTS_OF_ROWS: Final = Meta(
    description="version of the model's weights that these rows are of, in an engine that takes "
    "new weights; null: of several, or no row has come"
)
_LostRows = (
    Annotated[int | None, Meta(description="rows of this object that are null because lost")]
    | UnsetType
)
_RowWeights = Annotated[int | None, _WEIGHTS_OF_ROWS] | UnsetType


class RequestBody(Struct, forbid_unknown_fields=True):
    """What a client sends: fields with a default may be left out."""


class Answer(Struct, forbid_unknown_fields=True):
    """What a client gets: every field is there, unless its default is UNSET."""


class ErrorDetail(Answer):
    """OpenAI's shape."""

    message: str
    type: str
    param: str | None
    code: str | int | None


class ErrorBody(Answer):
    """Every refusal of the proxy; also the data of the event `error`."""

    error: ErrorDetail


# Completions: what is asked. `clairai.fields` parses these objects; here is only their shape.


class InlineVector(RequestBody, kw_only=True):
    """A vector that comes with its request: packed little-endian numbers in base64, by point."""

    dtype: Literal["f32", "f16", "bf16"] = "f32"
    points: dict[str, str]


class Window(RequestBody):
    """Positions `[first, end)` of a phase; `end` null: no end."""

    phase: Phase = "both"
    positions: list[tuple[int, int | None]] | None = None
    skip_special: bool = False


class Gate(RequestBody):
    """A probe's score of the same token opens and closes an entry."""

    probe: str
    threshold: Annotated[float | None, Meta(description="the probe's own if left out")] = None
    sharpness: Annotated[float | None, Meta(description="open or closed if left out")] = None
    latch: bool = False
    release: Annotated[float | None, Meta(description="closes below this")] = None


class SteerEntryJson(RequestBody):
    """One vector and what it does to a request."""

    vector: str | InlineVector
    digest: Annotated[
        str | None, Meta(description="refused if the vector of this name has other content")
    ] = None
    scale: float = 1.0
    op: Op = "add"
    match_norm: bool = False
    low: float | None = None
    high: float | None = None
    points: Annotated[
        list[str] | None, Meta(description="all points of the vector if left out")
    ] = None
    when: Phase | Window = "both"
    gate: Gate | None = None


class StopRuleJson(RequestBody):
    """Acts once a probe is at or above a threshold for so many tokens in a row: ends the answer,
    writes to the engine's log, or steers the rest of the answer."""

    probe: str
    threshold: Annotated[float | None, Meta(description="the probe's own if left out")] = None
    tokens: Annotated[int, Meta(description="in a row")] = 1
    action: RuleAction = "stop"
    steer: Annotated[list[SteerEntryJson], Meta(description="for the action steer")] = []


class Span(RequestBody, rename={"from_": "from"}):
    """Positions from `from` up to and not including `to`; negative: from the end of the prompt."""

    from_: int = 0
    to: int | None = None


class ChatMessageJson(RequestBody):
    """All tokens of the chat's message with this index."""

    message: Annotated[int, Meta(ge=0)]


class EncoderChoice(Struct):
    """An encoder and its parameters."""

    name: Literal["raw", "rp8", "full8", "topk8", "fp8", "int4"]


# A msgspec type holds one struct without a tag, so the two objects of a position are put together
# in the document: see _POSITIONS.
class CaptureRequest(RequestBody):
    """Which rows of a request are stored; what is left out is as the engine's setting has it."""

    points: Annotated[list[str] | str | None, Meta(description='names, patterns or "all"')] = None
    positions: Any = None
    encoder: str | EncoderChoice | None = None
    to: Annotated[list[str] | None, Meta(description="names of the engine's consumers")] = None
    tags: dict[str, Any] = {}


_CaptureField = Annotated[
    bool | CaptureRequest | None,
    Meta(description="true: as the engine's setting says; false: nothing"),
]


class ClairaiFields(ClairaiOptions, frozen=True, forbid_unknown_fields=True):
    """What a completion request may ask for under its key `clairai`."""

    # The proxy leaves these to the engine: ClairaiOptions does not decode them.
    steer: list[SteerEntryJson] = []  # type: ignore[assignment]  # noqa: RUF012
    stop: list[StopRuleJson] = []  # type: ignore[assignment]  # noqa: RUF012
    capture: _CaptureField = None  # type: ignore[assignment]


class ChatRequest(Struct, kw_only=True):
    """OpenAI's and vLLM's fields go to the engine unchanged; `clairai` is for the proxy."""

    messages: list[Any]
    clairai: ClairaiFields | None = None


class CompletionRequest(Struct, kw_only=True):
    """OpenAI's and vLLM's fields go to the engine unchanged; `clairai` is for the proxy."""

    prompt: str | list[Any]
    clairai: ClairaiFields | None = None


class ResponsesRequest(Struct, kw_only=True):
    """OpenAI's and vLLM's fields go to the engine unchanged; `clairai` is for the proxy."""

    input: str | list[Any]
    clairai: ClairaiFields | None = None


# Completions: what is answered


class ProbeScores(Answer):
    """`choices[i].probe_scores`: row j scores generated token `start + j`."""

    names: tuple[str, ...]
    start: int
    scores: list[list[Score]]
    lost: _LostRows = UNSET
    weights: _RowWeights = UNSET


class PromptMedia(Answer):
    """The `span` tokens from `start` on are no text: there the model was given this."""

    kind: Literal["image", "audio", "video", "other"]
    start: int
    span: int


_PromptMedia = (
    Annotated[
        list[PromptMedia],
        Meta(description="tokens that are only placeholders, left out if all are text"),
    ]
    | UnsetType
)


class PromptScores(Answer, kw_only=True):
    """`choices[0].prompt_scores`: row j scores prompt token j."""

    names: tuple[str, ...]
    start: Literal[0] = 0
    token_ids: list[int]
    tokens: list[str]
    scores: list[list[Score]]
    lost: int | UnsetType | None = UNSET
    weights: _RowWeights = UNSET
    media: _PromptMedia = UNSET


class KeptChoice(Answer):
    """One choice of an answer whose scores are kept; scores as in the answer itself."""

    index: int
    finish_reason: Annotated[str | None, Meta(description="null while it runs")]
    stop_reason: str | int | None
    token_ids: Annotated[list[int], Meta(description="generated so far")]
    tokens: Annotated[
        list[str] | None, Meta(description="their texts; null if the engine does not tell them")
    ]
    probe_scores: Annotated[
        ProbeScores, Meta(description="of the first tokens: while it runs, scores come later")
    ]
    prompt_scores: PromptScores | UnsetType = UNSET


class AnswerScores(Answer, kw_only=True):
    """The scores of an answer, by the id that its client was given."""

    id: str
    object: Literal["clairai.scores"] = "clairai.scores"
    model: str | None
    created: Annotated[int, Meta(description="when it was asked for, in seconds since 1970")]
    status: Literal["running", "done", "cancelled", "error"]
    is_final: Annotated[bool, Meta(description="nothing is added any more")]
    expires: Annotated[float | None, Meta(description="in seconds since 1970; null while it runs")]
    choices: list[KeptChoice]


class TokenEvent(Answer):
    """Event `token`: `tokens[k]` is the text to show for token `start + k`."""

    part: Literal["prompt", "answer"]
    choice: int
    start: int
    token_ids: list[int]
    tokens: list[str]
    text: str


class ProbeUpdateEvent(Answer):
    """Event `probe_update`: row j scores token `start + j` of its part."""

    part: Literal["prompt", "answer"]
    choice: int
    names: tuple[str, ...]
    start: int
    scores: list[list[Score]]
    lost: int | UnsetType | None = UNSET
    weights: _RowWeights = UNSET
    media: _PromptMedia = UNSET


class ProbeFinalEvent(Answer):
    """Event `probe_final`, one per choice; one entry per probe in each list."""

    choice: int
    names: list[str]
    count: Annotated[int, Meta(description="generated tokens with a score")]
    mean: list[Score]
    max: list[Score]
    argmax: list[int | None]
    above: Annotated[
        list[int | None], Meta(description="tokens at or above the threshold, null without one")
    ]
    lost: int


class CaptureHandle(Answer):
    """`clairai.capture` of an answer, and of the last chunk of a stream. A row is one token at one
    point."""

    id: Annotated[str, Meta(pattern="^[0-9a-f]{16}$", description="for GET /v1/captures/{id}")]
    state: capture_messages.CaptureStatus
    rows: int
    lost: Annotated[int, Meta(description="rows that were wanted and are missing at a consumer")]
    discarded: Annotated[int, Meta(description="rows whose rule was not met")]
    reason: str | UnsetType = UNSET


class DoneEvent(Answer):
    """Event `done`: the last of a run that went well."""

    id: str | None
    model: str | None
    finish_reasons: list[str | None]
    stop_reasons: Annotated[
        list[str | int | None],
        Meta(description="the stop string, stop token or stop rule that ended each choice"),
    ]
    usage: dict[str, Any] | None
    capture: (
        Annotated[CaptureHandle | None, Meta(description="what became of captured rows")]
        | UnsetType
    ) = UNSET
    weights: (
        Annotated[int | None, Meta(description="version of the weights that it began with")]
        | UnsetType
    ) = UNSET
    label: (
        Annotated[str | None, Meta(description="the client's own name for the request")] | UnsetType
    ) = UNSET


class AppliedEntry(Answer, forbid_unknown_fields=False):
    """An entry as the engine applies it: with its content's digest, and all of its points."""

    vector: Annotated[str | None, Meta(description="null: it came with the request")]
    digest: str
    scale: float
    op: Op
    points: list[str]


class SteeringEcho(Answer, forbid_unknown_fields=False):
    """`clairai` of an answer, and of the first chunk of a stream: what the engine applies."""

    steering: list[AppliedEntry] | UnsetType = UNSET
    stop: (
        Annotated[list[dict[str, Any]] | None, Meta(description="rules, with their thresholds")]
        | UnsetType
    ) = UNSET
    weights: (
        Annotated[int | None, Meta(description="version of the weights that it began with")]
        | UnsetType
    ) = UNSET
    label: (
        Annotated[str | None, Meta(description="the client's own name for the request")] | UnsetType
    ) = UNSET


class SteeringEvent(Answer):
    """Event `steering`: the first of a run that is steered, or has a rule."""

    clairai: SteeringEcho


# Other routes; probes, vectors and weights are listed as the wire structs that hold them


class ProbeList(Answer):
    data: tuple[control_messages.ListedProbe, ...]
    capacity: int
    version: int


class VectorCapacity(Answer):
    """What unfinished requests may have in use at once."""

    rows: int
    programs: int


class VectorList(Answer):
    data: tuple[steering_messages.ListedVector, ...]
    version: int
    points: Annotated[list[str], Meta(description="where this engine can steer")]
    width: int
    capacity: VectorCapacity


class Amendment(RequestBody):
    """What steers the rest of a running request; an empty list: nothing."""

    steer: list[SteerEntryJson]


class Amended(Answer):
    """From which position on the change holds, for each choice of the request, and the entries."""

    positions: list[int]
    steering: list[dict[str, Any]]


class Tiers(Answer):
    """What steers every request that is admitted from now on."""

    base: list[dict[str, Any]]
    prefill: list[dict[str, Any]]
    decode: list[dict[str, Any]]
    version: int


class TiersChange(RequestBody):
    """A tier that is left out stays as it is; an empty list clears it."""

    base: list[SteerEntryJson] = []
    prefill: list[SteerEntryJson] = []
    decode: list[SteerEntryJson] = []


class CaptureInfo(CaptureHandle, kw_only=True):
    """A capture in the list of captures."""

    points: list[str]
    encoder: str
    answers: int
    label: str | UnsetType = UNSET
    owner: Annotated[str, Meta(description="name of the API key that made it")] | UnsetType = UNSET


class ConsumerState(Answer):
    """Rows are those since the engine started."""

    name: str
    state: Annotated[str, Meta(description="writing, dropping, stopped or failed")]
    reason: str
    since: Annotated[float, Meta(description="of this state, in seconds since 1970")]
    refused: Annotated[int, Meta(description="rows for which it had no room")]
    lost: Annotated[int, Meta(description="rows that it took and could not keep")]
    free_nbytes: Annotated[
        int | None, Meta(description="on its disk, less the reserve; null if unknown")
    ]


class CaptureMemory(Answer):
    """Bytes."""

    stash_nbytes: Annotated[int, Meta(description="of the device, for all rows of a step")]
    staging_nbytes: Annotated[int, Meta(description="of the host, for rows on their way")]
    pending_nbytes: Annotated[
        int, Meta(description="of the host, for rows that wait for a rule, now")
    ]


class CaptureList(Answer):
    """The newest first; rows are those since the engine started."""

    data: list[CaptureInfo]
    consumers: list[ConsumerState]
    rows: int
    dropped: int
    discarded: int
    memory: CaptureMemory


class TensorList(Answer):
    """What can be sent."""

    data: tuple[weights_messages.ListedTensor, ...]


class ReaderState(Answer):
    """How this proxy reads the ring."""

    delivered: int
    lost: int
    lag: int
    orphaned: int
    attached: bool


class EngineCore(Answer):
    """One of several engine cores (`--data-parallel-size`), each with a ring of its own."""

    epoch: str
    published: int


class EngineDescription(Answer, forbid_unknown_fields=False):
    model: str
    points: list[str]
    width: int
    capacity: int
    epoch: str
    published: int
    reader: ReaderState
    cores: Annotated[
        list[EngineCore] | UnsetType, Meta(description="in vLLM's order, if there are several")
    ] = UNSET


class Message(RequestBody):
    role: str
    content: str


class Example(RequestBody, kw_only=True):
    title: str
    probe: str | None = None
    messages: list[Message]


class ExampleList(RequestBody):
    data: list[Example]


class Liveness(Answer):
    live: Annotated[bool, Meta(description="the proxy's event loop turns; says nothing else")]


class Readiness(Answer):
    ready: Annotated[bool, Meta(description="a completion that is sent now is answered")]
    reason: Annotated[str | None, Meta(description="why it would not be")]


class Health(Answer):
    status: Literal["starting", "ready", "degraded", "failed"]
    reason: str | None
    since: Annotated[float | None, Meta(description="in seconds since 1970, where it is known")]
    model: str | None
    version: str
    replica: Annotated[str | None, Meta(description="what --replica says")]


# The document

# Parts of streams and of completions, which no route answers as a whole.
_PARTS: Final = (
    *(ChatRequest, CompletionRequest, ResponsesRequest, ClairaiFields, Span, ChatMessageJson),
    *(ProbeScores, PromptScores, TokenEvent, ProbeUpdateEvent, ProbeFinalEvent, DoneEvent),
    *(SteeringEcho, SteeringEvent, Amendment, TiersChange, Manifest, ErrorBody),
)
_ANSWERS: Final = (
    *(ProbeList, Amended, Tiers, VectorList, CaptureList, TensorList),
    *(EngineDescription, ExampleList, Health, Liveness, Readiness, AnswerScores),
)
_WIRE_ANSWERS: Final[tuple[type[Struct], ...]] = (
    control_messages.ListedProbe,
    control_messages.Histogram,
    steering_messages.ListedVector,
    weights_messages.ListedTensor,
    weights_messages.WeightsState,
    weights_messages.WeightsPlanned,
    weights_messages.WeightsCommitted,
)
# Names in the document of structs that have another name in the code.
_NAMES: Final[dict[type[Struct], str]] = {
    control_messages.ListedProbe: "ProbeInfo",
    steering_messages.ListedVector: "VectorInfo",
    weights_messages.ListedTensor: "SendableTensor",
    SteerEntryJson: "SteerEntry",
    StopRuleJson: "StopRule",
    ChatMessageJson: "ChatMessage",
    Manifest: "WeightsManifest",
    PlannedTensor: "ManifestTensor",
}
# Fields of wire structs that clients do not get.
_HIDDEN: Final = ("type", "socket", "probe_rows", "vector_rows")
# Fields of wire structs that are always sent, but that a client should not rely on.
_OPTIONAL: Final = frozenset(
    (
        *("description", "auroc", "histogram", "method", "scale"),
        *("bank_version", "vectors_version"),
    )
)
_POSITION: Final[dict[str, Any]] = {
    "anyOf": [
        {"enum": list(get_args(PositionSelector)), "type": "string"},
        {"$ref": REF.format(name="Span")},
        {"$ref": REF.format(name="ChatMessage")},
    ]
}
_POSITIONS: Final[dict[str, Any]] = {
    "anyOf": [*_POSITION["anyOf"], {"type": "array", "items": _POSITION}, {"type": "null"}]
}


def component_name(struct: type[Struct]) -> str:
    return _NAMES.get(struct, struct.__name__)


def make_components() -> dict[str, Any]:
    """The schemas of the document by name, in alphabetical order."""
    structs = (*_PARTS, *_ANSWERS, *_WIRE_ANSWERS)
    _, found = msgspec.json.schema_components(structs, ref_template=REF)
    ours = (*Answer.__subclasses__(), *CaptureHandle.__subclasses__())
    for struct in (*ours, *_WIRE_ANSWERS):
        _require_all_fields(struct, found[struct.__name__])
    del found[weights_messages.NewRows.__name__]  # only in hidden fields
    found["CaptureRequest"]["properties"]["positions"] = _POSITIONS
    text = json.dumps(found).replace(r"\\Z", "$")  # the end of a string in JSON Schema
    for struct, name in _NAMES.items():
        text = text.replace(f'"{struct.__name__}"', f'"{name}"')
        text = text.replace(REF.format(name=struct.__name__) + '"', REF.format(name=name) + '"')
    made: dict[str, Any] = json.loads(text)
    return dict(sorted(made.items()))


def _require_all_fields(struct: type[Struct], schema: dict[str, Any]) -> None:
    """Describe a struct that is only written: a field is left out only if it is UNSET."""
    properties = schema["properties"]
    optional = {field.encode_name for field in fields(struct) if field.default is UNSET}
    if not issubclass(struct, Answer):
        optional |= _OPTIONAL
        schema.pop("additionalProperties", None)  # a newer engine may say more
        for name in _HIDDEN:
            properties.pop(name, None)
    schema["required"] = [name for name in properties if name not in optional]
    for name in schema["required"]:
        properties[name].pop("default", None)


def main() -> None:
    from clairai.proxy.app import create_app
    from clairai.proxy.proxy_settings import ProxySettings

    app = create_app(ProxySettings(upstream="http://127.0.0.1:8000"))
    print(json.dumps(app.openapi(), indent=2))  # noqa: T201


if __name__ == "__main__":
    main()
