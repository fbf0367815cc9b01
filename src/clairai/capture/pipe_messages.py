"""The messages between an engine and its capture writer process, as msgpack.

E = ranges of positions in the order of the layout. Arrays of E numbers travel as raw bytes: a
layout is sent once, and a step that uses it again takes a few hundred bytes.
"""

from __future__ import annotations

from typing import Any, Final

import msgspec

from clairai.capture.consumers import EngineInfo, Policy
from clairai.engine.capture.capture_plan import CapturePlan
from clairai.wire.capture_messages import CaptureStatus, ConsumerStatus


class ConsumerConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A consumer to open."""

    name: str
    kind: str
    options: dict[str, Any]


class WriterStart(msgspec.Struct, frozen=True, tag="hello", forbid_unknown_fields=True):
    """The engine's first message."""

    about: EngineInfo
    consumers: tuple[ConsumerConfig, ...]
    pending_nbytes: int
    is_successor: bool = False  # of a writer that died: rows of answers it began may still come


class BeginAnswer(msgspec.Struct, frozen=True, tag="begin", forbid_unknown_fields=True):
    """Rows of an answer will come. `number` tells it from earlier ones of the same stream and
    choice."""

    number: int
    stream: int
    choice: int
    order: CapturePlan


class AmendAnswer(msgspec.Struct, frozen=True, tag="amend", forbid_unknown_fields=True):
    """The steering of an answer has changed."""

    stream: int
    choice: int
    steering: str


class FinishAnswer(msgspec.Struct, frozen=True, tag="finish", forbid_unknown_fields=True):
    """No more rows of this answer will come."""

    stream: int
    choice: int


class SetWeights(msgspec.Struct, frozen=True, tag="relabel", forbid_unknown_fields=True):
    """Rows that follow were computed with these weights."""

    weights: str


class CommitFinished(msgspec.Struct, frozen=True, tag="commit", forbid_unknown_fields=True):
    """Make the rows of all finished answers safe."""


class CloseWriter(msgspec.Struct, frozen=True, tag="close", forbid_unknown_fields=True):
    """The engine's last message."""


class ArrayPlace(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """Where one array of a step lies, relative to its region. Group -1: of the whole step."""

    group: int
    name: str
    start: int
    dtype: str
    shape: tuple[int, ...]


class FormatRows(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """Tokens from `first` up to `end` of the step, at these points, for these consumers."""

    points: tuple[str, ...]
    to: tuple[str, ...]
    first: int
    end: int


class EncodedGroup(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """All rows of one encoder: part by part, in each point by point, then token by token."""

    encoder: str
    parameters: tuple[tuple[str, int | str], ...]
    parts: tuple[FormatRows, ...]
    sample: bytes  # int64: which of these rows are sampled


class StagingLayout(msgspec.Struct, frozen=True, tag="plan", forbid_unknown_fields=True):
    """How the rows of the following steps lie in their regions, and whose they are."""

    number: int
    dtype: str  # of the model's rows
    fields: tuple[ArrayPlace, ...]
    groups: tuple[EncodedGroup, ...]
    counts: bytes  # int64 [E]: rows of each range
    streams: bytes  # uint64 [E]
    choices: bytes  # uint16 [E]
    prompts: bytes  # int64 [E]: prompt length of each one's request
    # Of steps whose positions and drafts only the device knows, int64 [E]: the first position of
    # each range, and one past its last. Rows outside, and rejected drafts, are to be left out.
    lows: bytes = b""
    highs: bytes = b""


class StagedRows(msgspec.Struct, frozen=True, tag="ticket", forbid_unknown_fields=True):
    """Rows of one step, or of a part of it, laid out as the last layout says."""

    number: int
    plan: int  # the layout's number
    start: int
    nbytes: int
    end: int
    firsts: bytes  # int64 [E]: position of each range's first row
    seen: bytes  # int64 [E]: up to which position its rows were computed before
    media: bytes = b""  # uint8 [N]: what each token stands for; empty: all are text


class HeldTokens(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """Tokens `first` up to `end` of a step; their scores decide about rows of an answer."""

    stream: int
    choice: int
    probe: str
    threshold: float
    first: int
    end: int
    request: int = 0  # index in the step


class StagedScores(msgspec.Struct, frozen=True, tag="scores", forbid_unknown_fields=True):
    """Scores of one step as float32 [probes, tokens].

    Behind them, if `num_requests` is not 0, how many of each request's last tokens are rejected
    drafts, as int32 [requests].
    """

    number: int
    start: int
    nbytes: int
    end: int
    num_tokens: int
    probes: tuple[str, ...]  # that have scores here
    held: tuple[HeldTokens, ...]
    num_requests: int = 0


StagedMessage = StagedRows | StagedScores
EngineMessage = (
    WriterStart
    | BeginAnswer
    | AmendAnswer
    | FinishAnswer
    | SetWeights
    | CommitFinished
    | CloseWriter
    | StagingLayout
    | StagedRows
    | StagedScores
)


class OpenedConsumer(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """A consumer that is open."""

    name: str
    where: str
    policy: Policy


class WriterReady(msgspec.Struct, frozen=True, tag="ready", forbid_unknown_fields=True):
    """The writer's first message: all consumers are open."""

    process: int
    consumers: tuple[OpenedConsumer, ...]


class WriterRefused(msgspec.Struct, frozen=True, tag="refused", forbid_unknown_fields=True):
    """The writer's first and last message: a consumer cannot be opened."""

    code: str
    reason: str


class AnswerReport(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """What has become of one answer's rows."""

    number: int  # of its BeginAnswer
    stream: int
    choice: int
    state: CaptureStatus
    rows: int
    dropped: int
    discarded: int
    reason: str
    waits: str
    lost: tuple[int, ...]  # at each consumer of its plan
    safe: tuple[str, ...]


class WriterReport(msgspec.Struct, frozen=True, tag="report", forbid_unknown_fields=True):
    """What has changed since the last report, and the totals."""

    delivered: int  # staged messages whose rows are counted
    told: tuple[AnswerReport, ...]
    standings: tuple[ConsumerStatus, ...]
    rows: int
    dropped: int
    discarded: int
    pending_nbytes: int


WriterMessage = WriterReady | WriterRefused | WriterReport

ENCODER: Final = msgspec.msgpack.Encoder()
ENGINE_DECODER: Final = msgspec.msgpack.Decoder(EngineMessage)
WRITER_DECODER: Final = msgspec.msgpack.Decoder(WriterMessage)
