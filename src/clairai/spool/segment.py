"""One segment of a spool: a file with an index of rows, and their scores.

    0                  index: SPOOLED_ROW [capacity]
    next page          scores: f32 [capacity, num columns]

The file has no name: it disappears with the last process that has it open or mapped, however that
process ends. Rows are appended and never changed.
"""

from __future__ import annotations

import mmap
import os
import tempfile
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from clairai.errors import HandshakeError
from clairai.ring.reader import Record
from clairai.wire.spool_messages import SPOOLED_ROW, SegmentRows

SCORE_BYTES: Final = 4
MAX_BUFFERS: Final = 512  # of one write; Linux takes 1024
ROWS_PER_MARK: Final = 1024


def scores_offset(capacity: int) -> int:
    """Where the scores begin."""
    return -(-capacity * SPOOLED_ROW.itemsize // mmap.PAGESIZE) * mmap.PAGESIZE


def segment_nbytes(capacity: int, num_columns: int) -> int:
    return scores_offset(capacity) + capacity * num_columns * SCORE_BYTES


class SegmentWriter:
    """A segment while it is written, and until it is dropped."""

    def __init__(
        self, folder: Path, *, number: int, num_columns: int, nbytes: int, min_rows: int = 1
    ) -> None:
        """Make the file; OSError if the folder cannot hold one."""
        self.number, self.num_columns = number, num_columns
        row_nbytes = SPOOLED_ROW.itemsize + SCORE_BYTES * num_columns
        self.capacity = max(min_rows, nbytes // row_nbytes)
        self.num_rows = 0
        self.end = 0  # the record after the last one
        self._row_nbytes = row_nbytes
        self._marks: list[tuple[int, int]] = []  # (record, its first row), now and then
        self._file = tempfile.TemporaryFile(dir=folder, buffering=0)  # noqa: SIM115  # see close()
        # Its whole length at once: a reader that maps it finds zeros where nothing is written.
        os.ftruncate(self._file.fileno(), segment_nbytes(self.capacity, num_columns))

    @property
    def nbytes(self) -> int:
        """What its rows take on disk."""
        return self.num_rows * self._row_nbytes

    @property
    def room(self) -> int:
        return self.capacity - self.num_rows

    def append(self, records: Sequence[Record]) -> None:
        """Write the rows of records that there is room for; OSError if the disk has none."""
        index = _index(records)
        fd, first = self._file.fileno(), self.num_rows
        at = scores_offset(self.capacity) + first * self.num_columns * SCORE_BYTES
        _write_all(fd, [_bytes_of(record.scores_RC) for record in records], at)
        _write_all(fd, [_bytes_of(index)], first * SPOOLED_ROW.itemsize)
        if not self._marks or first - self._marks[-1][1] >= ROWS_PER_MARK:
            self._marks.append((records[0].seq, first))
        self.num_rows += len(index)
        self.end = records[-1].seq + 1

    def rows_since(self, seq: int) -> SegmentRows:
        """All rows of the records from `seq` on, and maybe a few before."""
        found = bisect_right(self._marks, (seq, self.capacity))
        first_row = self._marks[found - 1][1] if found else 0
        return SegmentRows(self.number, self.capacity, self.num_columns, first_row, self.num_rows)

    def open_for_reading(self) -> int:
        """A descriptor that cannot write."""
        return os.open(f"/proc/self/fd/{self._file.fileno()}", os.O_RDONLY | os.O_CLOEXEC)

    def close(self) -> None:
        self._file.close()


def _index(records: Sequence[Record]) -> NDArray[np.void]:
    index = np.zeros(sum(len(record.rows) for record in records), SPOOLED_ROW)
    index["row"] = np.concatenate([record.rows for record in records])
    versions = [record.bank_version for record in records]
    index["bank"] = np.repeat(versions, [len(record.rows) for record in records])
    return index


def _bytes_of(array: NDArray[Any]) -> memoryview:
    return array.reshape(-1).view(np.uint8).data


def _write_all(fd: int, buffers: Sequence[memoryview], offset: int) -> None:
    for begin in range(0, len(buffers), MAX_BUFFERS):
        some = buffers[begin : begin + MAX_BUFFERS]
        end = offset + sum(map(len, some))
        while offset < end:  # a disk that fills up takes a part
            written = os.pwritev(fd, some, offset)
            some, offset = _rest(some, written), offset + written


def _rest(buffers: Sequence[memoryview], written: int) -> list[memoryview]:
    """What is left to write of them."""
    rest = []
    for buffer in buffers:
        skipped = min(written, len(buffer))
        written -= skipped
        rest.append(buffer[skipped:])
    return rest


def map_segment(fd: int, segment: SegmentRows) -> mmap.mmap:
    """Map a received descriptor read-only, and close it; HandshakeError if it is no such file."""
    nbytes = segment_nbytes(segment.capacity, segment.num_columns)
    try:
        if os.fstat(fd).st_size != nbytes:
            raise HandshakeError(f"segment {segment.number} has another size; not ours")
        return mmap.mmap(fd, nbytes, mmap.MAP_SHARED, mmap.PROT_READ)
    finally:
        os.close(fd)  # the mapping holds one of its own


@dataclass(frozen=True, eq=False)
class SegmentView:
    """A segment as its readers see it. Its arrays, and what is cut from them, keep the mapping."""

    index: NDArray[np.void]  # SPOOLED_ROW [capacity]
    scores_RC: NDArray[np.float32]  # [capacity, num columns]

    @classmethod
    def of(cls, mapping: mmap.mmap, segment: SegmentRows) -> SegmentView:
        shape = (segment.capacity, segment.num_columns)
        return cls(
            np.ndarray((segment.capacity,), SPOOLED_ROW, mapping),
            np.ndarray(shape, np.float32, mapping, offset=scores_offset(segment.capacity)),
        )
