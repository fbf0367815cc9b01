"""Takes one step's rows and the scores on the GPU; has the GPU publish them, and waits for nothing.

T = tokens in this step, R = requests in this step.

The host writes down whose rows they are in a brief: pinned memory that the kernel reads in place.
The kernel runs within the forward's own graph, or on a stream of its own, behind the forward.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Final, Protocol

from clairai.engine.publish.publisher import FinishedStep
from clairai.engine.publish.repeat_path import RepeatPath, make_repeat_path
from clairai.engine.publish.step_header import (
    MAX_EVENTS,
    NO_SHAPE,
    NUM_HEADERS,
    StepCounters,
    StepHeader,
    StepShape,
)
from clairai.engine.publish.step_rows import RepeatedBatch, RowBuilder, StepRows
from clairai.engine.score.score_tables import ScoreTables
from clairai.engine.step import ForwardInputs
from clairai.errors import EngineGoneError
from clairai.ring.layout import RingHeader, epoch_low

GPU_TIMEOUT_S: Final = 60.0
EMPTY_STEP: Final = RowBuilder().idle()


class PublishLauncher(Protocol):
    """How the kernel gets to run; on a GPU, `GpuLaunch`."""

    def prepare(self, step_headers: Sequence[StepHeader], inputs: ForwardInputs) -> None:
        """Whatever the first launch would otherwise make a request wait for."""

    def begin(self) -> None: ...

    def note(self, ledger: int, step: int) -> bool:
        """Write the last brief of this ledger once more; False: it was not."""

    def __call__(
        self, step_header: StepHeader, inputs: ForwardInputs, form: StepShape, ledger: int
    ) -> None:
        """One launch for each grid of the form; its number is the kernel's `part`."""

    def capture(self, num_tokens: int) -> None:
        """Make the launches of so many tokens part of the graph that is being captured."""

    def noted(self) -> None:
        """The forward's own graph publishes the last brief."""

    def follow(self, stream: int) -> None:
        """Have this stream wait for the last launch."""

    def flush(self) -> None: ...


class DevicePublisher:
    """The one writer of a ring that the device itself writes.

    Before the forward a step's brief is written (`note`). If the forward is a graph that was
    captured, that publishes it: nothing is left to do. If it ran as Python, `settle` launches.
    """

    def __init__(
        self, launch: PublishLauncher, header: RingHeader, tables: ScoreTables, max_requests: int
    ) -> None:
        self._launch, self._shape, self._tables = launch, header.shape, tables
        self._epoch_low = epoch_low(header.epoch)
        self._ledger = StepCounters()
        self._step_headers = [
            StepHeader(one, max_requests, tables.max_tokens) for one in self._ledger.sheets
        ]
        self._ledger.plan_words, self._ledger.tokens_at = (
            max_requests,
            self._step_headers[0].tokens_at,
        )
        self._form: StepShape | None = None  # of the last step
        self._num_forms = 0
        self._is_prepared = False
        self._is_captured = False  # graphs publish
        self._is_kept_out = False  # they do not, and never will
        self._is_by_graph = False  # the last step was published so
        self._forwarded = -1  # how many briefs there were when a forward last ran as Python
        self.repeat_path: RepeatPath = make_repeat_path()
        self.begin, self.again = launch.begin, partial(launch.note, self._ledger.address)

    @property
    def published(self) -> int:
        return self._ledger.published

    @property
    def last_step(self) -> int:
        return self._ledger.step

    def prepare(self, inputs: ForwardInputs) -> None:
        self._launch.prepare(self._step_headers, inputs)
        self._is_prepared = True

    def forwarded(self, inputs: Callable[[], ForwardInputs]) -> None:
        self._forwarded, self.repeat_path.is_on = self._ledger.sent, False
        if not self._is_prepared:  # now: kernels cannot be loaded while a graph is captured
            self.prepare(inputs())

    def captured(self, num_tokens: int) -> None:
        if not self._is_prepared:
            self.disable_graphs()
            return
        self._launch.capture(num_tokens)
        self._is_captured = not self._is_kept_out

    def disable_graphs(self) -> None:
        self._is_captured, self._is_kept_out = False, True
        self._form, self._ledger.form = None, NO_SHAPE  # it may say otherwise

    def note(self, number: int, rows: StepRows, bank_version: int) -> bool:
        """Write a step's brief; False: it has too many events for one, send it when it is over."""
        if len(rows.events) > MAX_EVENTS:
            return False
        self._write(number, rows, bank_version)
        self._ledger.step = number
        return True

    def settle(self, inputs: Callable[[], ForwardInputs]) -> None:
        """The forward of the brief that was written last is on its way."""
        form = self._form
        assert form is not None
        is_graphs = self._is_captured and form.in_graph
        self._is_by_graph = is_graphs and self._forwarded != self._ledger.sent
        if self._is_by_graph:
            self._launch.noted()
            return
        self._go(form, inputs())

    def repeat(self, pace: RepeatedBatch) -> bool:
        return self._is_by_graph and self.repeat_path.repeat(
            pace.address, self._ledger.address, pace
        )

    def send(self, step: FinishedStep) -> None:
        """A step whose forward is over, or that has none."""
        self._ledger.step = step.number
        for rows in step.rows.cut_events(MAX_EVENTS):
            self._go(self._write(step.number, rows, step.bank_version), step.inputs)

    def _write(self, number: int, rows: StepRows, bank_version: int) -> StepShape:
        form, ledger = self._form_of(rows, self._epoch_low | bank_version << 32), self._ledger
        step_header = self._next_brief()
        step_header.write(form, ledger.published, number, ledger.sent)
        ledger.published += form.num_records
        return form

    def _go(self, form: StepShape, inputs: ForwardInputs) -> None:
        step_header = self._step_headers[(self._ledger.sent - 1) % NUM_HEADERS]
        self._launch(step_header, inputs, form, self._ledger.address)

    def _form_of(self, rows: StepRows, bank: int) -> StepShape:
        form, num_columns = self._form, self._tables.num_columns
        if form is None or not (
            form.rows is rows and form.bank == bank and form.num_columns == num_columns
        ):
            self._num_forms += 1
            form = StepShape.of(self._num_forms, rows, bank, num_columns, self._shape)
            if not self._is_captured:
                form = replace(form, in_graph=False)
            self._form, ledger = form, self._ledger
            ledger.form, ledger.num_records = form.number, form.num_records
            ledger.num_requests, ledger.num_tokens = len(rows.counts_R), rows.num_tokens
        return form

    def _next_brief(self) -> StepHeader:
        step_header = self._step_headers[self._ledger.sent % NUM_HEADERS]
        self._ledger.sent += 1
        if not step_header.is_free():
            _wait_for(step_header)  # only if the GPU is eight steps behind
        return step_header

    def before_dummy_run(self) -> None:
        """A forward of nobody's rows comes: its graph must not find the brief of the next step."""
        if self._is_captured:
            self._write(0, EMPTY_STEP, 0)

    def after_dummy_run(self) -> None:
        """That forward is on its way; if it was no graph, nobody will publish its brief."""
        if self._is_captured and self._forwarded == self._ledger.sent:
            self._ledger.sent -= 1
            sheet = self._ledger.sheets[self._ledger.sent % NUM_HEADERS]
            sheet.number = self._step_headers[self._ledger.sent % NUM_HEADERS].done

    def follow(self, stream: int) -> None:
        self._launch.follow(stream)

    def flush(self) -> None:
        """A brief that no graph has published by then would be taken for the next step's."""
        self._launch.flush()
        sent = self._ledger.sent
        if sent and not self._step_headers[(sent - 1) % NUM_HEADERS].is_free():
            raise EngineGoneError(
                f"the GPU is done with all {sent} steps, but has not published the last: rows are "
                f"no longer known to be whose they seem; restart the engine, and report it"
            )

    def close(self) -> None:
        self._launch.flush()


def _wait_for(step_header: StepHeader) -> None:
    deadline_s = time.monotonic() + GPU_TIMEOUT_S
    while not step_header.is_free():
        if time.monotonic() > deadline_s:
            raise EngineGoneError(
                f"the GPU has not published a step for {GPU_TIMEOUT_S:.0f} s; see the engine's log"
            )
