"""Every message that crosses a process: rows in the ring, and the structs of the handshake socket.

Steering, captures and weights have modules of their own in this package.
"""

from __future__ import annotations

from typing import Final, Literal

import msgspec
import numpy as np

from clairai.wire import capture_messages, steering_messages, weights_messages
from clairai.wire.weights_messages import SharedBytes as Lent

Activation = Literal["none", "relu", "sigmoid"]

# One row of a record. `span` is the number of tokens the row stands for: 1 for a token that was
# forwarded, n for a run of n tokens that the prefix cache served, 0 for an end-of-request mark.
ROW: Final = np.dtype(
    {
        "names": ["stream", "position", "token_id", "span", "choice", "phase", "flags"],
        "formats": ["<u8", "<u4", "<i4", "<u4", "<u2", "u1", "u1"],
        "offsets": [0, 8, 12, 16, 20, 22, 23],
        "itemsize": 24,
    }
)

# phase
PREFILL: Final = 0  # the token belongs to the prompt and was forwarded in this step
DECODE: Final = 1  # the token was generated and was forwarded in this step
CACHED: Final = 2  # `span` prompt tokens from `position` on came from the prefix cache: no scores
FINISHED: Final = 3  # the engine is done with the request: no more rows will follow
PHASE_NAMES: Final = ("prefill", "decode", "cached", "finished")

# flags
RECOMPUTED: Final = 1  # reported before (preemption came between); the newest row counts


class ProbeInfo(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What a reader needs to know of one column of scores."""

    name: str
    point: str
    activation: Activation = "none"
    threshold: float | None = None
    calibration: tuple[float, float] | None = None  # low and high end of the usual scores
    digest: str = ""  # content hash of the probe


class Histogram(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """How often scores of a reference set fell into each of equal parts of `low` to `high`."""

    low: float
    high: float
    counts: tuple[int, ...]


class ListedProbe(ProbeInfo, frozen=True, forbid_unknown_fields=True):
    """What people are told of a probe besides; only in control messages.

    2048 of these can be longer than MAX_MESSAGE_BYTES, and no reader needs them to read a record.
    """

    description: str | None = None
    auroc: float | None = None  # on documents that neither the fit nor a choice has seen
    histogram: Histogram | None = None


class Bank(msgspec.Struct, frozen=True, tag="bank", forbid_unknown_fields=True, omit_defaults=True):
    """The columns of every record that carries this `version`, in order.

    New weights make a new version too, so that records say at no cost whose rows they hold.
    """

    version: int
    probes: tuple[ProbeInfo, ...]
    weights: int | None = None  # version of the model's weights; None: they never change here


class AskBank(msgspec.Struct, frozen=True, tag="ask_bank", forbid_unknown_fields=True):
    """Reader to engine: which columns did bank `version` have?"""

    version: int


class Welcome(msgspec.Struct, frozen=True, tag="welcome", forbid_unknown_fields=True):
    """Engine to reader, first message; a host ring's file descriptor travels with it."""

    wire_version: int
    epoch: int
    pid: int
    model: str
    vllm: str
    home: Literal["host", "device"]
    nbytes: int
    slots: int
    slot_bytes: int
    points: tuple[str, ...]
    handle: bytes = b""  # of a ring in device memory; one in host memory comes as a descriptor
    gpu: str = ""  # UUID of the GPU it lies on
    address: int = 0  # there, for a reader in the engine's own process: CUDA IPC does not serve it


class Refusal(msgspec.Struct, frozen=True, tag="refusal", forbid_unknown_fields=True):
    """The peer will not do what was asked, and why."""

    code: str
    reason: str


RingMessage = Welcome | Bank | AskBank | Refusal


# Control plane: bytes into `collective_rpc("clairai_control", (message,))`, bytes out.


class ListProbes(msgspec.Struct, frozen=True, tag="list_probes", forbid_unknown_fields=True):
    """Which probes are in the bank?"""


class AddProbes(msgspec.Struct, frozen=True, tag="add_probes", forbid_unknown_fields=True):
    """Add these probes (safetensors); all of them, or none and a Refusal."""

    files: tuple[bytes, ...]


class ReplaceProbes(msgspec.Struct, frozen=True, tag="replace_probes", forbid_unknown_fields=True):
    """Put these probes in the place of those of the same name; all of them, or none."""

    files: tuple[bytes, ...]


class RedirectProbes(
    msgspec.Struct, frozen=True, tag="redirect_probes", forbid_unknown_fields=True
):
    """Give the probes of these names other directions, a row of float32 for each; all, or none."""

    names: tuple[str, ...]
    rows: memoryview  # one after the other; not copied when it is read


class RedirectProbesShared(
    msgspec.Struct, frozen=True, tag="turn_probes", forbid_unknown_fields=True
):
    """As RedirectProbes; a worker that cannot read the rows there refuses it as unsupported."""

    names: tuple[str, ...]
    rows: Lent


class RemoveProbes(msgspec.Struct, frozen=True, tag="remove_probes", forbid_unknown_fields=True):
    """Take the probes of these names out; all of them, or none."""

    names: tuple[str, ...]


class Describe(msgspec.Struct, frozen=True, tag="describe", forbid_unknown_fields=True):
    """What is tapped, and where is the ring?"""


class FindStreams(msgspec.Struct, frozen=True, tag="find_streams", forbid_unknown_fields=True):
    """Which stream ids did these requests get? Ids are those the caller of vLLM knows."""

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
    | steering_messages.SteeringControl
    | capture_messages.CaptureControl
    | weights_messages.WeightsControl
    | weights_messages.FindVersions
)


class BankState(msgspec.Struct, frozen=True, tag="bank_state", forbid_unknown_fields=True):
    """The bank after what was asked."""

    version: int
    capacity: int  # per site
    probes: tuple[ListedProbe, ...]


class BankVersion(msgspec.Struct, frozen=True, tag="bank_version", forbid_unknown_fields=True):
    """The bank's version after a change of numbers alone: to list it would take longer."""

    version: int


class Description(msgspec.Struct, frozen=True, tag="description", forbid_unknown_fields=True):
    """What the engine taps, and the socket that hands out its ring."""

    socket: str
    epoch: int
    model: str
    width: int
    points: tuple[str, ...]
    capacity: int
    published: int  # records


class Streams(msgspec.Struct, frozen=True, tag="streams", forbid_unknown_fields=True):
    """Stream id of each request asked for; None for one this engine does not remember."""

    streams: tuple[int | None, ...]
    since: int = 0  # the first record in which rows of theirs can be


ControlReply = (
    BankState
    | BankVersion
    | Description
    | Streams
    | steering_messages.SteeringReply
    | capture_messages.CaptureReply
    | weights_messages.WeightsReply
    | Refusal
)
WIRE_VERSION: Final = 1
MAX_MESSAGE_BYTES: Final = 1 << 20
