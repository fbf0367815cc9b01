"""Builds records, banks and filled collectors from rows that are plain tuples."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from clairai.match.row_collector import RowCollector, RowsByPosition
from clairai.wire import ring_messages


class Row(NamedTuple):
    """A row of a record, and its scores."""

    stream: int
    position: int
    token_id: int
    scores: tuple[float, ...] = (0.0,)
    phase: int = ring_messages.DECODE
    choice: int = 0
    span: int = 1
    media: int = ring_messages.TEXT


@dataclass(frozen=True)
class TinyRecord:
    seq: int
    rows: NDArray[np.void]
    scores_RC: NDArray[np.float32]


def record(rows: Sequence[Row], num_columns: int = 1) -> TinyRecord:
    made = np.zeros(len(rows), ring_messages.ROW)
    for field in ("stream", "position", "token_id", "span", "choice", "phase"):
        made[field] = [getattr(row, field) for row in rows]
    made["flags"] = [row.media << ring_messages.MEDIA_SHIFT for row in rows]
    scores_RC = np.full((len(rows), num_columns), np.nan, np.float32)
    for index, row in enumerate(rows):
        scores_RC[index] = row.scores
    return TinyRecord(0, made, scores_RC)


def cached(stream: int, position: int, span: int, choice: int = 0) -> Row:
    return Row(stream, position, -1, (np.nan,), ring_messages.CACHED, choice, span)


def finished(stream: int, choice: int = 0) -> Row:
    return Row(stream, 0, -1, (np.nan,), ring_messages.FINISHED, choice, 0)


def bank(*names: str, version: int = 0, weights: int | None = None) -> ring_messages.Bank:
    probes = tuple(ring_messages.ProbeInfo(name, "post_block.0") for name in names)
    return ring_messages.Bank(version, probes, weights)


def fed(*records: list[Row], collector: RowCollector | None = None) -> RowCollector:
    collector = collector or RowCollector()
    for rows in records:
        collector.add(record(rows), bank("a"))
    return collector


def known(collector: RowCollector, stream: int, choice: int = 0) -> RowsByPosition:
    rows = collector.rows(stream, choice)
    assert rows is not None
    return rows
