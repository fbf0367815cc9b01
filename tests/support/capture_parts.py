"""Consumers, capture plans and batches for tests of captures without an engine."""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from clairai.capture import staging_reader
from clairai.capture.consumers import Policy
from clairai.capture.staging_arena import ArenaRegion
from clairai.engine.capture.capture_plan import CapturePlan, KeepThreshold
from clairai.engine.capture.row_selection import RowSelection
from clairai.engine.capture.staging_layout import StagingPlan
from clairai.engine.step import StepBatch
from clairai.errors import StoreStoppedError
from clairai.store.row_block import RowBlock


@dataclass(frozen=True)
class ToyState:
    name: str = "writing"
    reason: str = ""


@dataclass
class ToyConsumer:
    """A consumer that records its calls, in order."""

    policy: Policy = "drop"
    where: str = "nowhere"
    is_taking: bool = True
    fault: Exception | None = None  # raised by offer
    state: ToyState = field(default_factory=ToyState)
    told: list[Any] = field(default_factory=list)
    blocks: list[RowBlock] = field(default_factory=list)
    lost: dict[int, int] = field(default_factory=dict)
    gate: threading.Event | None = None  # offer waits for it
    is_closed: bool = False

    def begin(
        self, stream: int, *, tags: Mapping[str, Any] | None, steering: Mapping[str, Any] | None
    ) -> None:
        self.told.append(("begin", stream, tags, steering))

    def offer(self, block: RowBlock) -> bool:
        if self.gate is not None:
            assert self.gate.wait(60)
        if self.fault is not None:
            raise self.fault
        if not self.is_taking:
            for stream in block.rows_N["stream"].tolist():
                self.lost[stream] = self.lost.get(stream, 0) + 1
            return False
        self.blocks.append(block)
        self.told.append(("offer", block.point, block.rows_N["position"].tolist()))
        return True

    def finish(self, stream: int) -> None:
        self.told.append(("finish", stream))

    def losses(self, stream: int) -> int:
        return self.lost.pop(stream, 0)

    def flush(self, timeout_s: float) -> None:
        del timeout_s
        if self.state.name != "writing":
            raise StoreStoppedError(self.state.reason)

    def close(self) -> None:
        self.is_closed = True

    def rows(self) -> dict[tuple[int, int, str], list[int]]:
        """Positions by stream, choice and point."""
        found: dict[tuple[int, int, str], list[int]] = {}
        for block in self.blocks:
            for row in block.rows_N:
                key = (int(row["stream"]), int(row["choice"]), block.point)
                found.setdefault(key, []).append(int(row["position"]))
        return found


def capture_plan(
    *,
    points: Sequence[str] = ("post_block.0",),
    ranges: Sequence[tuple[int, int]] = ((0, 2**31 - 1),),
    encoder: str = "raw",
    to: Sequence[str] = ("toy",),
    hold: KeepThreshold | None = None,
    parameters: Mapping[str, int | str] | None = None,
) -> CapturePlan:
    given = parameters or ({"dtype": "float32"} if encoder == "raw" else {})
    return CapturePlan(
        points=tuple(points),
        ranges=tuple(ranges),
        encoder=encoder,
        parameters=tuple(given.items()),
        to=tuple(to),
        hold=hold,
    )


def batch(*requests: tuple[str, int, int]) -> StepBatch:
    """A step with these requests: id, first position and number of tokens of each."""
    ids, starts, counts = zip(*requests, strict=True)
    return StepBatch(list(ids), np.array(counts, np.int32), np.array(starts, np.int32))


def rows_as_read(selection: RowSelection) -> NDArray[np.void]:
    """The rows as the capture writer reads them; the n-th has token n."""
    dtypes = {"row": "float32", "token": "int32", "position": "int64"}
    rng = np.random.default_rng(0)
    plan = StagingPlan(1, selection, stash_rows=64, width=256, dtypes=dtypes, rng=rng)
    message = plan.staged_rows(selection, 1, ArenaRegion(0, 0, 0))
    layout = staging_reader._Layout(plan.layout)
    position_N = layout.positions(message)
    assert np.array_equal(position_N, selection.position_N)
    assert layout.counts() == selection.counts()
    return layout.rows(message, position_N, np.arange(len(selection)))
