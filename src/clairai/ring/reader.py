"""A reader's cursor in a ring: private copies of records, and an exact count of those it missed.

R = rows of a record, C = columns (probes) of its bank
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Literal

import numpy as np
from numpy.typing import NDArray

from clairai.errors import RingError
from clairai.ring.layout import (
    CONTINUED,
    HAS_DRAFTS,
    HEAD_OFFSET,
    HEADER,
    PAYLOAD_OFFSET,
    SLOT_HEADER,
    TRAILER_BYTES,
    RingHeader,
    epoch_low,
    row_bytes,
)
from clairai.ring.memory import RingMemory
from clairai.wire.ring_messages import REJECTED, ROW

POLL_LIMIT: Final = 256

# Where to begin: at the oldest record still there, at the next one, or at this sequence number.
StartAt = Literal["oldest", "newest"] | int


@dataclass(frozen=True, eq=False)
class Record:
    """One published record, as a private read-only copy."""

    seq: int
    step: int
    bank_version: int
    continued: bool
    stamp_ns: int  # time.monotonic_ns() when the host published it or launched the GPU
    rows: NDArray[np.void]
    scores_RC: NDArray[np.float32]


@dataclass(frozen=True)
class ReaderStatistics:
    """Every record from `first` on is delivered, lost, or still unread (`lag`)."""

    first: int
    delivered: int
    lost: int
    torn: int  # of those, slots whose own fields contradict each other
    lag: int


class RingCursor:
    """Reads a ring from one position on; the writer never waits for it."""

    def __init__(self, memory: RingMemory, *, start: StartAt = "oldest") -> None:
        self._memory = memory
        self.header = _read_header(memory)
        self._shape = self.header.shape
        self._first = self._next = self._first_seq(start)
        self._delivered = self._lost = self._torn = 0

    def poll(self, limit: int = POLL_LIMIT) -> list[Record]:
        """Return up to `limit` records published since the last call; never blocks."""
        # Pairs with _advance_head() in writer.py: all of [next, head) is visible after this load.
        head = self._load_head()
        if head < self._next:
            raise RingError(f"head went back from {self._next} to {head}; restart the engine")
        self._lose_until(self._oldest(head))
        begin, end = self._next, min(head, self._next + max(limit, 1))
        slots = self._copy_slots(begin, end)
        # Pairs with _advance_head() too: it comes after the copies above, so if any of them saw a
        # byte of record seq + N, this load sees the head that was published before it: at least
        # seq + N + 1 - ahead.
        self._lose_until(min(self._oldest(self._load_head()), end))
        records = [self._take(seq, slots[seq - begin]) for seq in range(self._next, end)]
        assert self._delivered + self._lost == self._next - self._first
        return [record for record in records if record is not None]

    def statistics(self) -> ReaderStatistics:
        """Counts since the start; `delivered + lost + lag` is all that was published."""
        return ReaderStatistics(self._first, self._delivered, self._lost, self._torn, self.lag())

    def lag(self) -> int:
        """Records published and not read yet."""
        return self._load_head() - self._next

    def _first_seq(self, start: StartAt) -> int:
        head = self._load_head()
        if start == "oldest":
            return max(0, self._oldest(head))
        if start == "newest":
            return head
        if not 0 <= start <= head:
            raise RingError(f"start is record {start}, ring has {head}; start within them")
        return start

    def _oldest(self, head: int) -> int:
        """The oldest record that the writer cannot be overwriting."""
        return head - self._shape.slots + self._shape.ahead

    def _load_head(self) -> int:
        return self._memory.load(HEAD_OFFSET)

    def _lose_until(self, seq: int) -> None:
        if seq > self._next:
            self._lost += seq - self._next
            self._next = seq

    def _copy_slots(self, begin: int, end: int) -> list[memoryview]:
        """Copy the slots of [begin, end): at most two runs, as it is less than one lap."""
        size, slots = self._shape.slot_bytes, self._shape.slots
        wrap = min(end, begin - begin % slots + slots)
        runs = ((begin, wrap), (wrap, end))
        copies = [
            memoryview(self._memory.copy(self._shape.slot_offset(first), (last - first) * size))
            for first, last in runs
            if first < last
        ]
        return [run[at : at + size] for run in copies for at in range(0, len(run), size)]

    def _take(self, seq: int, slot: memoryview) -> Record | None:
        record = _parse_slot(slot, seq, self.header.epoch)
        self._next += 1
        if record is None:
            self._torn += 1
            self._lost += 1
        else:
            self._delivered += 1
        return record


def _parse_slot(slot: memoryview, seq: int, epoch: int) -> Record | None:
    """Decode the private copy of a slot; None if the slot contradicts itself."""
    fields = SLOT_HEADER.unpack_from(slot)
    found, low, bank_version, num_rows, num_columns, step, flags, stamp_ns = fields
    trailer = int.from_bytes(slot[-TRAILER_BYTES:], "little")
    if found != seq or trailer != seq or low != epoch_low(epoch):
        return None
    nbytes = num_rows * row_bytes(num_columns)  # a Python int: cannot overflow
    if not 0 < nbytes <= len(slot) - PAYLOAD_OFFSET - TRAILER_BYTES:
        return None
    payload = bytes(slot[PAYLOAD_OFFSET : PAYLOAD_OFFSET + nbytes])
    rows = np.ndarray((num_rows,), ROW, payload)
    scores_RC = np.ndarray((num_rows, num_columns), np.float32, payload, offset=rows.nbytes)
    if flags & HAS_DRAFTS:
        is_kept_R = (rows["flags"] & REJECTED) == 0
        rows, scores_RC = rows[is_kept_R], scores_RC[is_kept_R]
    return Record(seq, step, bank_version, bool(flags & CONTINUED), stamp_ns, rows, scores_RC)


def _read_header(memory: RingMemory) -> RingHeader:
    if memory.nbytes < HEADER.size:
        raise RingError(f"memory has {memory.nbytes} bytes, a ring's header {HEADER.size}")
    header = RingHeader.unpack(memory.copy(0, HEADER.size))
    if header.shape.nbytes != memory.nbytes:
        raise RingError(
            f"ring says it has {header.shape.nbytes} bytes, its memory {memory.nbytes}; "
            "the writer is broken or not ours, restart the engine"
        )
    return header
