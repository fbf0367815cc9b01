"""Launches the publish kernel on a GPU, or captures it with a graph of the forward.

Runs in: the worker. It is in the way of every step: the kernels are compiled beforehand and their
arguments laid out once, so that all of a step is one call (launch_list.py).
"""

from __future__ import annotations

from functools import partial
from typing import Any, Final

import torch

from clairai.engine.kernel_launch import CompiledKernel, CudaDriver, arguments_by_name
from clairai.engine.publish import header_layout as layout
from clairai.engine.publish import publish_kernel as kernel
from clairai.engine.publish.launch_list import LaunchList, LaunchStreams, StepLauncher
from clairai.engine.publish.step_header import Grids, StepHeader, StepHeaders, StepShape
from clairai.engine.score.score_tables import ScoreTables
from clairai.engine.score.stash_kernel import StashScorer
from clairai.engine.side_stream import SideStream
from clairai.engine.step import ForwardInputs, JudgedDrafts
from clairai.ring.layout import RingShape

MAX_LAUNCH_LISTS: Final = 1024
# Of a launch in a graph, which does not know how many scores there will be.
ROWS_PER_PROGRAM: Final = 32
MAX_RECORDS: Final = 8
PROGRAMS_PER_RECORD: Final = 4


class GpuLauncher:
    """Runs the kernel within a graph, or beside the engine's stream before the next forward."""

    def __init__(
        self, ring: int, shape: RingShape, tables: ScoreTables, max_requests: int, extension: Any
    ) -> None:
        """`ring` is the address of the ring as the GPU sees it; `extension` is step.c's module."""
        self._driver = CudaDriver()
        self._side = SideStream(tables.device)
        self._device = tables.device.index or 0
        # The stream that vLLM runs the model on, in this thread.
        self._main = partial(torch._C._cuda_getCurrentRawStream, self._device)
        streams = LaunchStreams(self._main, *self._side.driver_handles())
        self._launcher = StepLauncher(self._driver, streams, extension)
        self.begin_step = self._launcher.begin_step
        self.published_by_graph = self._launcher.published_by_graph
        self.make_wait = self._launcher.make_wait
        ticket = torch.zeros(1, dtype=torch.int32, device=tables.device)
        turn = torch.zeros(1, dtype=torch.int64, device=tables.device)
        self._held = (tables.scores_STK, tables.offset_C, ticket, turn)  # kernels know addresses
        self._ring, self._ring_shape = ring, shape
        self._constants = kernel_constants(shape, max_requests)
        self._scorer = StashScorer(tables)
        self._shape: StepShape | None = None  # whose launches are laid out, and of what:
        self._inputs: ForwardInputs | None = None
        self._is_scored = False

    def prepare(self, headers: StepHeaders, inputs: ForwardInputs) -> None:
        """Compile the kernels for inputs of these types."""
        scores_STK, offset_C, ticket, turn = self._held
        sizes = (self._ring_shape.slots, self._ring_shape.slot_bytes, scores_STK.shape[2])
        read = (scores_STK, offset_C, inputs.positions_T, inputs.token_ids_T, ticket, turn)
        given: tuple[Any, ...] = (_RawPointer(self._ring), headers.memory, *read, *sizes)
        constants = self._constants
        self._kernel = self._compile(kernel.publish_step, (*given, 0), constants)
        places = {"NUM_HEADERS": layout.NUM_HEADERS, "HEADER_WORDS": headers.memory.shape[1]}
        self._graph_kernel = self._compile(kernel.publish_in_graph, given, constants | places)
        any_R = torch.zeros(1, dtype=torch.int32, device=scores_STK.device)
        sizes_of_header = {name: constants[name] for name in ("MAX_R", "MAX_E", "TILE_W")}
        self._marker = self._compile(
            kernel.mark_rejected, (headers.memory, any_R, any_R), sizes_of_header
        )
        self._shape = None
        self._launch_lists: dict[tuple[Grids, int], LaunchList] = {}
        if self._scorer.max_tokens:
            self._scorer.prepare(self._driver)

    def _compile(
        self, function: Any, given: tuple[Any, ...], constants: dict[str, Any]
    ) -> CompiledKernel:
        compiled = function.warmup(*given, **constants, grid=(1,))
        return CompiledKernel(self._driver, compiled, arguments_by_name(function, given))

    def __call__(self, headers: StepHeaders, inputs: ForwardInputs, shape: StepShape) -> None:
        """Publish the header that was written last: one launch for each grid of its shape."""
        if inputs.drafts is not None:
            self._mark_rejected(headers.last(), inputs.drafts, len(shape.rows.counts_R))
        is_scored = self._scorer.is_due(shape.rows.num_tokens)
        is_known = shape is self._shape and inputs is self._inputs
        if not is_known or is_scored is not self._is_scored:
            cells = self._kernel.cells
            cells["positions_ptr"].value = inputs.positions_T.data_ptr()
            cells["token_ids_ptr"].value = inputs.token_ids_T.data_ptr()
            num_scored = shape.rows.num_tokens if is_scored else 0
            self._launcher.use(self._launch_list(shape.grids, num_scored))
            self._shape, self._inputs, self._is_scored = shape, inputs, is_scored
        self._launcher.run(headers)

    def _mark_rejected(self, header: StepHeader, drafts: JudgedDrafts, num_requests: int) -> None:
        """On the engine's own stream, which the launches that publish wait for."""
        if not num_requests:
            return
        cells = self._marker.cells
        cells["header_ptr"].value = header.address
        cells["starts_ptr"].value = drafts.starts_R.data_ptr()
        cells["rejected_ptr"].value = drafts.rejected_R.data_ptr()
        self._marker.launch((num_requests, 1, 1)).run(self._driver, self._main())

    def _launch_list(self, grids: Grids, num_scored: int) -> LaunchList:
        """Laid out once for each kind of step: batches come and go, as large as others were."""
        found = self._launch_lists.get((grids, num_scored))
        if found is not None:
            return found
        launches = [self._scorer.launch_for(num_scored)] if num_scored else []
        for part, grid in enumerate(grids):
            launches.append(self._kernel.launch((*grid, 1), part=part))
        if len(self._launch_lists) == MAX_LAUNCH_LISTS:
            self._launch_lists.clear()
        made = LaunchList.of(launches, self._kernel.cells["header_ptr"])
        self._launch_lists[grids, num_scored] = made
        return made

    def capture(self, num_tokens: int) -> None:
        """Make the launches for so many tokens part of the graph that is being captured.

        Scores first; with a bank that has none, that launch ends at once.
        """
        stream = self._main()
        if 0 < num_tokens <= self._scorer.max_tokens:
            self._scorer.launch_in_graph(num_tokens).run(self._driver, stream)
        num_records = min(max(num_tokens // ROWS_PER_PROGRAM, 1), MAX_RECORDS)
        launch = self._graph_kernel.launch((num_records, PROGRAMS_PER_RECORD, 1))
        launch.run(self._driver, stream)

    def flush(self) -> None:
        """Return when all that was launched has run."""
        self._side.synchronize()
        torch.cuda.current_stream(self._device).synchronize()  # repeated steps may be there


class _RawPointer:
    """A pointer that torch does not own, in the form Triton takes."""

    dtype: Final = torch.int64

    def __init__(self, address: int) -> None:
        self._address = address

    def data_ptr(self) -> int:
        return self._address


def kernel_constants(shape: RingShape, max_requests: int) -> dict[str, Any]:
    """What is compiled into the kernel."""
    return {
        "MAX_R": max_requests,
        "MAX_E": layout.MAX_EVENTS,
        "TILE_E": layout.TILE_E,
        "TILE_W": kernel.TILE_W,
        "AHEAD": shape.ahead,
        "CLOCK": False,
        "IS_GPU": True,
    }
