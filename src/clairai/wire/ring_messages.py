"""The rows of the ring, and the messages of the socket that hands the ring to readers."""

from __future__ import annotations

from typing import Final, Literal

import msgspec
import numpy as np
from numpy.typing import NDArray

WIRE_VERSION: Final = 1
MAX_MESSAGE_BYTES: Final = 1 << 20
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
FINISHED: Final = 3  # the engine is done with the request: no more rows follow
PHASE_NAMES: Final = ("prefill", "decode", "cached", "finished")

# flags
RECOMPUTED: Final = 1  # published before, and again after a preemption; the newest row counts
# A draft that was rejected on a GPU, where that is known too late to make no row of it. It stands
# for nothing: ring/reader.py leaves it out.
REJECTED: Final = 16
# Three bits of the flags say what was embedded at a position of the prompt: a text token (0), or a
# part of an image, a sound or a video, for which `token_id` is only the placeholder in the prompt.
MEDIA_SHIFT: Final = 1
MEDIA_MASK: Final = 0b111 << MEDIA_SHIFT
TEXT: Final = 0
IMAGE: Final = 1
AUDIO: Final = 2
VIDEO: Final = 3
OTHER_MEDIA: Final = 4
MEDIA_NAMES: Final = ("text", "image", "audio", "video", "other")


def media_of(flags: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """What each row stands for: TEXT, IMAGE, AUDIO, VIDEO or OTHER_MEDIA."""
    found: NDArray[np.uint8] = np.minimum((flags & MEDIA_MASK) >> MEDIA_SHIFT, OTHER_MEDIA)
    return found


def media_name(flags: int) -> str | None:
    """What one row stands for; None for text."""
    kind = min((flags & MEDIA_MASK) >> MEDIA_SHIFT, OTHER_MEDIA)
    return MEDIA_NAMES[kind] if kind else None


class ProbeInfo(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What a reader needs to know of one column of scores."""

    name: str
    point: str
    activation: Activation = "none"
    threshold: float | None = None
    calibration: tuple[float, float] | None = None  # low and high end of the usual scores
    digest: str = ""  # content hash of the probe


class Bank(msgspec.Struct, frozen=True, tag="bank", forbid_unknown_fields=True, omit_defaults=True):
    """The columns of every record with this bank `version`, in order.

    New weights make a new version too, so that a record names its weights at no cost.
    """

    version: int
    probes: tuple[ProbeInfo, ...]
    weights: int | None = None  # version of the model's weights; None: they never change here


class AskBank(msgspec.Struct, frozen=True, tag="ask_bank", forbid_unknown_fields=True):
    """Reader to engine: which columns did bank `version` have?"""

    version: int


class Welcome(
    msgspec.Struct, frozen=True, tag="welcome", forbid_unknown_fields=True, omit_defaults=True
):
    """Engine to reader, first message; the descriptor of a ring in host memory comes with it."""

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
    handle: bytes = b""  # of a ring in device memory
    gpu: str = ""  # UUID of its GPU
    address: int = 0  # on the GPU, for a reader in the engine's process, where CUDA IPC fails
    engine: str = ""  # the same for all cores of an engine that has several; empty: it has one


class Refusal(msgspec.Struct, frozen=True, tag="refusal", forbid_unknown_fields=True):
    """The peer does not do what was asked, and why."""

    code: str
    reason: str


RingMessage = Welcome | Bank | AskBank | Refusal
