"""The writer of a ring in host memory: publishes the rows and scores of a step, never waits.

Runs in: the worker. R = rows of this step, C = columns (probes) of the bank
"""

from __future__ import annotations

import secrets
import time
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from clairai.errors import RingError
from clairai.local.shared_words import open_words
from clairai.ring.layout import (
    CONTINUED,
    HEAD_OFFSET,
    PAYLOAD_OFFSET,
    SLOT_HEADER,
    TRAILER_BYTES,
    WORD_BYTES,
    RingHeader,
    RingShape,
    epoch_low,
)
from clairai.ring.memory import HostMemory
from clairai.wire.ring_messages import ROW

_HEAD_WORD: Final = HEAD_OFFSET // WORD_BYTES
_MAX_U32: Final = (1 << 32) - 1


@dataclass(frozen=True)
class WriterStatistics:
    """What the writer has published so far."""

    published: int
    slots: int
    slot_bytes: int


def new_epoch() -> int:
    """A random id of one writer's lifetime."""
    return secrets.randbits(64)


class RingWriter:
    """The only writer of a ring; not for two threads at once."""

    def __init__(self, memory: HostMemory, shape: RingShape, epoch: int) -> None:
        if memory.nbytes != shape.nbytes:
            raise RingError(
                f"memory has {memory.nbytes} bytes, shape needs {shape.nbytes}; create it that size"
            )
        self._shape = shape
        self._epoch_low = epoch_low(epoch)
        self._head = 0
        self._bytes = memory.buffer
        self._words = open_words(self._bytes)
        header = RingHeader(epoch, shape).pack()
        self._bytes[: len(header)] = header

    def publish(
        self,
        rows: NDArray[np.void],
        scores_RC: NDArray[np.float32],
        *,
        bank_version: int,
        step: int,
    ) -> int:
        """Publish one step; return its number of records, 0 for no rows."""
        num_rows = len(rows)
        per_record = self._rows_per_record(rows, scores_RC, bank_version)
        for begin in range(0, num_rows, per_record):
            end = begin + per_record
            self._write_slot(
                rows[begin:end],
                scores_RC[begin:end],
                bank_version,
                step,
                CONTINUED if end < num_rows else 0,
            )
            self._advance_head()
        return -(-num_rows // per_record)

    def count_records(self, num_rows: int, num_columns: int) -> int:
        """How many records a step of so many rows is."""
        return -(-num_rows // max(1, self._shape.rows_per_record(num_columns)))

    def statistics(self) -> WriterStatistics:
        """Records published since the start, and the ring's shape."""
        return WriterStatistics(self._head, self._shape.slots, self._shape.slot_bytes)

    def _write_slot(
        self,
        rows: NDArray[np.void],
        scores_RC: NDArray[np.float32],
        bank_version: int,
        step: int,
        flags: int,
    ) -> None:
        num_rows, num_columns = scores_RC.shape
        seq, ring = self._head, self._bytes
        slot = self._shape.slot_offset(seq)
        head = (seq, self._epoch_low, bank_version, num_rows, num_columns, step, flags)
        SLOT_HEADER.pack_into(ring, slot, *head, time.monotonic_ns())
        payload = rows.tobytes() + scores_RC.tobytes()
        begin = slot + PAYLOAD_OFFSET
        ring[begin : begin + len(payload)] = payload
        self._words[(slot + self._shape.slot_bytes - TRAILER_BYTES) // WORD_BYTES] = seq

    def _advance_head(self) -> None:
        # One aligned 8-byte store, after those of this slot and before those of the next. It pairs
        # with both loads of head in RingCursor.poll() (reader.py): a reader that sees this head
        # sees all of the slot (first load); one that saw a byte of the next record sees this head
        # (second).
        self._head += 1
        self._words[_HEAD_WORD] = self._head

    def _rows_per_record(
        self, rows: NDArray[np.void], scores_RC: NDArray[np.float32], bank_version: int
    ) -> int:
        if rows.dtype != ROW or scores_RC.dtype != np.float32:
            raise RingError(f"got {rows.dtype} and {scores_RC.dtype}, need wire.ROW and float32")
        if rows.ndim != 1 or scores_RC.ndim != 2 or len(scores_RC) != len(rows):
            raise RingError(f"got {rows.shape} rows, {scores_RC.shape} scores; need [R] and [R, C]")
        if not 0 <= bank_version <= _MAX_U32:
            raise RingError(
                f"bank version is {bank_version}, may be {_MAX_U32}; restart the engine"
            )
        num_columns = scores_RC.shape[1]
        per_record = self._shape.rows_per_record(num_columns)
        if per_record < 1:
            raise RingError(
                f"one row has {num_columns} columns, a slot of {self._shape.slot_bytes} bytes "
                "cannot hold it; build the shape with RingShape.for_budget and that many columns"
            )
        return per_record
