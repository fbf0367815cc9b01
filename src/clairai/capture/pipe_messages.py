"""Takes nothing of ours; gives what an engine and its clerk tell each other, as msgpack.

E = ranges of positions that are wanted, in the order of the plan. Numbers of these travel as the
bytes of one array each: a plan is told once, a step with the same plan is a few hundred bytes.
"""

from __future__ import annotations

from typing import Any, Final

import msgspec

from clairai.capture.consumers import EngineInfo, Policy
from clairai.engine.capture.capture_plan import CapturePlan
from clairai.wire.capture_messages import CaptureStatus


class ConsumerConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A consumer that is to be opened."""

    name: str
    kind: str
    options: dict[str, Any]


class WriterStart(msgspec.Struct, frozen=True, tag="hello", forbid_unknown_fields=True):
    """The first that the engine says."""

    about: EngineInfo
    consumers: tuple[ConsumerConfig, ...]
    pending_nbytes: int


class BeginAnswer(msgspec.Struct, frozen=True, tag="begin", forbid_unknown_fields=True):
    """Rows of an answer will come. `number` tells it from others with the same seat."""

    number: int
    stream: int
    choice: int
    order: CapturePlan


class AmendAnswer(msgspec.Struct, frozen=True, tag="amend", forbid_unknown_fields=True):
    stream: int
    choice: int
    steering: str


class FinishAnswer(msgspec.Struct, frozen=True, tag="finish", forbid_unknown_fields=True):
    stream: int
    choice: int


class SetWeights(msgspec.Struct, frozen=True, tag="relabel", forbid_unknown_fields=True):
    """What comes from now on is of these weights."""

    weights: str


class CommitFinished(msgspec.Struct, frozen=True, tag="commit", forbid_unknown_fields=True):
    """Make all safe that has finished."""


class CloseWriter(msgspec.Struct, frozen=True, tag="close", forbid_unknown_fields=True):
    """Nothing follows."""


class ArrayPlace(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """One array of a ticket, from the start of its region on; group -1 is of the whole ticket."""

    group: int
    name: str
    start: int
    dtype: str
    shape: tuple[int, ...]


class FormatRows(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """Tokens from `first` up to `end` of the ticket, at these points, for these consumers."""

    points: tuple[str, ...]
    to: tuple[str, ...]
    first: int
    end: int


class EncodedGroup(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """Rows of one encoder: of each part in turn, point by point, token by token."""

    encoder: str
    parameters: tuple[tuple[str, int | str], ...]
    parts: tuple[FormatRows, ...]
    sample: bytes  # int64: places among these rows


class StagingPlanMessage(msgspec.Struct, frozen=True, tag="plan", forbid_unknown_fields=True):
    """How the rows of the tickets that follow lie, and whose they are."""

    number: int
    dtype: str  # of the rows
    fields: tuple[ArrayPlace, ...]
    groups: tuple[EncodedGroup, ...]
    counts: bytes  # int64 [E]: rows of each range
    streams: bytes  # uint64 [E]
    choices: bytes  # uint16 [E]
    prompts: bytes  # int64 [E]: the length of each one's prompt


class StagedRows(msgspec.Struct, frozen=True, tag="ticket", forbid_unknown_fields=True):
    """Rows of one step, or of a part of it, as the last plan says."""

    number: int
    plan: int
    start: int
    nbytes: int
    end: int
    firsts: bytes  # int64 [E]: the position of each range's first row
    seen: bytes  # int64 [E]: up to where its rows were computed before


class HeldTokens(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """Tokens of a step whose scores decide about an answer's rows."""

    stream: int
    choice: int
    probe: str
    threshold: float
    first: int
    end: int


class StagedScores(msgspec.Struct, frozen=True, tag="scores", forbid_unknown_fields=True):
    """Scores of one step in float32: of each probe one for each token, one probe after another."""

    number: int
    start: int
    nbytes: int
    end: int
    num_tokens: int
    probes: tuple[str, ...]  # that there are scores of
    held: tuple[HeldTokens, ...]


StagedMessage = StagedRows | StagedScores
EngineMessage = (
    WriterStart
    | BeginAnswer
    | AmendAnswer
    | FinishAnswer
    | SetWeights
    | CommitFinished
    | CloseWriter
    | StagingPlanMessage
    | StagedRows
    | StagedScores
)


class OpenedConsumer(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """A consumer that is open."""

    name: str
    where: str
    policy: Policy


class WriterReady(msgspec.Struct, frozen=True, tag="ready", forbid_unknown_fields=True):
    """The first that the clerk says."""

    process: int
    consumers: tuple[OpenedConsumer, ...]


class WriterRefused(msgspec.Struct, frozen=True, tag="refused", forbid_unknown_fields=True):
    """The first that the clerk says where a consumer cannot be opened."""

    code: str
    reason: str


class AnswerReport(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """What has become of one answer."""

    number: int  # as it began
    stream: int
    choice: int
    state: CaptureStatus
    rows: int
    dropped: int
    discarded: int
    reason: str
    waits: str
    lost: tuple[int, ...]  # at each consumer of its order
    safe: tuple[str, ...]


class ConsumerReport(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """How a consumer is doing."""

    consumer: str
    name: str
    reason: str


class WriterReport(msgspec.Struct, frozen=True, tag="report", forbid_unknown_fields=True):
    """All that has changed since the last."""

    delivered: int  # the last ticket whose rows are counted
    told: tuple[AnswerReport, ...]
    standings: tuple[ConsumerReport, ...]
    rows: int
    dropped: int
    discarded: int
    pending_nbytes: int


WriterMessage = WriterReady | WriterRefused | WriterReport

ENCODER: Final = msgspec.msgpack.Encoder()
ENGINE_DECODER: Final = msgspec.msgpack.Decoder(EngineMessage)
WRITER_DECODER: Final = msgspec.msgpack.Decoder(WriterMessage)
