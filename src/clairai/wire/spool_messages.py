"""The rows of a spool's files, and the messages of the socket that hands the files out."""

from __future__ import annotations

from typing import Final

import msgspec
import numpy as np

from clairai.wire.ring_messages import ROW, AskBank, Refusal

SOCKET_KIND: Final = "spool"
DROPPED: Final = "dropped"  # code of a Refusal: the segment made room for newer rows

# One row of a segment's index: a row of the ring, and the version of the bank that scored it.
SPOOLED_ROW: Final = np.dtype(
    {
        "names": ["row", "bank"],
        "formats": [ROW, "<u4"],
        "offsets": [0, ROW.itemsize],
        "itemsize": 32,
    }
)


class AskRows(msgspec.Struct, frozen=True, tag="ask_rows", forbid_unknown_fields=True):
    """Where are the rows of the records from `since` to before `until`?"""

    since: int
    until: int


class SegmentRows(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Rows of one segment: those from `first_row` to before `num_rows` were asked for."""

    number: int
    capacity: int  # rows that its file has room for
    num_columns: int
    first_row: int
    num_rows: int


class SpoolLosses(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What a spool does not have of all that was published since the engine started."""

    records: int = 0  # that the ring overwrote before the spool read them
    rows: int = 0  # that could not be written
    dropped: int = 0  # rows that made room for newer ones
    reason: str = ""  # of the last loss


class SpooledRows(msgspec.Struct, frozen=True, tag="spooled_rows", forbid_unknown_fields=True):
    """Answer to AskRows; `reached` is the record that the spool has come to."""

    segments: tuple[SegmentRows, ...]
    reached: int
    losses: SpoolLosses


class OpenSegment(msgspec.Struct, frozen=True, tag="open_segment", forbid_unknown_fields=True):
    """Hand out the file of this segment; a Refusal if it was dropped."""

    number: int


class SegmentFile(msgspec.Struct, frozen=True, tag="segment_file", forbid_unknown_fields=True):
    """Answer to OpenSegment; the descriptor of the file comes with it, for reading."""

    number: int


class SpooledBank(msgspec.Struct, frozen=True, tag="spooled_bank", forbid_unknown_fields=True):
    """Answer to AskBank: the columns of the rows that this version of the bank scored."""

    version: int
    names: tuple[str, ...]
    weights: int | None = None


SpoolQuestion = AskRows | OpenSegment | AskBank
SpoolAnswer = SpooledRows | SegmentFile | SpooledBank | Refusal
