"""Takes wanted rows where the forward left them; has them encoded there and brought to the host.

N = wanted tokens, M = rows of one encoder (tokens times points), S = sites, R = rows of the stash,
D = model width, T = tokens of the step. Memory on the device is bounded: rows are gathered and
encoded at most `PART_VALUES` numbers at a time.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final, Protocol

import numpy as np
import torch

from clairai.capture import pipe_messages
from clairai.capture.backend import CaptureBackend
from clairai.capture.staging_arena import ArenaRegion
from clairai.capture.staging_reader import ROWS, SAMPLE, WHOLE_STEP
from clairai.engine.capture.capture_resolver import PART_OF_STAGING
from clairai.engine.capture.encode import encode
from clairai.engine.capture.pinned_arena import PinnedArena
from clairai.engine.capture.row_selection import BatchSelection, RowSelection
from clairai.engine.capture.staging_layout import (
    DeviceIndex,
    GatherSpan,
    StagingPlan,
    StagingTensors,
    group_by_encoder,
    lay_out_rows,
)
from clairai.engine.score.score_tables import ScoreTables
from clairai.engine.side_stream import open_side_stream
from clairai.engine.step import ForwardInputs
from clairai.store.codecs.base import Encoder

PART_VALUES: Final = 9 << 20  # 64 tokens at 32 points of a model 4096 wide, and their sample
SPARE_PART: Final = 16  # of the arena, left to scores that rules wait for
MAX_PLAN_USES: Final = 64
# Triton compiles a kernel for each: a single row, a multiple of 16, any other number.
WARM_ROWS: Final = (1, 16, 17)
NO_ROOM: Final = (
    "rows came faster than their consumers took them; raise staging_mib, or choose the policy block"
)


class ScoreSource(Protocol):
    """The engine's probes, as far as rules depend on them."""

    def column(self, probe: str) -> tuple[int, int] | None:
        """Its site and its place there; None if the bank has no such probe."""

    def follow(self, stream: int) -> None:
        """Have this stream of the GPU wait until the last step's scores are there."""


class RowCopier:
    """One for each engine worker that captures."""

    def __init__(self, tables: ScoreTables, clerk: CaptureBackend) -> None:
        self._tables, self._clerk = tables, clerk
        self.arena = clerk.arena
        self._landing = PinnedArena(self.arena, tables.device)
        self._side = open_side_stream(tables.device)
        num_sites, self._stash_rows, self._width = tables.stash_SRD.shape
        self._stash = tables.stash_SRD.view(num_sites * self._stash_rows, self._width)
        self._dtype = str(tables.stash_SRD.dtype).removeprefix("torch.")
        self._part = max(PART_VALUES // self._width, 1)  # rows that are gathered together
        self._rng = np.random.default_rng(0)
        self._plan: StagingPlan | None = None
        self._tickets = self._plans = 0  # so far
        self._cast: BatchSelection | None = None
        self._most_tokens = 1

    @property
    def stash_nbytes(self) -> int:
        """Of device memory: rows of a step at all tapped sites, kept until the next."""
        return int(self._stash.nbytes)

    def prepare(self, encoder: Encoder) -> None:
        """Compile and compute now what the first captured request would else wait for."""
        with self._side.fork():
            for num_rows in WARM_ROWS:
                encode(self._stash[:num_rows], encoder)
            self._side.release()
            self._mark_done(0)  # a device that cannot say so refuses here

    def begin(self) -> None:
        """A step begins: from here on its forward may write over the last one's rows."""
        self._side.join()

    def take(self, selection: RowSelection, inputs: ForwardInputs, scores: ScoreSource) -> None:
        if selection.held:
            self._take_scores(selection, scores)
        if len(selection):
            for part in selection.cut(self._most(selection.cast)):
                self._take(part, inputs)
        self._clerk.post()

    def _most(self, cast: BatchSelection) -> int:
        """Tokens that are taken together, so that several parts have room at once."""
        if cast is not self._cast:
            per_token = max(kind.nbytes(self._width) for kind in cast.kinds)
            self._cast = cast
            self._most_tokens = max(self.arena.nbytes // PART_OF_STAGING // per_token // 2, 1)
        return self._most_tokens

    def _take(self, selection: RowSelection, inputs: ForwardInputs) -> None:
        plan = self._planned(selection, inputs)
        region = None if self._clerk.trouble else self._room(selection, plan.layout.nbytes)
        if region is None:
            reason = self._clerk.trouble or NO_ROOM
            for seat, count in selection.counts().items():
                self._clerk.results.dropped(seat, count, reason)
            return
        self._tickets += 1
        wait = self._fill(StagingTensors(plan.layout, self._landing, region.start), plan, inputs)
        self._clerk.put(plan.ticket(selection, self._tickets, region), wait)

    def _planned(self, selection: RowSelection, inputs: ForwardInputs) -> StagingPlan:
        """Made anew now and then, so that the sample is not of the same requests for ever."""
        plan = self._plan
        if plan is not None and plan.uses < MAX_PLAN_USES and plan.is_plan_for(selection):
            plan.uses += 1
            return plan
        groups = group_by_encoder(selection, self._stash_rows, self._rng)
        dtypes = {
            "row": self._dtype,
            "token": str(inputs.token_ids_T.dtype).removeprefix("torch."),
            "position": str(inputs.positions_T.dtype).removeprefix("torch."),
        }
        self._plans += 1
        layout = lay_out_rows(selection, groups, self._width, dtypes)
        self._plan = StagingPlan(self._plans, selection, groups, layout)
        self._clerk.plan(self._plan.told(self._dtype))
        return self._plan

    def _room(self, selection: RowSelection, nbytes: int) -> ArenaRegion | None:
        """Only a consumer that asks for it makes tokens wait."""
        if self._clerk.may_block(selection.cast.to) and nbytes <= self.arena.nbytes:
            return self.arena.wait(nbytes, lambda: not self._clerk.trouble)
        return self.arena.take(
            nbytes, spare=self.arena.nbytes // SPARE_PART if selection.held else 0
        )

    def _fill(
        self, staged: StagingTensors, plan: StagingPlan, inputs: ForwardInputs
    ) -> Callable[[], None]:
        with self._side.fork():
            places = plan.places
            if places is None:
                pinned = staged.tensor(WHOLE_STEP, "index")
                pinned.numpy()[:] = plan.wanted()
                index = pinned.to(self._tables.device, non_blocking=True, copy=True)
                places = plan.placed(index)
            for name, given in (("token", inputs.token_ids_T), ("position", inputs.positions_T)):
                found_N = given.index_select(0, places.inputs_N)
                staged.tensor(WHOLE_STEP, name).copy_(found_N, non_blocking=True)
            self._gather(staged, plan.spans, places)
            return self._mark_done(self._tickets)

    def _mark_done(self, number: int) -> Callable[[], None]:
        """Within the fork: all so far is the message of this number. Wait by calling the result."""
        if self._tables.device.type != "cuda":
            self.arena.land(number)
        elif self._clerk.is_remote:  # the device tells the writer process: nobody waits here
            self._landing.mark(self._side.handle, number)
        else:
            # Blocking: the thread that waits sleeps, and leaves the processor to the engine.
            event = torch.cuda.Event(blocking=True)
            event.record()
            wait: Callable[[], None] = event.synchronize
            return wait
        return lambda: None

    def _gather(
        self, staged: StagingTensors, spans: Sequence[GatherSpan], places: DeviceIndex
    ) -> None:
        """The forward waits until the last row has been read, and not for what comes of them."""
        if places.num_stash <= self._part:
            rows_MD = self._stash.index_select(0, places.stash)
            self._side.release()
            for span in spans:
                self._put(staged, span, slice(None), rows_MD[span.first : span.end])
            return
        for first in range(0, places.num_stash, self._part):
            end = min(first + self._part, places.num_stash)
            rows_MD = self._stash.index_select(0, places.stash[first:end])
            if end == places.num_stash:
                self._side.release()
            for span in spans:
                low, high = max(span.first, first), min(span.end, end)
                if low < high:
                    part = slice(low - span.first, high - span.first)
                    self._put(staged, span, part, rows_MD[low - first : high - first])

    def _put(
        self, staged: StagingTensors, span: GatherSpan, part: slice, rows_MD: torch.Tensor
    ) -> None:
        if span.encoder is None:
            bits = rows_MD.view(torch.uint16) if self._dtype == "bfloat16" else rows_MD
            staged.tensor(span.group, SAMPLE)[part].copy_(bits, non_blocking=True)
            return
        for name, encoded in encode(rows_MD, span.encoder).items():
            staged.tensor(span.group, f"{ROWS}{name}")[part].copy_(encoded, non_blocking=True)

    def _take_scores(self, selection: RowSelection, scores: ScoreSource) -> None:
        """Of probes that have some, if there is room; a rule without a score is not met."""
        columns = {held.hold.probe: scores.column(held.hold.probe) for held in selection.held}
        found = {probe: column for probe, column in columns.items() if column is not None}
        region = self._scores_room(4 * len(found) * selection.num_tokens)
        self._tickets += 1
        with self._side.fork():
            if region.nbytes:
                scores.follow(self._side.handle)
                shape = (len(found), selection.num_tokens)
                given_PT = self._landing.tensor(region.start, torch.float32, shape)
                for at, (site, slot) in enumerate(found.values()):
                    scores_T = self._tables.scores_STK[site, : selection.num_tokens, slot]
                    given_PT[at].copy_(scores_T.contiguous(), non_blocking=True)
                self._side.release()
            wait = self._mark_done(self._tickets)
        told = pipe_messages.StagedScores(
            self._tickets,
            region.start,
            region.nbytes,
            region.end,
            selection.num_tokens,
            tuple(found) if region.nbytes else (),
            tuple(
                pipe_messages.HeldTokens(
                    *one.seat, one.hold.probe, one.hold.threshold, one.first, one.end
                )
                for one in selection.held
            ),
        )
        self._clerk.put(told, wait)

    def _scores_room(self, nbytes: int) -> ArenaRegion:
        """An empty one where there is none."""
        region = self.arena.take(nbytes) if nbytes and not self._clerk.trouble else None
        return region or ArenaRegion(0, 0, self.arena.given)

    def close(self) -> None:
        self._side.synchronize()
        self._landing.close()
