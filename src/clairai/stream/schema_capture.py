"""The JSON of captures, as models. Takes nothing; gives what schema.py puts into the document."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field

Selector = Literal["all", "prompt", "generated", "last_prompt"]
State = Literal["open", "writing", "kept", "discarded", "failed"]


class _Model(BaseModel):
    model_config = ConfigDict(extra="forbid")


class Span(_Model):
    """Positions from, up to and not including, to; negative: from the end of the prompt."""

    from_: int = Field(0, alias="from")
    to: int | None = None


class ChatMessage(_Model):
    """All tokens of the chat's message with this index."""

    message: int = Field(ge=0)


Positions = Selector | Span | ChatMessage


class EncoderChoice(BaseModel):
    """An encoder and its parameters."""

    model_config = ConfigDict(extra="allow")

    name: Literal["raw", "rp8", "full8", "topk8", "fp8", "int4"]


class CaptureRequest(_Model):
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
    state: State
    rows: int
    lost: int = Field(description="rows that were wanted and are missing at a consumer")
    discarded: int = Field(description="rows that a rule was not met for")
    reason: str | None = None


class CaptureInfo(CaptureHandle):
    points: list[str]
    encoder: str
    answers: int


class ConsumerState(_Model):
    name: str
    state: str
    reason: str


class CaptureMemory(_Model):
    """Bytes."""

    stash_nbytes: int = Field(description="of the device, for all rows of a step")
    staging_nbytes: int = Field(description="of the host, for rows on their way")
    pending_nbytes: int = Field(description="of the host, for rows that wait for a rule, now")


class CaptureList(_Model):
    """The newest first; rows are those since the engine started."""

    data: list[CaptureInfo]
    consumers: list[ConsumerState]
    rows: int
    dropped: int
    discarded: int
    memory: CaptureMemory


PARTS = (CaptureRequest, CaptureHandle)
