"""The byte offset of every field of a ring; no other module defines one.

    0      magic u64, layout version u32, ahead u32, epoch u64, slots u64, slot bytes u64
    128    head u64: records published so far; alone on its line
    4096   slot 0, slot 1, ...                      record `seq` lies in slot `seq % slots`

    slot:  seq u64, epoch low half u32, bank version u32, num rows u32, num columns u32,
           step u64, flags u32, pad u32, stamp u64, pad to 64;
           rows (wire.ROW); scores f32 [num rows, num columns]; ...;
           a second copy of seq in the last 8 bytes

All numbers are little-endian. The header is written once, before any reader can attach. `ahead` is
the number of records that may be in writing beyond head; `stamp` is when the host published the
record or launched the GPU work that does, in nanoseconds of the host's monotonic clock.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from typing import Final

from clairai.errors import RingError
from clairai.wire.ring_messages import ROW

MAGIC: Final = int.from_bytes(b"clairing", "little")
LAYOUT_VERSION: Final = 2
HEADER: Final = struct.Struct("<QIIQQQ")
HEAD_OFFSET: Final = 128
SLOTS_OFFSET: Final = 4096

# From the start of a slot.
SEQ_OFFSET: Final = 0
EPOCH_OFFSET: Final = 8
BANK_VERSION_OFFSET: Final = 12
NUM_ROWS_OFFSET: Final = 16
NUM_COLUMNS_OFFSET: Final = 20
STEP_OFFSET: Final = 24
FLAGS_OFFSET: Final = 32
STAMP_OFFSET: Final = 40
PAYLOAD_OFFSET: Final = 64
SLOT_HEADER: Final = struct.Struct("<QIIIIQI4xQ")  # the eight fields above
TRAILER_BYTES: Final = 8

CONTINUED: Final = 1  # flag: the step goes on in the next record
HAS_DRAFTS: Final = 2  # flag: some of the rows may be rejected drafts

WORD_BYTES: Final = 8
SCORE_BYTES: Final = 4
PAGE_BYTES: Final = 4096
MIN_BUDGET_SLOTS: Final = 8
MIN_BUDGET_ROWS: Final = 16
MAX_RING_BYTES: Final = 1 << 48


@dataclass(frozen=True)
class RingShape:
    """The number and size of slots, and how many of them may be in writing."""

    slots: int
    slot_bytes: int
    ahead: int = 1

    def __post_init__(self) -> None:
        if not 1 <= self.ahead < self.slots:
            raise RingError(
                f"ring has {self.slots} slots, a writer {self.ahead} ahead needs more than that; "
                f"give it more memory"
            )
        if self.slot_bytes < PAGE_BYTES or self.slot_bytes % PAGE_BYTES:
            raise RingError(
                f"slot has {self.slot_bytes} bytes, must be a multiple of {PAGE_BYTES}; round it up"
            )
        if self.nbytes > MAX_RING_BYTES:
            raise RingError(
                f"ring has {self.nbytes} bytes, may have {MAX_RING_BYTES}; use fewer slots"
            )

    @classmethod
    def for_budget(cls, nbytes: int, num_columns: int, ahead: int = 1) -> RingShape:
        """As many slots as fit `nbytes`, each for at least 16 rows of `num_columns`."""
        slot_bytes = _slot_bytes(MIN_BUDGET_ROWS, num_columns)
        slots = (nbytes - SLOTS_OFFSET) // slot_bytes
        fewest = max(MIN_BUDGET_SLOTS, 2 * ahead)
        if slots < fewest:
            needed = SLOTS_OFFSET + fewest * slot_bytes
            raise RingError(
                f"ring has {nbytes} bytes, {num_columns} columns need {needed}; "
                f"raise the ring's size to {needed} or lower the capacity of the bank"
            )
        return cls(slots, slot_bytes, ahead)

    @classmethod
    def for_records(cls, slots: int, num_columns: int) -> RingShape:
        """So many slots, each for at least 16 rows of `num_columns`."""
        return cls(slots, _slot_bytes(MIN_BUDGET_ROWS, num_columns))

    @property
    def nbytes(self) -> int:
        """Size of the whole ring, header included."""
        return SLOTS_OFFSET + self.slots * self.slot_bytes

    def slot_offset(self, seq: int) -> int:
        """Where record `seq` starts."""
        return SLOTS_OFFSET + seq % self.slots * self.slot_bytes

    def rows_per_record(self, num_columns: int) -> int:
        """How many rows of `num_columns` scores one slot holds."""
        payload_bytes = self.slot_bytes - PAYLOAD_OFFSET - TRAILER_BYTES
        return payload_bytes // row_bytes(num_columns)


@dataclass(frozen=True)
class RingHeader:
    """What the writer stores once, before any reader attaches."""

    epoch: int
    shape: RingShape

    def pack(self) -> bytes:
        """The first bytes of the ring."""
        shape = self.shape
        return HEADER.pack(
            MAGIC, LAYOUT_VERSION, shape.ahead, self.epoch, shape.slots, shape.slot_bytes
        )

    @classmethod
    def unpack(cls, raw: bytes) -> RingHeader:
        """Decode it; RingError if it is not a ring, or of another version."""
        magic, version, ahead, epoch, slots, slot_bytes = HEADER.unpack(raw)
        if magic != MAGIC:
            raise RingError(f"memory starts with {magic:#x}, a ring with {MAGIC:#x}; wrong memory")
        if version != LAYOUT_VERSION:
            raise RingError(
                f"ring has layout {version}, this reader knows {LAYOUT_VERSION}; "
                "run the same clairai in engine and reader"
            )
        return cls(epoch, RingShape(slots, slot_bytes, ahead))


def row_bytes(num_columns: int) -> int:
    """The size of one row with its scores."""
    return ROW.itemsize + SCORE_BYTES * num_columns


def epoch_low(epoch: int) -> int:
    """The half of the epoch that every slot repeats."""
    return epoch & 0xFFFF_FFFF


def _slot_bytes(num_rows: int, num_columns: int) -> int:
    needed = PAYLOAD_OFFSET + num_rows * row_bytes(num_columns) + TRAILER_BYTES
    return -(-needed // PAGE_BYTES) * PAGE_BYTES
