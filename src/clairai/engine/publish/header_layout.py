"""The layout of a step header, in one place for Python, the kernel and C.

Runs in: the worker. A step header is what the host tells the device publisher about one step. It
lies in pinned memory, which the kernel reads in place:

    head        the words of HeaderHead
    requests    a block of `max_requests` words for each of REQUEST_FIELDS
    events      MAX_EVENTS rows as the ring has them
    tokens      for each token the index of its request, int32; what it stands for (an image,
                a sound) is in the byte above MEDIA_BITS, and there the device marks drafts that
                are rejected

Python reads and writes the head by name (step_header.py), the kernel makes constants of the
positions (publish_kernel.py), and C declares its structs with these names (step.c).
"""

from __future__ import annotations

import ctypes
from typing import Final

NUM_HEADERS: Final = 8  # steps that the host may be ahead of the GPU
MAX_EVENTS: Final = 512  # in one header
ROW_WORDS: Final = 6  # a row of the ring in words of 4 bytes
MEDIA_BITS: Final = 24  # of a word of `tokens`: the index of its request
TILE_E: Final = 1024  # scores that one program of the kernel writes
LINE_WORDS: Final = 16  # headers share no cache lines: the host writes one, the GPU another


class HeaderHead(ctypes.Structure):
    """The head of a header; every field is a word of 8 bytes."""

    num_events: int  # rows that stand for no forwarded token; they come first
    num_rows: int  # events and tokens together
    first_seq: int  # sequence number of the step's first record
    step: int
    epoch_and_bank: int  # low half of the ring's epoch; the bank's version in the upper half
    num_columns: int
    rows_per_record: int
    num_requests: int
    stamp_ns: int
    number: int  # of this header: they count from one on, and are published in that order
    record_flags: int  # of the step's records: CONTINUED if it goes on in the next header
    in_graph: int  # the forward's own graph may publish this header
    shape: int  # the host's own: number of the StepShape that is written here
    unused_13: int
    unused_14: int
    done: int  # written by the GPU: number of the last header published from here


class StepCounters(ctypes.Structure):
    """What Python and C both know of the steps so far; every field is a word of 8 bytes.

    Python writes the headers of any step, C those of steps that are like the one before.
    """

    headers: int  # address of the first header
    header_words: int  # from one header to the next
    max_requests: int
    tokens_at: int  # word of a header at which its tokens begin
    sent: int  # headers written
    published: int  # records in them
    limit: int  # so many records may be published: more would overwrite some that the spool needs
    step: int  # number of the last step that had rows
    shape: int  # of the last step, like the three below; 0: none that may be repeated
    num_records: int
    num_requests: int
    num_tokens: int
    is_repeating: int  # C handles steps like the last one
    batch: int  # address of the tuple RepeatedBatch.known


HEADER_FIELDS: Final = tuple(HeaderHead.__annotations__)
COUNTER_FIELDS: Final = tuple(StepCounters.__annotations__)
HeaderHead._fields_ = tuple((name, ctypes.c_int64) for name in HEADER_FIELDS)
StepCounters._fields_ = tuple((name, ctypes.c_int64) for name in COUNTER_FIELDS)
REQUEST_FIELDS: Final = ("stream", "choice", "prompt_len", "seen")


def events_at(max_requests: int) -> int:
    """Word of a header at which its events begin."""
    return len(HEADER_FIELDS) + len(REQUEST_FIELDS) * max_requests


def tokens_at(max_requests: int) -> int:
    """Word of a header at which its tokens begin."""
    return events_at(max_requests) + ROW_WORDS * MAX_EVENTS // 2


def header_words(max_requests: int, max_tokens: int) -> int:
    """Words from one header to the next."""
    num_words = tokens_at(max_requests) + (max_tokens + 1) // 2
    return -(-num_words // LINE_WORDS) * LINE_WORDS


def c_definitions() -> dict[str, str]:
    """Macros that step.c is compiled with."""
    return {
        "HEADER_FIELDS": ", ".join(HEADER_FIELDS),
        "COUNTER_FIELDS": ", ".join(COUNTER_FIELDS),
        "NUM_HEADERS": str(NUM_HEADERS),
        "NUM_REQUEST_FIELDS": str(len(REQUEST_FIELDS)),
    }
