"""Copies the selected rows of a step from the stash to the staging arena, encoded on the device.

N = selected tokens, M = rows of one encoder (tokens times points), S = sites, R = rows of the
stash, D = model width, T = tokens of the step, P = probes. Memory on the device is bounded: at most
`PART_VALUES` numbers are gathered and encoded at a time.

Runs in: the worker.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final, Protocol

import numpy as np
import torch

from clairai.capture.backend import CaptureBackend
from clairai.capture.pipe_messages import StagedScores
from clairai.capture.staging_arena import ArenaRegion
from clairai.capture.staging_reader import IS_KEPT, ROWS, SAMPLE, WHOLE_STEP
from clairai.engine.capture.capture_resolver import PART_OF_STAGING
from clairai.engine.capture.encode import encode
from clairai.engine.capture.pinned_arena import PinnedArena
from clairai.engine.capture.row_selection import BatchSelection, RowSelection
from clairai.engine.capture.staging_layout import GatherSpan, StagingPlan
from clairai.engine.score.score_tables import ScoreTables
from clairai.engine.side_stream import open_side_stream
from clairai.engine.step import ForwardInputs
from clairai.store.codecs.base import Encoder

PART_VALUES: Final = 9 << 20  # 64 tokens at 32 points of a model 4096 wide, and their sample
SPARE_PART: Final = 16  # part of the arena that is left to the scores of held rows
MAX_PLAN_USES: Final = 64
NO_ROOM: Final = (
    "rows came faster than their consumers took them; raise staging_mib, or choose the policy block"
)


class ScoreSource(Protocol):
    """The probes of the engine, as far as held rows depend on them."""

    def column(self, probe: str) -> tuple[int, int] | None:
        """The probe's site and its column there; None if the bank has no such probe."""

    def make_wait(self, stream: int) -> None:
        """Make this GPU stream wait for the scores of the last step."""


class RowCopier:
    """One for each worker that captures."""

    def __init__(self, tables: ScoreTables, backend: CaptureBackend) -> None:
        self._tables, self._backend = tables, backend
        self.arena = backend.arena
        self._pinned = PinnedArena(self.arena, tables.device)
        self._side = open_side_stream(tables.device)
        num_sites, self._stash_rows, self._width = tables.stash_SRD.shape
        self._stash = tables.stash_SRD.view(num_sites * self._stash_rows, self._width)
        self._dtype = str(tables.stash_SRD.dtype).removeprefix("torch.")
        self._part_rows = max(PART_VALUES // self._width, 1)
        self._rng = np.random.default_rng(0)
        self._plan: StagingPlan | None = None
        self._num_staged = self._num_plans = 0
        self._batch: BatchSelection | None = None
        self._max_tokens = 1  # of that batch, in one region
        # Of a step whose drafts only the device knows: rejected ones of each request. A copy: the
        # sampler's own may be overwritten while it is read on the side stream.
        self._rejected_R: torch.Tensor | None = None

    @property
    def stash_nbytes(self) -> int:
        """Device memory that keeps a step's rows at all tapped sites until the next step."""
        return int(self._stash.nbytes)

    def prepare(self, encoder: Encoder) -> None:
        """Compile and compute now what the first captured request would have to wait for."""
        with self._side.fork():
            encode(self._stash[:1], encoder)
            self._side.release()
            self._mark_copied(0)  # fails here on a device that cannot do it

    def begin(self) -> None:
        """A step begins: its forward pass may overwrite the rows of the last one."""
        self._side.join()

    def copy(self, selection: RowSelection, inputs: ForwardInputs, scores: ScoreSource) -> None:
        if inputs.drafts is not None:
            self._keep_rejected(inputs.drafts.rejected_R)
        if selection.held:
            self._copy_scores(selection, scores)
        if len(selection):
            for part in selection.split(self._tokens_per_region(selection.batch)):
                self._copy_rows(part, inputs)
        self._backend.send()

    def _keep_rejected(self, rejected_R: torch.Tensor) -> None:
        """In the order of the engine's own stream; `begin` has waited for those who read it."""
        if self._rejected_R is None or len(self._rejected_R) != len(rejected_R):
            self._rejected_R = torch.empty_like(rejected_R, dtype=torch.int32)
        self._rejected_R.copy_(rejected_R)

    def _tokens_per_region(self, batch: BatchSelection) -> int:
        """So many that several regions have room in the arena."""
        if batch is not self._batch:
            per_token = max(format.nbytes_per_token(self._width) for format in batch.formats)
            self._batch = batch
            self._max_tokens = max(self.arena.nbytes // PART_OF_STAGING // per_token // 2, 1)
        return self._max_tokens

    def _copy_rows(self, selection: RowSelection, inputs: ForwardInputs) -> None:
        plan = self._plan_for(selection, inputs)
        region = None if self._backend.failure else self._allocate(selection, plan.nbytes)
        if region is None:
            reason = self._backend.failure or NO_ROOM
            for answer, count in selection.counts().items():
                self._backend.results.add_dropped(answer, count, reason)
            return
        self._num_staged += 1
        with self._side.fork():
            self._copy_inputs(plan, region, inputs)
            self._copy_stash(plan, region)
            wait = self._mark_copied(self._num_staged)
        self._backend.put(plan.staged_rows(selection, self._num_staged, region), wait)

    def _plan_for(self, selection: RowSelection, inputs: ForwardInputs) -> StagingPlan:
        """The last plan if it fits. A new one now and then: it samples other requests."""
        plan = self._plan
        if plan is not None and plan.uses < MAX_PLAN_USES and plan.is_plan_for(selection):
            plan.uses += 1
            return plan
        self._num_plans += 1
        dtypes = {
            "row": self._dtype,
            "token": str(inputs.token_ids_T.dtype).removeprefix("torch."),
            "position": str(inputs.positions_T.dtype).removeprefix("torch."),
        }
        plan = self._plan = StagingPlan(
            self._num_plans,
            selection,
            stash_rows=self._stash_rows,
            width=self._width,
            dtypes=dtypes,
            rng=self._rng,
        )
        self._backend.set_layout(plan.layout)
        return plan

    def _allocate(self, selection: RowSelection, nbytes: int) -> ArenaRegion | None:
        """Waits for room only where a consumer has the policy `block`."""
        if self._backend.may_block(selection.batch.consumers) and nbytes <= self.arena.nbytes:
            return self.arena.wait_for_room(nbytes, lambda: not self._backend.failure)
        spare = self.arena.nbytes // SPARE_PART if selection.held else 0
        return self.arena.allocate(nbytes, spare=spare)

    def _copy_inputs(self, plan: StagingPlan, region: ArenaRegion, inputs: ForwardInputs) -> None:
        if plan.device_inputs_N is None:
            index = plan.tensor(self._pinned, region, WHOLE_STEP, "index")
            index.numpy()[:] = plan.index
            plan.set_device_index(index.to(self._tables.device, non_blocking=True, copy=True))
        assert plan.device_inputs_N is not None
        for name, given in (("token", inputs.token_ids_T), ("position", inputs.positions_T)):
            found_N = given.index_select(0, plan.device_inputs_N)
            plan.tensor(self._pinned, region, WHOLE_STEP, name).copy_(found_N, non_blocking=True)
        if plan.device_drafts_2N is not None:
            assert self._rejected_R is not None
            request_N, left_N = plan.device_drafts_2N
            is_kept_N = left_N >= self._rejected_R.index_select(0, request_N)
            kept_N = plan.tensor(self._pinned, region, WHOLE_STEP, IS_KEPT)
            kept_N.copy_(is_kept_N, non_blocking=True)

    def _copy_stash(self, plan: StagingPlan, region: ArenaRegion) -> None:
        """The next forward pass waits until the last row has been read, not until it is encoded."""
        assert plan.device_stash is not None
        num_rows = plan.spans[-1].end
        for first in range(0, num_rows, self._part_rows):
            end = min(first + self._part_rows, num_rows)
            index = plan.device_stash if end - first == num_rows else plan.device_stash[first:end]
            rows_MD = self._stash.index_select(0, index)
            if end == num_rows:
                self._side.release()
            for span in plan.spans:
                low, high = max(span.first, first), min(span.end, end)
                if low < high:
                    part = slice(low - span.first, high - span.first)
                    self._encode(plan, region, span, part, rows_MD[low - first : high - first])

    def _encode(
        self,
        plan: StagingPlan,
        region: ArenaRegion,
        span: GatherSpan,
        part: slice,
        rows_MD: torch.Tensor,
    ) -> None:
        if span.encoder is None:
            bits = rows_MD.view(torch.uint16) if self._dtype == "bfloat16" else rows_MD
            encoded = {SAMPLE: bits}
        else:
            encoded = {f"{ROWS}{k}": value for k, value in encode(rows_MD, span.encoder).items()}
        for name, values in encoded.items():
            to = plan.tensor(self._pinned, region, span.group, name)
            to[part].copy_(values, non_blocking=True)

    def _copy_scores(self, selection: RowSelection, scores: ScoreSource) -> None:
        """Scores of the probes that have some. Without room they are missing, and so not enough."""
        columns = {held.probe: scores.column(held.probe) for held in selection.held}
        found = {probe: column for probe, column in columns.items() if column is not None}
        num_scores = len(found) * selection.num_tokens
        rejected_R = self._rejected_R if num_scores else None
        num_requests = 0 if rejected_R is None else len(rejected_R)
        region = self._allocate_scores(4 * (num_scores + num_requests))
        self._num_staged += 1
        with self._side.fork():
            if region.nbytes:
                scores.make_wait(self._side.handle)
                shape = (len(found), selection.num_tokens)
                to_PT = self._pinned.tensor(region.start, torch.float32, shape)
                for index, (site, column) in enumerate(found.values()):
                    scores_T = self._tables.scores_STK[site, : selection.num_tokens, column]
                    to_PT[index].copy_(scores_T.contiguous(), non_blocking=True)
                if rejected_R is not None:
                    start = region.start + 4 * num_scores
                    to_R = self._pinned.tensor(start, torch.int32, (num_requests,))
                    to_R.copy_(rejected_R, non_blocking=True)
                self._side.release()
            wait = self._mark_copied(self._num_staged)
        message = StagedScores(
            self._num_staged,
            region.start,
            region.nbytes,
            region.end,
            selection.num_tokens,
            tuple(found) if region.nbytes else (),
            selection.held,
            num_requests if region.nbytes else 0,
        )
        self._backend.put(message, wait)

    def _allocate_scores(self, nbytes: int) -> ArenaRegion:
        """An empty region where there is no room."""
        region = self.arena.allocate(nbytes) if nbytes and not self._backend.failure else None
        return region or ArenaRegion(0, 0, self.arena.allocated)

    def _mark_copied(self, number: int) -> Callable[[], None]:
        """Within the fork: all so far belongs to the message of this number.

        The result waits until it has been copied, for a backend in this process.
        """
        if self._tables.device.type != "cuda":
            self.arena.mark_copied(number)
        elif self._backend.is_remote:  # the device tells the writer process: nobody waits here
            self._pinned.mark_copied(self._side.handle, number)
        else:
            # Blocking: the thread that waits sleeps, and leaves the processor to the engine.
            event = torch.cuda.Event(blocking=True)
            event.record()
            wait: Callable[[], None] = event.synchronize
            return wait
        return lambda: None

    def close(self) -> None:
        self._side.synchronize()
        self._pinned.close()
