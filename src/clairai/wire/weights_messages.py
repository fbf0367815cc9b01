"""Messages of a transfer of weights, probes or vectors: control messages, and those of its socket.

A manifest is JSON as it came over HTTP. The worker answers these messages.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Annotated, Final, Literal

import msgspec

from clairai.wire.ring_messages import Refusal

MAX_SHARED_BYTES: Final = 32 << 20


class SharedBytes(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Bytes in a memfd of another process of the same user: see local/shared_buffer.py."""

    pid: Annotated[int, msgspec.Meta(ge=1, le=(1 << 31) - 1)]
    fd: Annotated[int, msgspec.Meta(ge=0, le=(1 << 31) - 1)]
    token: Annotated[str, msgspec.Meta(pattern=r"\A[0-9a-f]{32}\Z")]  # in the memfd's name
    nbytes: Annotated[int, msgspec.Meta(ge=0, le=MAX_SHARED_BYTES)]


class VectorShape(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A steering vector that can be replaced; only the engine core knows them."""

    name: str
    shape: tuple[int, int]  # points and width


class WeightsQuestion(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Fields that the core adds to each of these messages before it asks the workers."""

    vectors: tuple[VectorShape, ...] = ()
    wants_rows: bool = True  # False: the core shares the worker's bank and needs no copy
    # Engine cores that load at the same time, in the memory of one machine; the API server says it.
    num_cores: Annotated[int, msgspec.Meta(ge=1)] = 1


class DescribeWeights(
    WeightsQuestion, frozen=True, tag="describe_weights", forbid_unknown_fields=True
):
    """Which weights serve, and where can new ones be sent?"""


class ListTensors(WeightsQuestion, frozen=True, tag="list_tensors", forbid_unknown_fields=True):
    """What can be sent?"""


class CheckWeights(WeightsQuestion, frozen=True, tag="check_weights", forbid_unknown_fields=True):
    """A dry run: would these weights be accepted?"""

    manifest: bytes


class PlanWeights(WeightsQuestion, frozen=True, tag="plan_weights", forbid_unknown_fields=True):
    """Expect the buffers of this manifest; a plan before it is forgotten."""

    manifest: bytes


class VerifyWeights(WeightsQuestion, frozen=True, tag="verify_weights", forbid_unknown_fields=True):
    """Has all of it come as planned? Asked before requests are paused."""

    manifest: bytes


class CommitWeights(WeightsQuestion, frozen=True, tag="commit_weights", forbid_unknown_fields=True):
    """Serve with all of what has come, or refuse and keep the old weights.

    Small probes and vectors need no plan: they come with the commit, in shared memory. An engine
    that cannot read it answers `unsupported`.
    """

    manifest: bytes
    lent: SharedBytes | None = None


WeightsControl = (
    DescribeWeights | ListTensors | CheckWeights | PlanWeights | VerifyWeights | CommitWeights
)


# What the engine core asks its ranks, and the API server its engine cores, if there are several: a
# commit in two phases.


class CheckIdle(msgspec.Struct, frozen=True, tag="check_idle", forbid_unknown_fields=True):
    """Of an engine core: has every request ended that these weights would change under way?"""

    manifest: bytes


class PrepareWeights(
    WeightsQuestion, frozen=True, tag="prepare_weights", forbid_unknown_fields=True
):
    """Can you load all of it now? Keep it until the next question; nothing changes yet."""

    manifest: bytes
    lent: SharedBytes | None = None


class ApplyWeights(msgspec.Struct, frozen=True, tag="apply_weights", forbid_unknown_fields=True):
    """Every rank is prepared: load it. `is_begun`: a caller of vLLM's has begun the update."""

    transfer: str
    is_begun: bool = False


class InstallBanks(msgspec.Struct, frozen=True, tag="install_banks", forbid_unknown_fields=True):
    """Every rank has loaded it: score with the probes that came along, from the next step on."""

    transfer: str


class AbandonWeights(
    msgspec.Struct, frozen=True, tag="abandon_weights", forbid_unknown_fields=True
):
    """Another rank refused: forget this transfer, and keep the old weights.

    `is_begun`: end the update, too, that a caller of vLLM's has begun.
    """

    transfer: str
    is_begun: bool = False


class TearWeights(msgspec.Struct, frozen=True, tag="tear_weights", forbid_unknown_fields=True):
    """Another rank has not the weights that you have: only a whole set repairs that.

    What all of them hold now has these versions, which no rank has used.
    """

    version: int
    bank_version: int

    @classmethod
    def after(cls, states: Sequence[WeightsState]) -> TearWeights:
        """For ranks, or engine cores, of which these are the states."""
        bank_versions = (state.bank_version for state in states)
        return cls(1 + max(state.version for state in states), 1 + max(bank_versions))


RankControl = PrepareWeights | ApplyWeights | InstallBanks | AbandonWeights | TearWeights


class FindVersions(msgspec.Struct, frozen=True, tag="find_versions", forbid_unknown_fields=True):
    """With which weights did these streams begin?"""

    streams: tuple[int, ...]


class WeightsRank(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A rank that takes new weights, at a socket of its own."""

    epoch: Annotated[str, msgspec.Meta(description="of its engine core")]
    rank: Annotated[int, msgspec.Meta(ge=0, description="in its engine core")]
    has_bank: Annotated[
        bool, msgspec.Meta(description="it scores: probes and vectors alone go to these ranks")
    ]


class WeightsState(msgspec.Struct, frozen=True, tag="weights_state", forbid_unknown_fields=True):
    """The weights that serve now."""

    version: Annotated[
        int, msgspec.Meta(description="counts transfers; 0: those the engine was started with")
    ]
    label: str
    digest: Annotated[str, msgspec.Meta(description="of the content; empty for version 0")]
    epoch: str
    device: Annotated[str, msgspec.Meta(description='"cpu", or the UUID of the first rank\'s GPU')]
    num_tensors: int
    is_torn: Annotated[
        bool, msgspec.Meta(description="a load stopped half-way; nothing is served")
    ] = False
    socket: str = ""  # where the first rank accepts buffers, for senders on this machine
    devices: Annotated[
        tuple[str, ...], msgspec.Meta(description="of each rank; each takes the weights itself")
    ] = ()
    ranks: tuple[WeightsRank, ...] = ()  # in the order of `devices`
    bank_version: Annotated[int, msgspec.Meta(description="of the probes")] = 0


class ListedTensor(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One tensor that can be sent."""

    name: str
    dtypes: tuple[str, ...]
    shape: tuple[int, ...]


class Tensors(msgspec.Struct, frozen=True, tag="tensors", forbid_unknown_fields=True):
    """All that can be sent, in the best order to send it."""

    tensors: tuple[ListedTensor, ...]


class WeightsPlanned(
    msgspec.Struct, frozen=True, tag="weights_planned", forbid_unknown_fields=True
):
    """The plan is good."""

    transfer: str
    nbytes: int


class NewRows(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """New numbers of a vector or of probes: rows of float32, not copied when read."""

    names: tuple[str, ...]  # one of a vector, one for each row of probes
    data: memoryview


class WeightsCommitted(
    msgspec.Struct, frozen=True, tag="weights_committed", forbid_unknown_fields=True
):
    """The new weights serve."""

    version: int
    digest: str
    nbytes: int
    load_s: float
    bank_version: Annotated[
        int | None, msgspec.Meta(description="of the probes, if any were sent")
    ] = None
    vectors_version: Annotated[
        int | None, msgspec.Meta(description="of the steering vectors, if any were sent")
    ] = None
    # For the engine core, which removes them from the reply: it resolves gates and names.
    probe_rows: NewRows | None = None
    vector_rows: tuple[NewRows, ...] = ()


class Versions(msgspec.Struct, frozen=True, tag="versions", forbid_unknown_fields=True):
    """The version of each stream asked for; None if it has not begun or is forgotten."""

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
    """Sender to engine: a buffer. One in host memory is full, and its descriptor comes with it.

    `copied` is host memory that the sender reuses: the engine has copied it when it answers. GPU
    memory is opened now and read when BufferFilled comes: opening takes as long as filling it.
    """

    transfer: str
    index: Annotated[int, msgspec.Meta(ge=0)]
    nbytes: Annotated[int, msgspec.Meta(ge=0, le=(1 << 63) - 1)]
    home: BufferHome
    handle: Annotated[bytes, msgspec.Meta(max_length=64)] = b""


class BufferFilled(msgspec.Struct, frozen=True, tag="full", forbid_unknown_fields=True):
    """Sender to engine: a GPU buffer that was offered is full now."""

    transfer: str
    index: Annotated[int, msgspec.Meta(ge=0)]


class BufferReceived(msgspec.Struct, frozen=True, tag="held", forbid_unknown_fields=True):
    """Engine to sender: the buffer was received and read once."""

    index: int
    extent: int


def describe_torn(outcomes: Iterable[object], what: str, torn_code: str) -> str | None:
    """What is wrong if only some of `what` have the new weights; None if all have, or none.

    One whose refusal has `torn_code` may have a part of them.
    """
    every = list(outcomes)
    loaded = [one for one in every if isinstance(one, WeightsCommitted)]
    if len(loaded) == len(every) and len({(one.version, one.digest) for one in loaded}) == 1:
        return None
    refused = [one for one in every if isinstance(one, Refusal)]
    if not loaded and all(one.code != torn_code for one in refused):
        return None
    reasons = " and ".join(dict.fromkeys(one.reason.partition(";")[0] for one in refused))
    return (
        f"{len(loaded)} of {len(every)} {what} have the new weights: {reasons or 'they differ'}; "
        "send a whole set of weights, or restart the engine"
    )
