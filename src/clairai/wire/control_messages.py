"""Control messages to the engine: those about probes, and the unions of all of them.

They travel as bytes into `collective_rpc(CONTROL_METHOD, (message,))`, and bytes come back. A
refusal is a reply and never an exception: with several ranks, an exception in one would leave the
other ranks' replies to the next call.
"""

from __future__ import annotations

from typing import Final

import msgspec

from clairai.wire.capture_messages import CaptureControl, CaptureReply
from clairai.wire.ring_messages import ProbeInfo, Refusal
from clairai.wire.steering_messages import SteeringControl, SteeringReply
from clairai.wire.weights_messages import (
    CheckIdle,
    FindVersions,
    RankControl,
    SharedBytes,
    WeightsControl,
    WeightsReply,
)

CONTROL_METHOD: Final = "clairai_control"  # of a vLLM worker with taps


class Histogram(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """How many scores of a reference set fell into each of equal parts of `low` to `high`."""

    low: float
    high: float
    counts: tuple[int, ...]


class ListedProbe(ProbeInfo, frozen=True, forbid_unknown_fields=True):
    """All that users see of a probe.

    Readers of the ring do not get this much: 2048 of these can exceed MAX_MESSAGE_BYTES.
    """

    description: str | None = None
    auroc: float | None = None  # on held-out documents
    histogram: Histogram | None = None


class ListProbes(msgspec.Struct, frozen=True, tag="list_probes", forbid_unknown_fields=True):
    """Which probes are in the bank?"""


class AddProbes(msgspec.Struct, frozen=True, tag="add_probes", forbid_unknown_fields=True):
    """Add these probes (safetensors); all of them, or none and a Refusal."""

    files: tuple[bytes, ...]


class ReplaceProbes(msgspec.Struct, frozen=True, tag="replace_probes", forbid_unknown_fields=True):
    """Replace the probes of the same names; all of them, or none."""

    files: tuple[bytes, ...]


class RedirectProbes(
    msgspec.Struct, frozen=True, tag="redirect_probes", forbid_unknown_fields=True
):
    """Give these probes new directions, a row of float32 for each; all of them, or none."""

    names: tuple[str, ...]
    rows: memoryview  # one after the other; not copied when it is read


class RedirectProbesShared(
    msgspec.Struct, frozen=True, tag="turn_probes", forbid_unknown_fields=True
):
    """As RedirectProbes, in shared memory; a worker that cannot read it answers `unsupported`."""

    names: tuple[str, ...]
    rows: SharedBytes


class RemoveProbes(msgspec.Struct, frozen=True, tag="remove_probes", forbid_unknown_fields=True):
    """Remove the probes of these names; all of them, or none."""

    names: tuple[str, ...]


class Describe(msgspec.Struct, frozen=True, tag="describe", forbid_unknown_fields=True):
    """What is tapped, and where is the ring?"""


class FindStreams(msgspec.Struct, frozen=True, tag="find_streams", forbid_unknown_fields=True):
    """Which stream ids did these requests get? The ids are those that vLLM's caller knows."""

    request_ids: tuple[str, ...]


Control = (
    ListProbes
    | AddProbes
    | ReplaceProbes
    | RedirectProbes
    | RedirectProbesShared
    | RemoveProbes
    | Describe
    | FindStreams
    | SteeringControl
    | CaptureControl
    | WeightsControl
    | RankControl
    | CheckIdle
    | FindVersions
)


class BankState(msgspec.Struct, frozen=True, tag="bank_state", forbid_unknown_fields=True):
    """The bank after what was asked."""

    version: int
    capacity: int  # per site
    probes: tuple[ListedProbe, ...]


class BankVersion(msgspec.Struct, frozen=True, tag="bank_version", forbid_unknown_fields=True):
    """The bank's version after new directions: listing the bank would take longer."""

    version: int


class Description(msgspec.Struct, frozen=True, tag="description", forbid_unknown_fields=True):
    """What the engine taps, and the socket of its ring."""

    socket: str
    epoch: int
    model: str
    width: int
    points: tuple[str, ...]
    capacity: int
    published: int  # records
    steps_lost: int = 0  # that could not be published, by errors of the worker's own
    keeps_scores: bool = False  # a spool has the rows that the ring has overwritten


class Streams(msgspec.Struct, frozen=True, tag="streams", forbid_unknown_fields=True):
    """The stream id of each request asked for; None for one that the engine has forgotten."""

    streams: tuple[int | None, ...]
    since: int = 0  # the first record that can hold rows of theirs
    until: int = 0  # the record after the last one, which may still be on its way to the ring


ControlReply = (
    BankState
    | BankVersion
    | Description
    | Streams
    | SteeringReply
    | CaptureReply
    | WeightsReply
    | Refusal
)
