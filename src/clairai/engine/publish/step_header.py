"""Step headers in pinned memory: what the host tells the device publisher about each step.

Runs in: the worker. header_layout.py has the layout. Steps that are all alike share a StepShape:
their headers differ in four words only. T = tokens in this step, R = requests in this step.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Final

import numpy as np
import torch

from clairai.engine.publish import header_layout as layout
from clairai.engine.publish.header_layout import NUM_HEADERS, HeaderHead, StepCounters
from clairai.engine.publish.ring_room import NO_LIMIT, FindLimit
from clairai.engine.publish.step_rows import BatchRequests, StepRows
from clairai.errors import EngineGoneError
from clairai.local.shared_words import open_words
from clairai.ring.layout import CONTINUED, HAS_DRAFTS, RingShape

GPU_TIMEOUT_S: Final = 60.0
MAX_PROGRAMS: Final = 32  # for one record
NO_SHAPE: Final = 0
_NUMBER: Final = layout.HEADER_FIELDS.index("number")
_DONE: Final = layout.HEADER_FIELDS.index("done")
Grids = tuple[tuple[int, int], ...]  # of each launch: records, programs for each


@dataclass(frozen=True, eq=False)
class StepShape:
    """All that steps which are alike have in common. Compare with `is`."""

    number: int  # from one on: headers and counters know shapes by it
    rows: StepRows
    epoch_and_bank: int
    num_rows: int
    num_columns: int
    rows_per_record: int
    num_records: int
    grids: Grids
    in_graph: bool  # one launch publishes all of it, so the forward's own graph may do it

    @classmethod
    def of(
        cls, number: int, rows: StepRows, epoch_and_bank: int, num_columns: int, ring: RingShape
    ) -> StepShape:
        num_rows = len(rows.events) + rows.num_tokens
        rows_per_record = ring.rows_per_record(num_columns)
        num_records = -(-num_rows // rows_per_record)
        num_scores = min(num_rows, rows_per_record) * num_columns
        num_programs = min(max(-(-num_scores // layout.TILE_E), 1), MAX_PROGRAMS)
        firsts = range(0, num_records, ring.ahead)
        grids = tuple((min(ring.ahead, num_records - at), num_programs) for at in firsts)
        sizes = (num_rows, num_columns, rows_per_record, num_records)
        in_graph = len(grids) <= 1 and not rows.is_continued
        return cls(number, rows, epoch_and_bank, *sizes, grids, in_graph)


class StepHeader:
    """One header, which is written again and again."""

    def __init__(self, memory: torch.Tensor, max_requests: int, max_tokens: int) -> None:
        self.memory, self.address = memory, memory.data_ptr()
        self.head = HeaderHead.from_address(self.address)
        words = memory.numpy()
        self._words = open_words(words.data)
        events_at, tokens_at = layout.events_at(max_requests), layout.tokens_at(max_requests)
        requests = words[len(layout.HEADER_FIELDS) : events_at]
        self._requests_FR = requests.reshape(len(layout.REQUEST_FIELDS), max_requests)
        self._events = words[events_at:tokens_at].view(np.uint8)
        self._request_T = words[tokens_at:].view(np.int32)[:max_tokens]
        self._written = NO_SHAPE  # the shape that was written from here, with:
        self._requests: BatchRequests | None = None
        self._counts = b""

    @property
    def is_published(self) -> bool:
        # Before the host writes to the header. Pairs with the last store of _publish_records() in
        # publish_kernel.py.
        return bool(self._words[_DONE] == self.head.number)

    def write(self, shape: StepShape, first_seq: int, step: int, number: int) -> None:
        head = self.head
        if shape.number != head.shape:
            self._write_shape(shape)
        head.first_seq, head.step = first_seq, step
        head.stamp_ns = time.monotonic_ns()
        # After all of the header. Pairs with the first load of publish_in_graph() in
        # publish_kernel.py, which the launch that follows orders as well.
        self._words[_NUMBER] = number

    def _write_shape(self, shape: StepShape) -> None:
        head, rows = self.head, shape.rows
        if head.shape != self._written:  # step.c has written another one
            self._requests, self._counts = None, b""
        head.shape = NO_SHAPE  # until all of it is there
        self._write_requests(rows.requests)
        self._requests_FR[3, : len(rows.counts_R)] = rows.seen_R
        self._write_tokens(rows)
        if len(rows.events):
            self._events[: rows.events.nbytes] = rows.events.view(np.uint8)
        head.num_events, head.num_rows = len(rows.events), shape.num_rows
        head.epoch_and_bank, head.num_columns = shape.epoch_and_bank, shape.num_columns
        head.rows_per_record, head.num_requests = shape.rows_per_record, len(rows.counts_R)
        head.record_flags = rows.is_continued * CONTINUED | rows.has_drafts * HAS_DRAFTS
        head.in_graph = shape.in_graph
        head.shape = self._written = shape.number

    def _write_tokens(self, rows: StepRows) -> None:
        counts = rows.counts_R.tobytes()
        if rows.media_T is not None:
            media_T = rows.media_T.astype(np.int32) << layout.MEDIA_BITS
            self._request_T[: rows.num_tokens] = rows.request_T | media_T
            self._counts = b""
        elif counts != self._counts:
            self._request_T[: rows.num_tokens] = rows.request_T
            self._counts = counts
        if rows.has_drafts:  # the device will mark some
            self._counts = b""

    def _write_requests(self, requests: BatchRequests) -> None:
        if requests is self._requests:
            return
        fields_FR = self._requests_FR[:, : len(requests.streams_R)]
        fields_FR[0] = requests.streams_R.view(np.int64)
        fields_FR[1], fields_FR[2] = requests.choices_R, requests.prompts_R
        self._requests = requests


class StepHeaders:
    """The headers, written in turn, and the counters of what was written."""

    def __init__(self, max_requests: int, max_tokens: int) -> None:
        size = (NUM_HEADERS, layout.header_words(max_requests, max_tokens))
        is_pinned = torch.cuda.is_available()
        self.memory = torch.zeros(size, dtype=torch.int64, pin_memory=is_pinned)
        self.all = [StepHeader(words, max_requests, max_tokens) for words in self.memory]
        self.counters = StepCounters(
            headers=self.memory.data_ptr(),
            header_words=size[1],
            max_requests=max_requests,
            tokens_at=layout.tokens_at(max_requests),
            limit=NO_LIMIT,
        )
        self._find_limit: FindLimit | None = None

    def set_limit(self, find_limit: FindLimit) -> None:
        """Ask for the limit whenever the next step would pass it."""
        self._find_limit, self.counters.limit = find_limit, 0

    def last(self, back: int = 0) -> StepHeader:
        """The header that was written last, or so many before it."""
        return self.all[(self.counters.sent - 1 - back) % NUM_HEADERS]

    def set_shape(self, shape: StepShape | None) -> None:
        """What step.c may repeat: steps of this shape."""
        counters = self.counters
        if shape is None:
            counters.shape = NO_SHAPE
            return
        counters.shape, counters.num_records = shape.number, shape.num_records
        counters.num_requests = len(shape.rows.counts_R)
        counters.num_tokens = shape.rows.num_tokens

    def write(self, shape: StepShape, step: int) -> None:
        counters = self.counters
        header = self.all[counters.sent % NUM_HEADERS]
        if not header.is_published:
            _wait_for(header)  # only if the GPU is NUM_HEADERS steps behind
        if counters.published + shape.num_records > counters.limit:
            assert self._find_limit is not None
            counters.limit = self._find_limit(counters.published, shape.num_records)
        header.write(shape, counters.published, step, counters.sent + 1)
        counters.sent += 1  # after the header: one that could not be written does not count
        counters.published += shape.num_records

    def withdraw(self) -> None:
        """Take back the last header, which will not be published."""
        head = self.last().head
        head.number = head.done
        self.counters.sent -= 1


def _wait_for(header: StepHeader) -> None:
    deadline_s = time.monotonic() + GPU_TIMEOUT_S
    while not header.is_published:
        if time.monotonic() > deadline_s:
            raise EngineGoneError(
                f"the GPU has not published a step for {GPU_TIMEOUT_S:.0f} s; see the engine's log"
            )
