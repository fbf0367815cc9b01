"""Has the GPU publish each step itself, and waits for nothing.

Runs in: the worker. Before the forward the host writes the step's header, which says whose rows
they are (step_header.py). If the forward is a captured graph, the publish kernel is part of it and
nothing is left to do; if it ran as Python, the host launches the kernel behind it.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any, Final, Protocol

from clairai.engine.publish import header_layout as layout
from clairai.engine.publish.repeat_path import RepeatPath
from clairai.engine.publish.ring_room import FindLimit
from clairai.engine.publish.step_header import StepHeaders, StepShape
from clairai.engine.publish.step_rows import RepeatedBatch, RowBuilder, StepRows
from clairai.engine.score.score_tables import ScoreTables
from clairai.engine.step import ForwardInputs
from clairai.errors import EngineGoneError
from clairai.ring.layout import RingHeader, epoch_low

EMPTY_STEP: Final = RowBuilder().build_idle()


class PublishLauncher(Protocol):
    """Runs the publish kernel; GpuLauncher, or a stand-in for tests."""

    def prepare(self, headers: StepHeaders, inputs: ForwardInputs) -> None:
        """Do what the first launch would otherwise make a request wait for."""

    def begin_step(self) -> None:
        """What the forward is about to overwrite must have been read."""

    def __call__(self, headers: StepHeaders, inputs: ForwardInputs, shape: StepShape) -> None:
        """Publish the header that was written last, without drafts that are rejected."""

    def capture(self, num_tokens: int) -> None:
        """Make the launches for so many tokens part of the graph that is being captured."""

    def published_by_graph(self) -> None:
        """The forward's own graph publishes the header that was written last."""

    def make_wait(self, stream: int) -> None:
        """Have this stream wait for the last launch."""

    def flush(self) -> None:
        """Return when all that was launched has run."""


class DevicePublisher:
    """The one writer of a ring that the device itself writes."""

    def __init__(
        self,
        launcher: PublishLauncher,
        header: RingHeader,
        tables: ScoreTables,
        max_requests: int,
        extension: Any = None,
    ) -> None:
        """`extension` is the module that step.c is; without it Python writes every header."""
        self._launcher, self._ring_shape, self._tables = launcher, header.shape, tables
        self._epoch_low = epoch_low(header.epoch)
        self.headers = StepHeaders(max_requests, tables.max_tokens)
        self._counters = self.headers.counters
        self._shape: StepShape | None = None  # of the last step
        self._num_shapes = 0
        self._is_prepared = False
        self._graphs_publish = False
        self._is_disabled = False  # graphs do not publish, and never will
        self._is_by_graph = False  # the last step was published so
        self._forwarded = -1  # how many headers there were when a forward last ran as Python
        self.repeat_path = RepeatPath(extension, self._counters, self.headers)
        self.begin_step = launcher.begin_step
        self._repeat: Callable[[], bool] = (
            _cannot_repeat
            if extension is None
            else partial(extension.repeat_header, ctypes.addressof(self._counters))
        )

    @property
    def published(self) -> int:
        return self._counters.published

    @property
    def last_step(self) -> int:
        return self._counters.step

    def set_limit(self, find_limit: FindLimit) -> None:
        self.headers.set_limit(find_limit)

    def prepare(self, inputs: ForwardInputs) -> None:
        self._launcher.prepare(self.headers, inputs)
        self._is_prepared = True

    def forward_ran(self, inputs: Callable[[], ForwardInputs]) -> None:
        self._forwarded, self.repeat_path.is_on = self._counters.sent, False
        if not self._is_prepared:  # now: kernels cannot be loaded while a graph is captured
            self.prepare(inputs())

    def capture_publish(self, num_tokens: int) -> None:
        if not self._is_prepared:
            self.disable_graphs()
            return
        self._launcher.capture(num_tokens)
        self._graphs_publish = not self._is_disabled

    def disable_graphs(self) -> None:
        self._graphs_publish, self._is_disabled = False, True
        self._set_shape(None)  # the last one may say otherwise

    def announce(self, rows: StepRows, bank_version: int) -> bool:
        shape = self._shape_of(rows, bank_version)
        if shape is self._shape and self._repeat():
            return True
        if len(rows.events) > layout.MAX_EVENTS:
            return False
        self._write(shape, self._counters.step + 1)
        self._counters.step += 1
        return True

    def finish(self, inputs: Callable[[], ForwardInputs]) -> None:
        shape = self._shape
        assert shape is not None
        may_publish = self._graphs_publish and shape.in_graph
        self._is_by_graph = may_publish and self._forwarded != self._counters.sent
        if self._is_by_graph:
            self._launcher.published_by_graph()
            return
        self._launcher(self.headers, inputs(), shape)

    def start_repeating(self, batch: RepeatedBatch) -> bool:
        is_last = self._shape is not None and self._shape.rows is batch.rows
        return is_last and self._is_by_graph and self.repeat_path.start(batch)

    def publish(self, rows: StepRows, bank_version: int, inputs: ForwardInputs) -> None:
        self._counters.step += 1
        self._is_by_graph = False
        for part in rows.cut_events(layout.MAX_EVENTS):
            shape = self._shape_of(part, bank_version)
            self._write(shape, self._counters.step)
            self._launcher(self.headers, inputs, shape)

    def _shape_of(self, rows: StepRows, bank_version: int) -> StepShape:
        """The last step's shape, if this step is like it."""
        epoch_and_bank = self._epoch_low | bank_version << 32
        shape, num_columns = self._shape, self._tables.num_columns
        if shape is not None and (
            shape.rows is rows
            and shape.epoch_and_bank == epoch_and_bank
            and shape.num_columns == num_columns
        ):
            return shape
        self._num_shapes += 1
        made = StepShape.of(self._num_shapes, rows, epoch_and_bank, num_columns, self._ring_shape)
        return made if self._graphs_publish else replace(made, in_graph=False)

    def _set_shape(self, shape: StepShape | None) -> None:
        self._shape = shape
        self.headers.set_shape(shape)

    def _write(self, shape: StepShape, step: int) -> None:
        if shape is not self._shape:
            self._set_shape(shape)
        self.headers.write(shape, step)

    def abandon(self) -> None:
        """A header that no launch and no graph will publish is taken back."""
        shape = self._shape
        if shape is not None and not self._is_by_graph and not self.headers.last().is_published:
            self.headers.withdraw()
            self._counters.published -= shape.num_records
        self._set_shape(None)

    def before_dummy_run(self) -> None:
        """Write a header without rows: the forward's graph must not find that of the next step."""
        if self._graphs_publish:
            self._write(self._shape_of(EMPTY_STEP, 0), 0)

    def after_dummy_run(self) -> None:
        """If that forward was no graph, its header will not be published."""
        if self._graphs_publish and self._forwarded == self._counters.sent:
            self.headers.withdraw()

    def make_wait(self, stream: int) -> None:
        self._launcher.make_wait(stream)

    def flush(self) -> None:
        """A header that no graph has published by then would be taken for the next step's."""
        self._launcher.flush()
        if not self.headers.last().is_published:
            raise EngineGoneError(
                f"the GPU is done with all {self._counters.sent} steps, but has not published the "
                f"last: rows are no longer known to be whose they seem; restart the engine, and "
                f"report it"
            )

    def close(self) -> None:
        self._launcher.flush()


def _cannot_repeat() -> bool:
    return False
