"""Takes one step's rows and the scores on the GPU; has the GPU publish them, and waits for nothing.

T = tokens in this step, R = requests in this step.

The host writes down whose rows they are in a brief: pinned memory that the kernel reads in place.
The kernel runs on a stream of its own, behind the forward and beside the sampler.
"""

from __future__ import annotations

import time
from functools import partial
from typing import Any, Final, Protocol

import torch

from clairai.errors import EngineGoneError
from clairai.ring.cuda import Gpu
from clairai.ring.layout import RingHeader, RingShape, epoch_low
from clairai.tap import commit_kernel as kernel
from clairai.tap.brief import MAX_EVENTS, Brief, Form, Grids
from clairai.tap.launch import Driver, Kernel, by_name
from clairai.tap.ledger import NUM_BRIEFS, Ledger
from clairai.tap.lineup import Lane, Lineup, launches
from clairai.tap.outlet import Inputs, Step
from clairai.tap.rows import StepRows
from clairai.tap.score_kernel import StashScorer
from clairai.tap.tables import Tables

STUCK_S: Final = 60.0
MAX_LINEUPS: Final = 1024


class Launch(Protocol):
    """How the kernel gets to run; on a GPU, `GpuLaunch`."""

    def prepare(self, brief: Brief, inputs: Inputs) -> None:
        """Whatever the first launch would otherwise make a request wait for."""

    def begin(self) -> None: ...

    def __call__(self, brief: Brief, inputs: Inputs, form: Form) -> None:
        """One launch for each grid of the form; its number is the kernel's `part`."""

    def again(self, ledger: int, step: int) -> bool:
        """The same for the next brief, which is written here; False: nothing was done."""

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
        self._ledger = Ledger()
        self._briefs = [Brief(one, max_requests, tables.max_tokens) for one in self._ledger.sheets]
        self._ledger.plan_words, self._ledger.tokens_at = max_requests, self._briefs[0].tokens_at
        self._form: Form | None = None  # of the last step
        self._num_forms = 0
        self.begin, self.again = launch.begin, partial(launch.again, self._ledger.address)

    @property
    def published(self) -> int:
        return self._ledger.published

    def prepare(self, inputs: Inputs) -> None:
        self._launch.prepare(self._briefs[0], inputs)

    def send(self, step: Step) -> None:
        if len(step.rows.events) <= MAX_EVENTS:
            self._send(step, step.rows)
            return
        for rows in step.rows.cut_events(MAX_EVENTS):
            self._send(step, rows)

    def _send(self, step: Step, rows: StepRows) -> None:
        form, ledger = self._form_of(rows, self._epoch_low | step.bank_version << 32), self._ledger
        brief = self._next_brief()
        brief.write(form, ledger.published, step.number, ledger.sent)
        self._launch(brief, step.inputs, form)
        ledger.published += form.num_records

    def _form_of(self, rows: StepRows, bank: int) -> Form:
        form, num_columns = self._form, self._tables.num_columns
        if form is None or not (
            form.rows is rows and form.bank == bank and form.num_columns == num_columns
        ):
            self._num_forms += 1
            form = self._form = Form.of(self._num_forms, rows, bank, num_columns, self._shape)
            ledger = self._ledger
            ledger.form, ledger.num_records = form.number, form.num_records
            ledger.num_requests, ledger.num_tokens = len(rows.counts_R), rows.num_tokens
        return form

    def _next_brief(self) -> Brief:
        brief = self._briefs[self._ledger.sent % NUM_BRIEFS]
        self._ledger.sent += 1
        if not brief.is_free():
            _wait_for(brief)  # only if the GPU is eight steps behind
        return brief

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
    and all of a step is one call (launch.py).
    """

    def __init__(self, ring: int, shape: RingShape, tables: Tables, max_requests: int) -> None:
        """`ring` is the address of the ring as the GPU sees it."""
        gpu = Gpu(tables.device.index or 0)
        self._driver = Driver()
        self._stream = torch.cuda.Stream(tables.device)
        self._device = self._stream.device_index
        # The stream that vLLM runs the model on, in this thread.
        main = partial(torch._C._cuda_getCurrentRawStream, self._device)
        lane = Lane(main, self._stream.cuda_stream, int(gpu.event()), int(gpu.event()))
        self._launches = launches(self._driver, lane)
        self.again, self.follow = self._launches.again, self._launches.follow
        # The scores, positions and token ids of the last step are read until then.
        self.begin = self._launches.begin
        ticket = torch.zeros(1, dtype=torch.int32, device=tables.device)
        self._held = (tables.scores_STK, tables.offset_C, ticket)  # their addresses are given
        self._ring, self._shape = ring, shape
        self._constants = constants(shape, max_requests)
        self._score = StashScorer(tables)
        self._form: Form | None = None  # whose launches are laid out, and of what:
        self._inputs: Inputs | None = None
        self._is_scored = False

    def __call__(self, brief: Brief, inputs: Inputs, form: Form) -> None:
        is_scored = self._score.is_due(form.rows.num_tokens)
        is_known = form is self._form and inputs is self._inputs
        if not is_known or is_scored is not self._is_scored:
            cells = self._commit.cells
            cells["positions_ptr"].value = inputs.positions_T.data_ptr()
            cells["token_ids_ptr"].value = inputs.token_ids_T.data_ptr()
            self._launches.use(self._lineup(form.grids, form.rows.num_tokens if is_scored else 0))
            self._form, self._inputs, self._is_scored = form, inputs, is_scored
        self._brief.value = brief.address
        self._launches.run()

    def _lineup(self, grids: Grids, num_scored: int) -> Lineup:
        """Laid out once for each kind of step: batches come and go, as large as others were."""
        found = self._lineups.get((grids, num_scored))
        if found is not None:
            return found
        scored = [self._score.launch_for(num_scored)] if num_scored else []
        parts = enumerate(grids)
        committed = [self._commit.launch((*grid, 1), part=part) for part, grid in parts]
        if len(self._lineups) == MAX_LINEUPS:
            self._lineups.clear()
        lineup = self._lineups[grids, num_scored] = Lineup.of([*scored, *committed], self._brief)
        return lineup

    def flush(self) -> None:
        self._stream.synchronize()
        torch.cuda.current_stream(self._device).synchronize()  # where steps that are alike may be

    def prepare(self, brief: Brief, inputs: Inputs) -> None:
        """Compile the kernel for inputs of these types."""
        scores_STK, offset_C, ticket = self._held
        sizes = (self._shape.slots, self._shape.slot_bytes, scores_STK.shape[2], 0)
        read = (scores_STK, offset_C, inputs.positions_T, inputs.token_ids_T, ticket)
        given = (Address(self._ring), brief.memory, *read, *sizes)
        compiled = kernel.commit.warmup(*given, **self._constants, grid=(1,))
        self._commit = Kernel(self._driver, compiled, by_name(kernel.commit, given))
        self._brief, self._form = self._commit.cells["brief_ptr"], None
        self._lineups: dict[tuple[Grids, int], Lineup] = {}
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
