"""Takes nothing; gives what the host knows of the steps it has sent, for Python and for C.

One truth for both: Python writes steps of any kind, C those that are like the one before.
"""

from __future__ import annotations

import ctypes
import struct
import time
from dataclasses import dataclass
from typing import Final

import numpy as np
import torch

from clairai.engine.publish import publish_kernel as kernel
from clairai.engine.publish.step_rows import BatchRequests, StepRows
from clairai.ring.layout import RingShape

NUM_HEADERS: Final = 8  # as in ledger.h
WORD: Final = ctypes.c_int64
NO_SHAPE: Final = 0


class HeaderSlot(ctypes.Structure):
    """One brief: where its words are, which step of all it is for, and which form it has."""

    words: int
    number: int
    form: int
    _fields_ = (("words", WORD), ("number", WORD), ("form", WORD))


class StepCounters(ctypes.Structure):
    """struct ledger of ledger.h"""

    sent: int
    published: int
    step: int  # the number of the last one that had rows
    form: int  # of the last step, like the four below
    num_records: int
    num_requests: int
    num_tokens: int
    plan_words: int  # of one field of the plan, in every brief
    tokens_at: int  # the word of a brief at which the tokens' requests begin
    sheets: ctypes.Array[HeaderSlot]
    _fields_ = (
        *((name, WORD) for name in ("sent", "published", "step", "form", "num_records")),
        *((name, WORD) for name in ("num_requests", "num_tokens", "plan_words", "tokens_at")),
        ("sheets", HeaderSlot * NUM_HEADERS),
    )

    @property
    def address(self) -> int:
        return ctypes.addressof(self)


# MERGED
# Takes one step's rows; gives the brief that tells the kernel whose they are, in pinned memory.
#
# T = tokens in this step, R = requests in this step. Steps that are all alike share a form: of
# it,
# only four words of a brief differ.


MAX_EVENTS: Final = 512
MAX_PROGRAMS: Final = 32  # for one record
# Words of a brief's head that differ from step to step, and the one that the GPU writes.
TWO_WORDS: Final = struct.Struct("<2q")
ONE_WORD: Final = struct.Struct("<q")


Grids = tuple[tuple[int, int], ...]  # of each launch: records, programs for each


@dataclass(frozen=True, eq=False)
class StepShape:
    """What steps that are all alike tell the kernel. Compare with `is`."""

    number: int  # from one on: the ledger knows forms by it
    rows: StepRows
    bank: int  # epoch low half, bank version
    num_rows: int
    num_columns: int
    per_record: int
    num_records: int
    grids: Grids
    in_graph: bool  # its rows go out at once, and the forward's own graph may publish them

    @classmethod
    def of(
        cls, number: int, rows: StepRows, bank: int, num_columns: int, shape: RingShape
    ) -> StepShape:
        num_rows = len(rows.events) + rows.num_tokens
        per_record = shape.rows_per_record(num_columns)
        num_records = -(-num_rows // per_record)
        num_scores = min(num_rows, per_record) * num_columns
        num_programs = min(max(-(-num_scores // kernel.TILE_E), 1), MAX_PROGRAMS)
        firsts = range(0, num_records, shape.ahead)
        grids = tuple((min(shape.ahead, num_records - at), num_programs) for at in firsts)
        sizes = (num_rows, num_columns, per_record, num_records)
        return cls(number, rows, bank, *sizes, grids, in_graph=len(grids) <= 1 and not rows.is_cut)


class StepHeader:
    """What the kernel is told of one step: see the top of commit_kernel.py."""

    def __init__(self, sheet: HeaderSlot, max_requests: int, max_tokens: int) -> None:
        plan = kernel.HEAD_WORDS + kernel.REQUEST_FIELDS * max_requests
        events = kernel.ROW_WORDS * MAX_EVENTS // 2
        self.tokens_at = plan + events
        num_words = plan + events + (max_tokens + 1) // 2
        is_pinned = torch.cuda.is_available()
        self.memory = torch.zeros(num_words, dtype=torch.int64, pin_memory=is_pinned)
        self.address = sheet.words = self.memory.data_ptr()
        words = self.memory.numpy()
        self._sheet = sheet
        self._head = words[: kernel.HEAD_WORDS]
        self._bytes = memoryview(self._head).cast("B")
        self._plan_FR = words[kernel.HEAD_WORDS : plan].reshape(kernel.REQUEST_FIELDS, max_requests)
        self._events = words[plan : plan + events].view(np.uint8)
        self._request_T = words[plan + events :].view(np.int32)
        self._written = NO_SHAPE  # the form that we wrote here, of which are:
        self._roster: BatchRequests | None = None
        self._counts = b""

    def is_free(self) -> bool:
        return self.done == self._sheet.number

    @property
    def done(self) -> int:
        """The number of the last brief here that was published."""
        # Pairs with the last store of _publish() in commit_kernel.py.
        (done,) = ONE_WORD.unpack_from(self._bytes, 8 * kernel.DONE_WORD)
        return int(done)

    def write(self, form: StepShape, first_seq: int, step: int, number: int) -> None:
        if form.number != self._sheet.form:
            self._write_form(form)
        self._sheet.number = number
        TWO_WORDS.pack_into(self._bytes, 8 * 2, first_seq, step)
        TWO_WORDS.pack_into(self._bytes, 8 * 8, time.monotonic_ns(), number)

    def _write_form(self, form: StepShape) -> None:
        if self._sheet.form != self._written:  # alike.h wrote another one
            self._roster, self._counts = None, b""
        rows, self._sheet.form = form.rows, NO_SHAPE  # until all of it is there
        self._write_roster(rows.roster)
        self._plan_FR[3, : len(rows.counts_R)] = rows.seen_R
        counts = rows.counts_R.tobytes()
        if counts != self._counts:
            self._request_T[: rows.num_tokens] = rows.request_T
            self._counts = counts
        if len(rows.events):
            self._events[: rows.events.nbytes] = rows.events.view(np.uint8)
        self._head[[0, 1, 4, 5]] = len(rows.events), form.num_rows, form.bank, form.num_columns
        self._head[[6, 7]] = form.per_record, len(rows.counts_R)
        self._head[[10, 11]] = rows.is_cut, form.in_graph
        self._sheet.form = self._written = form.number

    def _write_roster(self, roster: BatchRequests) -> None:
        if roster is self._roster:
            return
        plan_FR = self._plan_FR[:, : len(roster.streams_R)]
        plan_FR[0] = roster.streams_R.view(np.int64)
        plan_FR[1], plan_FR[2] = roster.choices_R, roster.prompts_R
        self._roster = roster
