"""Control messages about captures; the worker answers them."""

from __future__ import annotations

from typing import Literal

import msgspec

CaptureStatus = Literal["open", "writing", "kept", "discarded", "failed"]


class CapturePlace(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What one consumer has of an answer."""

    consumer: str
    where: str
    lost: int = 0  # rows that it refused or lost
    state: str = "writing"
    reason: str = ""


class Captured(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What was captured of one answer. A row is one token at one point."""

    stream: int
    choice: int
    state: CaptureStatus  # kept: finished and safe; writing: finished, or on its way
    points: tuple[str, ...]
    encoder: str
    rows: int = 0  # given to the consumers
    dropped: int = 0  # had no room on their way there
    discarded: int = 0  # held for a rule that was not met
    reason: str = ""
    places: tuple[CapturePlace, ...] = ()

    @property
    def id(self) -> str:
        """The stream as the store names it."""
        return f"{self.stream:016x}"

    @property
    def lost(self) -> int:
        """Rows that were wanted and are missing somewhere."""
        return self.dropped + sum(place.lost for place in self.places)


class FindCaptures(msgspec.Struct, frozen=True, tag="find_captures", forbid_unknown_fields=True):
    """What was captured of these? By ids the caller of vLLM knows, or by streams.

    `is_ended` says that the caller has their last token: no row will follow, and what there is
    is made safe. It is not waited for: ask again.
    """

    request_ids: tuple[str, ...] = ()
    streams: tuple[int, ...] = ()
    is_ended: bool = False


class ListCaptures(msgspec.Struct, frozen=True, tag="list_captures", forbid_unknown_fields=True):
    """The newest, newest first."""

    limit: int = 100


class DescribeCapture(
    msgspec.Struct, frozen=True, tag="describe_capture", forbid_unknown_fields=True
):
    """Where do captures go, and how is that doing?"""


CaptureControl = FindCaptures | ListCaptures | DescribeCapture


class Captures(msgspec.Struct, frozen=True, tag="captures", forbid_unknown_fields=True):
    """For each that was asked for, its answers in order; none for one that is not remembered."""

    found: tuple[tuple[Captured, ...], ...]


class CaptureState(msgspec.Struct, frozen=True, tag="capture_state", forbid_unknown_fields=True):
    """Of the whole engine; rows since it started."""

    places: tuple[CapturePlace, ...]
    rows: int
    dropped: int
    discarded: int
    staging_nbytes: int  # of host memory, for rows on their way
    pending_nbytes: int  # of rows that wait for a rule, now
    stash_nbytes: int = 0  # of device memory, for all rows of a step


CaptureReply = Captures | CaptureState
