"""Takes wanted rows where the forward left them; has them encoded there and brought to the host.

N = wanted tokens, M = rows of one encoder (tokens times points), S = sites, R = rows of the stash,
D = model width, T = tokens of the step. Memory on the device is bounded: rows are gathered and
encoded at most `PART_VALUES` numbers at a time.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, Protocol

import numpy as np
import torch

from clairai.capture.collector import Collector
from clairai.capture.consumers import Consumer
from clairai.capture.resolve import PART_OF_STAGING
from clairai.store.codecs.base import Encoder
from clairai.tap.arena import Arena, Region
from clairai.tap.encode import encode
from clairai.tap.lanes import lane_for
from clairai.tap.outlet import Inputs
from clairai.tap.picks import Pick
from clairai.tap.staged import PICK, Group, Plan, Scored, Staged, groups_of, layout_of
from clairai.tap.tables import Tables

PART_VALUES: Final = 1 << 23  # 64 tokens at 32 points of a model 4096 wide
MAX_USES: Final = 64
# Triton compiles a kernel for each: a single row, a multiple of 16, any other number.
WARM_ROWS: Final = (1, 16, 17)
NO_ROOM: Final = (
    "rows came faster than their consumers took them; raise staging_mib, or choose the policy block"
)


class Scores(Protocol):
    """The engine's probes, as far as rules depend on them."""

    def column(self, probe: str) -> tuple[int, int] | None:
        """Its site and its place there; None if the bank has no such probe."""

    def follow(self, stream: int) -> None:
        """Have this stream of the GPU wait until the last step's scores are there."""


@dataclass(frozen=True, eq=False)
class _Span:
    """Rows of one encoder among all that are gathered, or its sample."""

    first: int
    end: int
    group: int
    encoder: Encoder | None  # None: they stay as they are


class Taker:
    """One for each engine worker that captures."""

    def __init__(
        self,
        tables: Tables,
        consumers: Mapping[str, Consumer],
        collector: Collector,
        *,
        staging_nbytes: int,
    ) -> None:
        self._tables, self._consumers, self._collector = tables, consumers, collector
        self.arena = Arena(staging_nbytes)
        self._lane = lane_for(tables.device)
        num_sites, self._stash_rows, self._width = tables.stash_SRD.shape
        self._stash = tables.stash_SRD.view(num_sites * self._stash_rows, self._width)
        self._dtype = str(tables.stash_SRD.dtype).removeprefix("torch.")
        self._rng = np.random.default_rng(0)
        self._plan: Plan | None = None

    @property
    def stash_nbytes(self) -> int:
        """Of device memory: rows of a step at all tapped sites, kept until the next."""
        return int(self._stash.nbytes)

    def prepare(self, encoder: Encoder) -> None:
        """Compile and compute now what the first captured request would else wait for."""
        with self._lane.side():
            for num_rows in WARM_ROWS:
                encode(self._stash[:num_rows], encoder)
            self._lane.left()

    def begin(self) -> None:
        """A step begins: from here on its forward may write over the last one's rows."""
        self._lane.begin()

    def take(self, pick: Pick, inputs: Inputs, scores: Scores) -> None:
        if pick.held:
            self._take_scores(pick, scores)
        if not len(pick):
            return
        per_token = max(kind.nbytes(self._width) for kind in pick.cast.kinds)
        for part in pick.cut(max(self.arena.nbytes // PART_OF_STAGING // per_token // 2, 1)):
            self._take(part, inputs)

    def _take(self, pick: Pick, inputs: Inputs) -> None:
        plan = self._planned(pick, inputs)
        region = self._room(pick, plan.layout.nbytes)
        if region is None:
            for seat, count in pick.counts().items():
                self._collector.results.dropped(seat, count, NO_ROOM)
            return
        staged = Staged(pick, plan, self.arena, region)
        staged.dtype = self._dtype
        self._fill(staged, plan, inputs)
        self._collector.put(staged)

    def _planned(self, pick: Pick, inputs: Inputs) -> Plan:
        """Made anew now and then, so that the sample is not of the same requests for ever."""
        plan = self._plan
        if plan is not None and plan.uses < MAX_USES and plan.is_for(pick):
            plan.uses += 1
            return plan
        groups = groups_of(pick, self._stash_rows, self._rng)
        dtypes = {
            "row": self._dtype,
            "token": str(inputs.token_ids_T.dtype).removeprefix("torch."),
            "position": str(inputs.positions_T.dtype).removeprefix("torch."),
        }
        self._plan = Plan(pick, groups, layout_of(pick, groups, self._width, dtypes))
        return self._plan

    def _room(self, pick: Pick, nbytes: int) -> Region | None:
        if self._may_wait(pick) and nbytes <= self.arena.nbytes:
            return self.arena.wait(nbytes)
        return self.arena.take(nbytes)

    def _may_wait(self, pick: Pick) -> bool:
        """Only a consumer that asks for it makes tokens wait."""
        names = {name for kind in pick.cast.kinds for name in kind.to}
        return any(self._consumers[name].policy == "block" for name in names)

    def _fill(self, staged: Staged, plan: Plan, inputs: Inputs) -> None:
        num_tokens = len(plan.pick)
        with self._lane.side():
            if plan.index is None:
                pinned = staged.tensor(PICK, "index")
                pinned.numpy()[:] = plan.wanted()
                plan.index = pinned.to(self._tables.device, non_blocking=True, copy=True)
            row_N = plan.index[:num_tokens]
            for name, given in (("token", inputs.token_ids_T), ("position", inputs.positions_T)):
                staged.tensor(PICK, name).copy_(given.index_select(0, row_N), non_blocking=True)
            self._gather(staged, [*_spans(plan.groups)], plan.index[num_tokens:])
            staged.will_be(self._lane.done())

    def _gather(self, staged: Staged, spans: Sequence[_Span], flat: torch.Tensor) -> None:
        """The forward waits until the last row has been read, and not for what comes of them."""
        step = max(PART_VALUES // self._width, 1)
        for first in range(0, len(flat), step):
            rows_MD = self._stash.index_select(0, flat[first : first + step])
            end = first + len(rows_MD)
            if end == len(flat):
                self._lane.left()
            for span in spans:
                low, high = max(span.first, first), min(span.end, end)
                if low < high:
                    part = slice(low - span.first, high - span.first)
                    self._put(staged, span, part, rows_MD[low - first : high - first])

    def _put(self, staged: Staged, span: _Span, part: slice, rows_MD: torch.Tensor) -> None:
        if span.encoder is None:
            bits = rows_MD.view(torch.uint16) if self._dtype == "bfloat16" else rows_MD
            staged.tensor(span.group, "sample")[part].copy_(bits, non_blocking=True)
            return
        for name, encoded in encode(rows_MD, span.encoder).items():
            staged.tensor(span.group, f"rows.{name}")[part].copy_(encoded, non_blocking=True)

    def _take_scores(self, pick: Pick, scores: Scores) -> None:
        found: dict[str, torch.Tensor] = {}
        is_pinned = self._tables.device.type == "cuda"
        with self._lane.side():
            scores.follow(self._lane.handle)
            for probe in {held.hold.probe for held in pick.held}:
                column = scores.column(probe)
                if column is None:
                    continue
                site, slot = column
                scores_T = self._tables.scores_STK[site, : pick.num_tokens, slot].contiguous()
                found[probe] = torch.empty(pick.num_tokens, pin_memory=is_pinned)
                found[probe].copy_(scores_T, non_blocking=True)
            self._lane.left()
            wait = self._lane.done()
        self._collector.put(Scored(pick.held, found, wait))


def _spans(groups: Sequence[Group]) -> Iterator[_Span]:
    """In the order in which their places lie in the index."""
    first = 0
    for number, group in enumerate(groups):
        middle = first + len(group.flat_M)
        yield _Span(first, middle, number, group.encoder)
        first = middle + len(group.sample_K)
        yield _Span(middle, first, number, None)
