"""Ring records as JSON, one object a line, with null for NaN.

R = rows of a record, C = columns (probes) of its bank
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Final

import msgspec
import numpy as np
from numpy.typing import NDArray

from clairai.match.row_collector import split_rows
from clairai.ring.reader import ReaderStatistics, Record
from clairai.wire import ring_messages
from clairai.wire.ring_messages import media_name

# msgspec writes NaN and infinity as null, so every line is valid JSON.
_ENCODER: Final = msgspec.json.Encoder()
_ROW_FIELDS: Final = ("stream", "position", "token_id", "phase", "choice", "flags")


_MARK_FIELDS: Final = ("stream", "position", "span", "choice", "phase", "flags")


class RowLine(msgspec.Struct, frozen=True, omit_defaults=True):
    """One forwarded token and its scores."""

    stream: int
    position: int
    token_id: int
    phase: str
    scores: dict[str, float]
    choice: int = 0
    recomputed: bool = False
    weights: int | None = None  # version of the model's weights, if the engine takes new ones
    media: str | None = None  # "image", ...: what the token is the placeholder of


class CachedLine(msgspec.Struct, frozen=True, omit_defaults=True, tag_field="event", tag="cached"):
    """`span` prompt tokens from `position` on came from the prefix cache: no scores."""

    stream: int
    position: int
    span: int
    choice: int = 0
    media: str | None = None


class FinishedLine(
    msgspec.Struct, frozen=True, omit_defaults=True, tag_field="event", tag="finished"
):
    """No more rows will follow."""

    stream: int
    choice: int = 0


class LostLine(msgspec.Struct, frozen=True, tag_field="event", tag="lost"):
    """Records that were overwritten before they were read; each has rows of one step."""

    records: int


class AttachedLine(msgspec.Struct, frozen=True, tag_field="event", tag="attached"):
    """From here on rows are from this engine."""

    epoch: str
    model: str
    vllm: str
    pid: int

    @classmethod
    def from_welcome(cls, welcome: ring_messages.Welcome) -> AttachedLine:
        return cls(f"{welcome.epoch:016x}", welcome.model, welcome.vllm, welcome.pid)


class DetachedLine(msgspec.Struct, frozen=True, tag_field="event", tag="detached"):
    """The end of an engine; each of its records is counted as delivered or lost."""

    delivered: int
    lost: int
    torn: int
    reason: str

    @classmethod
    def from_statistics(cls, statistics: ReaderStatistics, reason: str) -> DetachedLine:
        return cls(statistics.delivered, statistics.lost, statistics.torn, reason)


JsonLine = RowLine | CachedLine | FinishedLine | LostLine | AttachedLine | DetachedLine


def encode_lines(lines: Iterable[JsonLine]) -> bytes:
    return _ENCODER.encode_lines(lines)


def record_lines(record: Record, bank: ring_messages.Bank, *, with_events: bool) -> list[JsonLine]:
    """The lines of a record, in the order of its rows; marks only `with_events`."""
    rows, scores_RC = record.rows, record.scores_RC
    if not with_events:
        is_token = rows["phase"] <= ring_messages.DECODE
        return [*_token_lines(rows[is_token], scores_RC[is_token], bank)]
    found: list[JsonLine] = []
    for span in split_rows(rows):
        part = slice(span.begin, span.end)
        if span.is_marks:
            found += _mark_lines(rows[part])
        else:
            found += _token_lines(rows[part], scores_RC[part], bank)
    return found


def _token_lines(
    rows: NDArray[np.void], scores_RC: NDArray[np.float32], bank: ring_messages.Bank
) -> Iterator[RowLine]:
    names = tuple(probe.name for probe in bank.probes)
    columns = [rows[name].tolist() for name in _ROW_FIELDS]
    for row, scores in zip(zip(*columns, strict=True), scores_RC.tolist(), strict=True):
        stream, position, token_id, phase, choice, flags = row
        scored = dict(zip(names, scores, strict=True))
        rest = (choice, bool(flags & ring_messages.RECOMPUTED), bank.weights, media_name(flags))
        yield RowLine(stream, position, token_id, ring_messages.PHASE_NAMES[phase], scored, *rest)


def _mark_lines(rows: NDArray[np.void]) -> Iterator[JsonLine]:
    columns = [rows[name].tolist() for name in _MARK_FIELDS]
    for stream, position, span, choice, phase, flags in zip(*columns, strict=True):
        if phase == ring_messages.CACHED:
            yield CachedLine(stream, position, span, choice, media_name(flags))
        else:
            yield FinishedLine(stream, choice)
