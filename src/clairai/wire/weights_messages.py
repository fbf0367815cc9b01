"""Messages of a transfer of weights, probes or vectors: control messages, and those of its socket.

A manifest is JSON, as HTTP brought it.
"""

from __future__ import annotations

from typing import Annotated, Final, Literal

import msgspec

MAX_SHARED_BYTES: Final = 32 << 20


class SharedBytes(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Bytes in a memfd of another process of the same user: see local/shared_buffer.py."""

    pid: Annotated[int, msgspec.Meta(ge=1, le=(1 << 31) - 1)]
    fd: Annotated[int, msgspec.Meta(ge=0, le=(1 << 31) - 1)]
    token: Annotated[str, msgspec.Meta(pattern=r"\A[0-9a-f]{32}\Z")]  # in the memfd's name
    nbytes: Annotated[int, msgspec.Meta(ge=0, le=MAX_SHARED_BYTES)]


class KnownVector(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A steering vector that can be replaced; only the engine core knows them."""

    name: str
    shape: tuple[int, int]  # points and width


class WeightsQuestion(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """What all of these have: the core adds what it knows before the workers are asked."""

    vectors: tuple[KnownVector, ...] = ()
    wants_rows: bool = True  # False: the core sees the worker's bank, and needs no copy of it


class DescribeWeights(
    WeightsQuestion, frozen=True, tag="describe_weights", forbid_unknown_fields=True
):
    """Which weights serve, and where are new ones taken?"""


class ListTensors(WeightsQuestion, frozen=True, tag="list_tensors", forbid_unknown_fields=True):
    """What can be sent?"""


class CheckWeights(WeightsQuestion, frozen=True, tag="check_weights", forbid_unknown_fields=True):
    """Would this be taken? Nothing is expected after it: a dry run."""

    manifest: bytes


class PlanWeights(WeightsQuestion, frozen=True, tag="plan_weights", forbid_unknown_fields=True):
    """Expect the buffers of this manifest; a plan before it is forgotten."""

    manifest: bytes


class VerifyWeights(WeightsQuestion, frozen=True, tag="verify_weights", forbid_unknown_fields=True):
    """Has all of it come, as it was planned and packed? Asked before anybody has to wait for it."""

    manifest: bytes


class CommitWeights(WeightsQuestion, frozen=True, tag="commit_weights", forbid_unknown_fields=True):
    """Serve with what has come, all of it, or a Refusal and the old weights.

    Probes and vectors that are small need no plan: they are `lent`, and nothing has come before. An
    engine that cannot read them there refuses that as unsupported.
    """

    manifest: bytes
    lent: SharedBytes | None = None


WeightsControl = (
    DescribeWeights | ListTensors | CheckWeights | PlanWeights | VerifyWeights | CommitWeights
)


class FindVersions(msgspec.Struct, frozen=True, tag="find_versions", forbid_unknown_fields=True):
    """With which weights did these streams begin?"""

    streams: tuple[int, ...]


class WeightsState(msgspec.Struct, frozen=True, tag="weights_state", forbid_unknown_fields=True):
    """The weights that serve now."""

    version: int  # 0: those the engine was started with
    label: str
    digest: str  # of the content; empty for version 0
    epoch: str
    device: str  # "cpu", or a GPU's UUID
    num_tensors: int
    is_torn: bool = False
    socket: str = ""  # where buffers are taken; said to who is on the engine's machine


class ListedTensor(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One tensor that can be sent."""

    name: str
    dtypes: tuple[str, ...]
    shape: tuple[int, ...]


class Tensors(msgspec.Struct, frozen=True, tag="tensors", forbid_unknown_fields=True):
    """All that can be sent, in the order in which it is best sent."""

    tensors: tuple[ListedTensor, ...]


class WeightsPlanned(
    msgspec.Struct, frozen=True, tag="weights_planned", forbid_unknown_fields=True
):
    """The plan is good."""

    transfer: str
    nbytes: int


class NewRows(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """New numbers of a vector, or of probes: float32, row after row. Not copied when it is read."""

    names: tuple[str, ...]  # one of a vector, one for each row of probes
    data: memoryview


class WeightsCommitted(
    msgspec.Struct, frozen=True, tag="weights_committed", forbid_unknown_fields=True
):
    """They serve."""

    version: int
    digest: str
    nbytes: int
    load_s: float
    bank_version: int | None = None  # of the probes, if any were among it
    vectors_version: int | None = None  # of the steering vectors, likewise
    # For the engine core, which takes them out: what gates and names mean is kept there.
    probe_rows: NewRows | None = None
    vector_rows: tuple[NewRows, ...] = ()


class Versions(msgspec.Struct, frozen=True, tag="versions", forbid_unknown_fields=True):
    """Of each stream that was asked for; None for one that has not begun, or is not remembered."""

    versions: tuple[int | None, ...]


WeightsReply = WeightsState | Tensors | WeightsPlanned | WeightsCommitted | Versions


# On the socket: the engine greets, the sender offers buffer after buffer.


class WeightsGreeting(
    msgspec.Struct, frozen=True, tag="weights_greeting", forbid_unknown_fields=True
):
    """Engine to sender, first message."""

    wire_version: int
    epoch: str
    device: str
    pid: int


BufferHome = Literal["host", "copied", "device"]


class BufferOffer(msgspec.Struct, frozen=True, tag="offer", forbid_unknown_fields=True):
    """Sender to engine: a buffer; one in host memory is full, and comes as a descriptor beside it.

    `copied` is host memory that the sender will use again: the engine has a copy when it answers.
    One of a GPU is opened now and read when Full comes: to open it takes as long as to fill it.
    """

    transfer: str
    index: Annotated[int, msgspec.Meta(ge=0)]
    nbytes: Annotated[int, msgspec.Meta(ge=0, le=(1 << 63) - 1)]
    home: BufferHome
    handle: Annotated[bytes, msgspec.Meta(max_length=64)] = b""


class BufferFilled(msgspec.Struct, frozen=True, tag="full", forbid_unknown_fields=True):
    """Sender to engine: a buffer of a GPU that it has opened holds all its numbers now."""

    transfer: str
    index: Annotated[int, msgspec.Meta(ge=0)]


class BufferReceived(msgspec.Struct, frozen=True, tag="held", forbid_unknown_fields=True):
    """Engine to sender: it has come, and has been read once."""

    index: int
    extent: int
