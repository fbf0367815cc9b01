"""Takes wanted rows where the forward left them; has them encoded there and brought to the host.

N = wanted tokens, M = rows of one encoder (tokens times points), S = sites, R = rows of the stash,
D = model width, T = tokens of the step. Memory on the device is bounded: rows are gathered and
encoded at most `PART_VALUES` numbers at a time.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Final

import numpy as np
import torch

from clairai.capture.collector import Collector
from clairai.capture.consumers import Consumer
from clairai.capture.resolve import PART_OF_STAGING
from clairai.tap.arena import Arena
from clairai.tap.encode_twin import encode_twin
from clairai.tap.lanes import lane_for
from clairai.tap.outlet import Inputs
from clairai.tap.picks import Pick
from clairai.tap.staged import PICK, Group, Scored, Staged, groups_of, layout_of
from clairai.tap.tables import Tables

PART_VALUES: Final = 1 << 23  # 64 tokens at 32 points of a model 4096 wide
NO_ROOM: Final = (
    "rows came faster than their consumers took them; raise staging_mib, or choose the policy block"
)

ColumnOf = Callable[[str], tuple[int, int] | None]  # a probe's site and its place there


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

    def begin(self) -> None:
        """A step begins: from here on its forward may write over the last one's rows."""
        self._lane.begin()

    def take(self, pick: Pick, inputs: Inputs, column_of: ColumnOf) -> None:
        if pick.held:
            self._take_scores(pick, column_of)
        if not len(pick):
            return
        per_token = max(kind.nbytes(self._width) for kind in pick.cast.kinds)
        for part in pick.cut(max(self.arena.nbytes // PART_OF_STAGING // per_token // 2, 1)):
            self._take(part, inputs)

    def _take(self, pick: Pick, inputs: Inputs) -> None:
        groups = groups_of(pick, self._stash_rows, self._rng)
        dtypes = {
            "row": self._dtype,
            "token": str(inputs.token_ids_T.dtype).removeprefix("torch."),
            "position": str(inputs.positions_T.dtype).removeprefix("torch."),
        }
        layout = layout_of(pick, groups, self._width, dtypes)
        if self._may_wait(pick):
            region = self.arena.wait(layout.nbytes)
        else:
            found = self.arena.take(layout.nbytes)
            if found is None:
                for seat, count in pick.counts().items():
                    self._collector.results.dropped(seat, count, NO_ROOM)
                return
            region = found
        staged = Staged(pick, groups, layout, self.arena, region)
        staged.dtype = self._dtype
        self._fill(staged, pick, groups, inputs)
        self._collector.put(staged)

    def _may_wait(self, pick: Pick) -> bool:
        """Only a consumer that asks for it makes tokens wait."""
        names = {name for kind in pick.cast.kinds for name in kind.to}
        return any(self._consumers[name].policy == "block" for name in names)

    def _fill(self, staged: Staged, pick: Pick, groups: list[Group], inputs: Inputs) -> None:
        index = staged.tensor(PICK, "index")
        wanted = [pick.row_N]
        for group in groups:
            wanted += [group.flat_M, group.flat_M[group.sample_K]]
        index.numpy()[:] = np.concatenate(wanted)
        with self._lane.side():
            on_device = index.to(self._tables.device, non_blocking=True)
            row_N, at = on_device[: len(pick)], len(pick)
            for name, given in (("token", inputs.token_ids_T), ("position", inputs.positions_T)):
                staged.tensor(PICK, name).copy_(given.index_select(0, row_N), non_blocking=True)
            for number, group in enumerate(groups):
                end = at + len(group.flat_M) + len(group.sample_K)
                self._encode(staged, number, group, on_device[at:end])
                at = end
            self._lane.left()
            staged.will_be(self._lane.done())

    def _encode(self, staged: Staged, number: int, group: Group, flat: torch.Tensor) -> None:
        """Rows of one encoder into its arrays, then the sample as it is."""
        num_rows, step = len(group.flat_M), max(PART_VALUES // self._width, 1)
        layout = group.encoder.layout(self._width)
        targets = {name: staged.tensor(number, f"rows.{name}") for name in layout}
        for first in range(0, num_rows, step):
            end = min(first + step, num_rows)
            rows_MD = self._stash.index_select(0, flat[first:end])
            for name, encoded in encode_twin(rows_MD, group.encoder).items():
                targets[name][first:end].copy_(encoded, non_blocking=True)
        sample_KD = self._stash.index_select(0, flat[num_rows:])
        if self._dtype == "bfloat16":  # numpy has none: its bits
            sample_KD = sample_KD.view(torch.uint16)
        staged.tensor(number, "sample").copy_(sample_KD, non_blocking=True)

    def _take_scores(self, pick: Pick, column_of: ColumnOf) -> None:
        scores: dict[str, torch.Tensor] = {}
        is_pinned = self._tables.device.type == "cuda"
        with self._lane.side():
            for probe in {held.hold.probe for held in pick.held}:
                column = column_of(probe)
                if column is None:
                    continue
                site, slot = column
                found_T = self._tables.scores_STK[site, : pick.num_tokens, slot].contiguous()
                scores[probe] = torch.empty(pick.num_tokens, pin_memory=is_pinned)
                scores[probe].copy_(found_T, non_blocking=True)
            self._lane.left()
            wait = self._lane.done()
        self._collector.put(Scored(pick.held, scores, wait))
