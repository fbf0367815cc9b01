"""Takes one step's rows and the scores on the GPU; has the GPU publish them, and waits for nothing.

T = tokens in this step, R = requests in this step.

The host writes down whose rows they are in a brief: pinned memory that the kernel reads in place.
The kernel runs on a stream of its own, behind the forward and beside the sampler.
"""

from __future__ import annotations

import struct
import time
from collections.abc import Iterator
from typing import Any, Final, Protocol

import numpy as np
import torch

from clairai.errors import EngineGoneError
from clairai.ring.cuda import Gpu
from clairai.ring.layout import RingHeader, RingShape, epoch_low
from clairai.tap import commit_kernel as kernel
from clairai.tap.launch import Driver, Kernel, by_name
from clairai.tap.outlet import Inputs, Step
from clairai.tap.rows import Roster, StepRows
from clairai.tap.score_kernel import StashScorer
from clairai.tap.tables import Tables

NUM_BRIEFS: Final = 8
MAX_EVENTS: Final = 512
MAX_PROGRAMS: Final = 32  # for one record
STUCK_S: Final = 60.0
HEAD: Final = struct.Struct("<11q")  # words 0 to 10 of a brief


class Brief:
    """What the kernel is told of one step: see the top of commit_kernel.py."""

    def __init__(self, max_requests: int, max_tokens: int) -> None:
        plan = kernel.BRIEF_HEAD + kernel.PLAN_FIELDS * max_requests
        events = kernel.ROW_WORDS * MAX_EVENTS // 2
        num_words = plan + events + (max_tokens + 1) // 2
        is_pinned = torch.cuda.is_available()
        self.memory = torch.zeros(num_words, dtype=torch.int64, pin_memory=is_pinned)
        self.address = self.memory.data_ptr()
        words = self.memory.numpy()
        self._head = words[: kernel.BRIEF_HEAD]
        self._plan_FR = words[kernel.BRIEF_HEAD : plan].reshape(kernel.PLAN_FIELDS, max_requests)
        self._events = words[plan : plan + events].view(np.uint8)
        self._request_T = words[plan + events :].view(np.int32)
        self._rows: StepRows | None = None  # what is written here already
        self._roster: Roster | None = None  # whose plan is
        self._counts = b""  # whose request_T is
        self._number = 0
        self.num_tokens = 0

    def is_free(self) -> bool:
        # Pairs with the last store of _publish() in commit_kernel.py.
        return bool(self._head[kernel.DONE_WORD] == self._number)

    def write(self, rows: StepRows, head: tuple[int, ...]) -> None:
        """`head` is words 1 to 6 and 9: see the top of commit_kernel.py."""
        if rows is not self._rows:  # steps that are all alike share theirs
            self._write_rows(rows)
        *sizes, self._number = head
        now_ns = time.monotonic_ns()
        numbers = (len(rows.events), *sizes, len(rows.counts_R), now_ns, self._number, rows.is_cut)
        HEAD.pack_into(self._head, 0, *numbers)

    def _write_rows(self, rows: StepRows) -> None:
        self._rows, self.num_tokens = rows, rows.num_tokens
        self._write_roster(rows.roster)
        self._plan_FR[3, : len(rows.counts_R)] = rows.seen_R
        counts = rows.counts_R.tobytes()
        if counts != self._counts:
            self._request_T[: rows.num_tokens] = rows.request_T
            self._counts = counts
        if len(rows.events):
            self._events[: rows.events.nbytes] = rows.events.view(np.uint8)

    def _write_roster(self, roster: Roster) -> None:
        if roster is self._roster:
            return
        plan_FR = self._plan_FR[:, : len(roster.streams_R)]
        plan_FR[0] = roster.streams_R.view(np.int64)
        plan_FR[1], plan_FR[2] = roster.choices_R, roster.prompts_R
        self._roster = roster


class Launch(Protocol):
    """How the kernel gets to run; on a GPU, `GpuLaunch`."""

    def prepare(self, brief: Brief, inputs: Inputs) -> None:
        """Whatever the first launch would otherwise make a request wait for."""

    def begin(self) -> None: ...

    def __call__(self, brief: Brief, inputs: Inputs, grids: Iterator[tuple[int, int]]) -> None:
        """One launch for each grid; its number is the kernel's `part`."""

    def follow(self, stream: int) -> None:
        """Have this stream wait for the last launch."""

    def flush(self) -> None: ...


class DeviceOutlet:
    """The one writer of a ring that the device itself writes."""

    def __init__(
        self, launch: Launch, header: RingHeader, tables: Tables, max_requests: int
    ) -> None:
        self._launch, self._shape, self._tables = launch, header.shape, tables
        self._epoch_low = epoch_low(header.epoch)
        self._briefs = [Brief(max_requests, tables.max_tokens) for _ in range(NUM_BRIEFS)]
        self._sent = 0
        self.published = 0

    def prepare(self, inputs: Inputs) -> None:
        self._launch.prepare(self._briefs[0], inputs)

    def begin(self) -> None:
        self._launch.begin()

    def send(self, step: Step) -> None:
        for rows in step.rows.cut_events(MAX_EVENTS):
            self._send(step, rows)

    def _send(self, step: Step, rows: StepRows) -> None:
        num_rows = len(rows.events) + rows.num_tokens
        num_columns = self._tables.num_columns
        per_record = self._shape.rows_per_record(num_columns)
        num_records = -(-num_rows // per_record)
        brief = self._next_brief()
        bank = self._epoch_low | step.bank_version << 32
        sizes = (num_rows, self.published, step.number, bank, num_columns, per_record)
        brief.write(rows, (*sizes, self._sent))
        num_scores = min(num_rows, per_record) * num_columns
        num_programs = min(max(-(-num_scores // kernel.TILE_E), 1), MAX_PROGRAMS)
        self._launch(brief, step.inputs, self._grids(num_records, num_programs))
        self.published += num_records

    def _next_brief(self) -> Brief:
        brief = self._briefs[self._sent % NUM_BRIEFS]
        self._sent += 1
        if not brief.is_free():
            _wait_for(brief)  # only if the GPU is eight steps behind
        return brief

    def _grids(self, num_records: int, num_programs: int) -> Iterator[tuple[int, int]]:
        ahead = self._shape.ahead
        for first in range(0, num_records, ahead):
            yield min(ahead, num_records - first), num_programs

    def follow(self, stream: int) -> None:
        self._launch.follow(stream)

    def flush(self) -> None:
        self._launch.flush()

    def close(self) -> None:
        self._launch.flush()


def _wait_for(brief: Brief) -> None:
    deadline_s = time.monotonic() + STUCK_S
    while not brief.is_free():
        if time.monotonic() > deadline_s:
            raise EngineGoneError(
                f"the GPU has not published a step for {STUCK_S:.0f} s; see the engine's log"
            )


class GpuLaunch:
    """Runs the kernel on a stream of its own, between this step's forward and the next one's.

    On the way of every step: so the kernels are compiled beforehand, their arguments laid out once,
    and launched by calls that keep Python's lock (launch.py).
    """

    def __init__(self, ring: int, shape: RingShape, tables: Tables, max_requests: int) -> None:
        """`ring` is the address of the ring as the GPU sees it."""
        gpu = Gpu(tables.device.index or 0)
        self._driver = Driver()
        self._stream = torch.cuda.Stream(tables.device)
        self._side, self._device = self._stream.cuda_stream, self._stream.device_index
        self._forward_done, self._committed = int(gpu.event()), int(gpu.event())
        ticket = torch.zeros(1, dtype=torch.int32, device=tables.device)
        self._held = (tables.scores_STK, tables.offset_C, ticket)  # their addresses are given
        self._ring, self._shape = ring, shape
        self._constants = constants(shape, max_requests)
        self._score = StashScorer(tables)

    def begin(self) -> None:
        # The scores, positions and token ids of the last step are read until here.
        self._driver.wait(self._main(), self._committed)

    def __call__(self, brief: Brief, inputs: Inputs, grids: Iterator[tuple[int, int]]) -> None:
        self._driver.record(self._forward_done, self._main())
        self._driver.wait(self._side, self._forward_done)
        if self._score.is_due(brief.num_tokens):
            self._score(brief.num_tokens, self._side)
        cells = self._commit.cells
        cells["brief_ptr"].value = brief.address
        cells["positions_ptr"].value = inputs.positions_T.data_ptr()
        cells["token_ids_ptr"].value = inputs.token_ids_T.data_ptr()
        for part, grid in enumerate(grids):
            cells["part"].value = part
            self._commit((*grid, 1), self._side)
        self._driver.record(self._committed, self._side)

    def follow(self, stream: int) -> None:
        self._driver.wait(stream, self._committed)

    def flush(self) -> None:
        self._stream.synchronize()

    def _main(self) -> int:
        """The stream that vLLM runs the model on, in this thread."""
        return int(torch._C._cuda_getCurrentRawStream(self._device))

    def prepare(self, brief: Brief, inputs: Inputs) -> None:
        """Compile the kernel for inputs of these types."""
        scores_STK, offset_C, ticket = self._held
        sizes = (self._shape.slots, self._shape.slot_bytes, scores_STK.shape[2], 0)
        read = (scores_STK, offset_C, inputs.positions_T, inputs.token_ids_T, ticket)
        given = (Address(self._ring), brief.memory, *read, *sizes)
        compiled = kernel.commit.warmup(*given, **self._constants, grid=(1,))
        self._commit = Kernel(self._driver, compiled, by_name(kernel.commit, given))
        if self._score.max_tokens:
            self._score.prepare(self._driver)


class Address:
    """A pointer that torch does not own, in the form Triton takes."""

    dtype: Final = torch.int64

    def __init__(self, address: int) -> None:
        self._address = address

    def data_ptr(self) -> int:
        return self._address


def constants(shape: RingShape, max_requests: int) -> dict[str, Any]:
    """What is compiled into the kernel."""
    return {
        "MAX_R": max_requests,
        "MAX_E": MAX_EVENTS,
        "TILE_E": kernel.TILE_E,
        "TILE_W": kernel.TILE_W,
        "AHEAD": shape.ahead,
        "CLOCK": False,
        "IS_GPU": True,
    }
