"""Takes a ring, tables and briefs; gives the kernel's launches to a GPU, or to a graph of one.

Compiled beforehand, arguments laid out once: it is on the way of every step.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any, Final

import torch

from clairai.engine.kernel_launch import CompiledKernel, CudaDriver, arguments_by_name
from clairai.engine.publish import publish_kernel as kernel
from clairai.engine.publish.launch_list import LaunchList, LaunchStreams, make_launcher
from clairai.engine.publish.step_header import MAX_EVENTS, NUM_HEADERS, Grids, StepHeader, StepShape
from clairai.engine.score.score_tables import ScoreTables
from clairai.engine.score.stash_kernel import StashScorer
from clairai.engine.step import ForwardInputs
from clairai.local.gpu_memory import Gpu
from clairai.ring.layout import RingShape

MAX_LAUNCH_LISTS: Final = 1024
# Of a launch in a graph, which does not know how many scores there will be.
ROWS_PER_PROGRAM: Final = 32
MAX_RECORDS: Final = 8
PROGRAMS_PER_RECORD: Final = 4


class GpuLauncher:
    """Runs the kernel within a graph, or on a stream of its own, before the next step's forward.

    On the way of every step: so the kernels are compiled beforehand, their arguments laid out once,
    and all of a step is one call (launch.py).
    """

    def __init__(self, ring: int, shape: RingShape, tables: ScoreTables, max_requests: int) -> None:
        """`ring` is the address of the ring as the GPU sees it."""
        gpu = Gpu(tables.device.index or 0)
        self._driver = CudaDriver()
        self._stream = torch.cuda.Stream(tables.device)
        self._device = self._stream.device_index
        # The stream that vLLM runs the model on, in this thread.
        main = partial(torch._C._cuda_getCurrentRawStream, self._device)
        lane = LaunchStreams(main, self._stream.cuda_stream, int(gpu.event()), int(gpu.event()))
        self._main, self._launches = main, make_launcher(self._driver, lane)
        self.note, self.noted = self._launches.note, self._launches.noted
        self.follow = self._launches.follow
        # The scores, positions and token ids of the last step are read until then.
        self.begin = self._launches.begin
        ticket = torch.zeros(1, dtype=torch.int32, device=tables.device)
        turn = torch.zeros(1, dtype=torch.int64, device=tables.device)
        self._held = (tables.scores_STK, tables.offset_C, ticket, turn)  # their addresses are given
        self._table: torch.Tensor | None = None  # where the briefs are; captured graphs know it
        self._ring, self._shape = ring, shape
        self._constants = kernel_constants(shape, max_requests)
        self._score = StashScorer(tables)
        self._form: StepShape | None = None  # whose launches are laid out, and of what:
        self._inputs: ForwardInputs | None = None
        self._is_scored = False

    def __call__(
        self, step_header: StepHeader, inputs: ForwardInputs, form: StepShape, ledger: int
    ) -> None:
        is_scored = self._score.is_due(form.rows.num_tokens)
        is_known = form is self._form and inputs is self._inputs
        if not is_known or is_scored is not self._is_scored:
            cells = self._commit.cells
            cells["positions_ptr"].value = inputs.positions_T.data_ptr()
            cells["token_ids_ptr"].value = inputs.token_ids_T.data_ptr()
            self._launches.use(self._lineup(form.grids, form.rows.num_tokens if is_scored else 0))
            self._form, self._inputs, self._is_scored = form, inputs, is_scored
        self._launches.run(step_header.address, ledger)

    def capture(self, num_tokens: int) -> None:
        """Scores first; a bank without any makes that launch end at once."""
        stream = self._main()
        if 0 < num_tokens <= self._score.max_tokens:
            self._score.launch_in_graph(num_tokens).run(self._driver, stream)
        grid = (min(max(num_tokens // ROWS_PER_PROGRAM, 1), MAX_RECORDS), PROGRAMS_PER_RECORD, 1)
        self._graph_commit.launch(grid).run(self._driver, stream)

    def _lineup(self, grids: Grids, num_scored: int) -> LaunchList:
        """Laid out once for each kind of step: batches come and go, as large as others were."""
        found = self._lineups.get((grids, num_scored))
        if found is not None:
            return found
        scored = [self._score.launch_for(num_scored)] if num_scored else []
        parts = enumerate(grids)
        committed = [self._commit.launch((*grid, 1), part=part) for part, grid in parts]
        if len(self._lineups) == MAX_LAUNCH_LISTS:
            self._lineups.clear()
        launch_list = self._lineups[grids, num_scored] = LaunchList.of(
            [*scored, *committed], self._brief
        )
        return launch_list

    def flush(self) -> None:
        self._stream.synchronize()
        torch.cuda.current_stream(self._device).synchronize()  # where steps that are alike may be

    def prepare(self, step_headers: Sequence[StepHeader], inputs: ForwardInputs) -> None:
        """Compile the kernels for inputs of these types."""
        if self._table is None:
            addresses = torch.tensor([step_header.address for step_header in step_headers])
            self._table = addresses.to(self._held[0].device)
        scores_STK, offset_C, ticket, turn = self._held
        sizes = (self._shape.slots, self._shape.slot_bytes, scores_STK.shape[2])
        read = (scores_STK, offset_C, inputs.positions_T, inputs.token_ids_T, ticket, turn)
        ring, constants = RawPointer(self._ring), self._constants
        given: tuple[Any, ...] = (ring, step_headers[0].memory, *read, *sizes, 0)
        self._commit = self._compiled(kernel.publish_step, given, constants)
        given = (ring, self._table, *read, *sizes)
        constants = constants | {"NUM_BRIEFS": NUM_HEADERS}
        self._graph_commit = self._compiled(kernel.publish_in_graph, given, constants)
        self._brief, self._form = self._commit.cells["brief_ptr"], None
        self._lineups: dict[tuple[Grids, int], LaunchList] = {}
        if self._score.max_tokens:
            self._score.prepare(self._driver)

    def _compiled(
        self, function: Any, given: tuple[Any, ...], constants: dict[str, Any]
    ) -> CompiledKernel:
        compiled = function.warmup(*given, **constants, grid=(1,))
        return CompiledKernel(self._driver, compiled, arguments_by_name(function, given))


class RawPointer:
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
        "MAX_E": MAX_EVENTS,
        "TILE_E": kernel.TILE_E,
        "TILE_W": kernel.TILE_W,
        "AHEAD": shape.ahead,
        "CLOCK": False,
        "IS_GPU": True,
    }
