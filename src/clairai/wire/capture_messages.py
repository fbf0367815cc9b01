"""Control messages about captures, answered by the worker."""

from __future__ import annotations

from typing import Final, Literal

import msgspec

# Of a request to the API server: only captures of this owner exist for it.
OWNER_HEADER: Final = "X-Clairai-Owner"
CaptureStatus = Literal["open", "writing", "kept", "discarded", "failed"]


class CapturePlace(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What one consumer has of an answer's rows."""

    consumer: str
    where: str
    lost: int = 0  # rows that it refused or lost
    state: str = "writing"
    reason: str = ""
    since: float = 0.0  # when it came into this state, in seconds since 1970


class Captured(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What was captured of one answer; a row is one token at one point."""

    stream: int
    choice: int
    state: CaptureStatus  # kept: all rows are safe; writing: some are on their way
    points: tuple[str, ...]
    encoder: str
    rows: int = 0  # given to the consumers
    dropped: int = 0  # no room in the staging buffers
    discarded: int = 0  # held for a rule that was not met
    reason: str = ""
    places: tuple[CapturePlace, ...] = ()
    label: str = ""  # the caller's own name for the request
    owner: str = ""  # name of the API key that made it; empty if that is not known
    since: float = 0.0  # when it began, in seconds since 1970: orders those of several engine cores

    @property
    def id(self) -> str:
        """The stream as the store names it."""
        return f"{self.stream:016x}"

    @property
    def lost(self) -> int:
        """Rows that were wanted and are missing somewhere."""
        return self.dropped + sum(place.lost for place in self.places)


class ConsumerStatus(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """How a consumer does. Rows are counted since the engine started."""

    consumer: str
    where: str
    state: str = "writing"  # or dropping, stopped: both end by themselves; or failed
    reason: str = ""
    since: float = 0.0  # when it came into this state, in seconds since 1970
    refused: int = 0  # rows for which its queue had no room, or which it did not take any more
    lost: int = 0  # rows that it took and could not keep
    free_nbytes: int | None = None  # on its disk, less the reserve; None if that is unknown


class FindCaptures(msgspec.Struct, frozen=True, tag="find_captures", forbid_unknown_fields=True):
    """What was captured of these requests? By the ids that vLLM's caller knows, or by streams.

    `is_ended` says that the caller has their last token: no row will follow, and the rows are
    written to disk. The reply does not wait for that: ask again.
    """

    request_ids: tuple[str, ...] = ()
    streams: tuple[int, ...] = ()
    is_ended: bool = False


class ListCaptures(msgspec.Struct, frozen=True, tag="list_captures", forbid_unknown_fields=True):
    """Which captures are the newest? With `owner`, only this one's."""

    limit: int = 100
    owner: str | None = None


class DescribeCapture(
    msgspec.Struct, frozen=True, tag="describe_capture", forbid_unknown_fields=True
):
    """Which consumers are there, and in which state?"""


CaptureControl = FindCaptures | ListCaptures | DescribeCapture


class Captures(msgspec.Struct, frozen=True, tag="captures", forbid_unknown_fields=True):
    """The answers of each request asked for, in order; none for a request that is forgotten."""

    found: tuple[tuple[Captured, ...], ...]


class CaptureState(msgspec.Struct, frozen=True, tag="capture_state", forbid_unknown_fields=True):
    """Of the whole engine; rows are counted since it started."""

    places: tuple[ConsumerStatus, ...]
    rows: int
    dropped: int
    discarded: int
    staging_nbytes: int  # host memory for rows on their way to the consumers
    pending_nbytes: int  # rows that wait for a rule now
    stash_nbytes: int = 0  # device memory for the rows of a step
    dropping_since: float | None = None  # rows were dropped lately: no room in the staging buffers
    failure: str = ""  # why nothing is captured now; empty while rows are taken


CaptureReply = Captures | CaptureState
