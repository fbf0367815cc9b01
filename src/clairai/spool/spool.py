"""The spool: rows of an engine in segments on disk, the oldest of which make room for new ones.

Runs in: the spool process; one thread appends, others ask.
"""

from __future__ import annotations

import os
import secrets
import threading
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from clairai.ring.reader import Record
from clairai.spool.segment import SegmentWriter
from clairai.wire.spool_messages import SegmentRows, SpooledBank, SpoolLosses

SEGMENT_NBYTES: Final = 512 << 20
MIN_SEGMENTS: Final = 8  # that a bound is divided into: how much is dropped at once
MAX_BANKS: Final = 1 << 16
FREE_NBYTES: Final = 1 << 30  # left free on the disk, or a 20th of a smaller one
FREE_PART: Final = 20
DISK_BOUND: Final = "rows took more than {:.3g} GiB on disk; raise disk_gib in scores={{...}}"
LITTLE_SPACE: Final = "{} has little space left; name another folder in scores={{...}}"
NOT_WRITTEN: Final = "rows could not be written to {}: {}"


@dataclass(frozen=True)
class SpoolBounds:
    """Where a spool lies, and how large it may get."""

    folder: Path
    disk_nbytes: int

    @property
    def segment_nbytes(self) -> int:
        return min(SEGMENT_NBYTES, self.disk_nbytes // MIN_SEGMENTS)

    @property
    def free_nbytes(self) -> int:
        """Space that may still be used, by what the disk says now."""
        disk = os.statvfs(self.folder)
        reserve = min(FREE_NBYTES, disk.f_blocks * disk.f_frsize // FREE_PART)
        return disk.f_bavail * disk.f_frsize - reserve


class Spool:
    """Segments in the order of records, and the banks that their rows name."""

    def __init__(self, bounds: SpoolBounds) -> None:
        self._bounds = bounds
        self._segments: deque[SegmentWriter] = deque()
        # A spool that is started again must not use a number twice: readers keep mappings.
        self._next_number = secrets.randbits(48)
        self._banks: dict[int, SpooledBank] = {}
        self._num_lost = self._num_dropped = 0
        self._reason = ""
        self._lock = threading.Lock()

    def add_bank(self, bank: SpooledBank) -> None:
        """Before the first row that names it."""
        with self._lock:
            last = next(reversed(self._banks.values()), bank)
            if last.names == bank.names:  # a trainer's banks differ in their directions alone
                bank = SpooledBank(bank.version, last.names, bank.weights)
            self._banks[bank.version] = bank
            while len(self._banks) > MAX_BANKS:
                self._banks.pop(next(iter(self._banks)))

    def bank(self, version: int) -> SpooledBank | None:
        with self._lock:
            return self._banks.get(version)

    def append(self, records: Sequence[Record]) -> None:
        """Write records; rows that the disk does not take are counted, and others go on."""
        begin = 0
        while begin < len(records):
            end = self._append_some(records, begin)
            begin = max(end, begin + 1)

    def lose(self, num_rows: int, reason: str) -> None:
        with self._lock:
            self._num_lost += num_rows
            self._reason = reason

    def losses(self, lost_records: int) -> SpoolLosses:
        with self._lock:
            return SpoolLosses(lost_records, self._num_lost, self._num_dropped, self._reason)

    def rows_since(self, seq: int) -> tuple[SegmentRows, ...]:
        """The rows of records from `seq` on, oldest first."""
        with self._lock:
            found = [segment for segment in self._segments if segment.end > seq]
            return tuple(segment.rows_since(seq) for segment in found)

    def open_segment(self, number: int) -> int | None:
        """A descriptor to read it with; None if it was dropped."""
        with self._lock:
            found = [one for one in self._segments if one.number == number]
            return found[0].open_for_reading() if found else None

    def close(self) -> None:
        with self._lock:
            while self._segments:
                self._segments.popleft().close()

    def _append_some(self, records: Sequence[Record], begin: int) -> int:
        """Write what fits into one segment; the index of the first record that is left."""
        num_columns = records[begin].scores_RC.shape[1]
        end, num_rows = begin, 0
        try:
            segment = self._find_room(num_columns, len(records[begin].rows))
            while end < len(records) and records[end].scores_RC.shape[1] == num_columns:
                num_rows += len(records[end].rows)
                if num_rows > segment.room:
                    break
                end += 1
            self._write(segment, records[begin:end])
        except OSError as error:
            end = max(end, begin + 1)
            lost = sum(len(record.rows) for record in records[begin:end])
            self.lose(lost, NOT_WRITTEN.format(self._bounds.folder, error.strerror))
        return end

    def _write(self, segment: SegmentWriter, records: Sequence[Record]) -> None:
        """On a disk that is full, the oldest segments go first."""
        while True:
            try:
                # Not under the lock: who asks must not wait for the disk.
                return segment.append(records)
            except OSError:
                if len(self._segments) < 2:
                    raise
                self._drop_oldest(LITTLE_SPACE.format(self._bounds.folder))

    def _find_room(self, num_columns: int, num_rows: int) -> SegmentWriter:
        last = self._segments[-1] if self._segments else None
        if last is not None and last.num_columns == num_columns and last.room >= num_rows:
            return last
        self._make_room()
        segment = SegmentWriter(
            self._bounds.folder,
            number=self._next_number,
            num_columns=num_columns,
            nbytes=self._bounds.segment_nbytes,
            min_rows=num_rows,
        )
        with self._lock:
            self._next_number += 1
            self._segments.append(segment)
        return segment

    def _make_room(self) -> None:
        """Drop the oldest segments until another one fits within the bounds."""
        needed, bounds = self._bounds.segment_nbytes, self._bounds
        while self._segments and self._nbytes + needed > bounds.disk_nbytes:
            self._drop_oldest(DISK_BOUND.format(bounds.disk_nbytes / (1 << 30)))
        # By what they hold: space comes back only when nobody has them mapped any more.
        missing = needed - bounds.free_nbytes
        while self._segments and missing > 0:
            missing -= self._segments[0].nbytes
            self._drop_oldest(LITTLE_SPACE.format(bounds.folder))

    @property
    def _nbytes(self) -> int:
        return sum(segment.nbytes for segment in self._segments)

    def _drop_oldest(self, reason: str) -> None:
        with self._lock:
            dropped = self._segments.popleft()
            self._num_dropped += dropped.num_rows
            self._reason = reason
            dropped.close()
