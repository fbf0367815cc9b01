"""Takes captured rows; has them taken to their consumers by a thread of the engine's own process.

For consumers that must be here, such as a function of the user's.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from functools import partial

from clairai.capture import pipe_messages
from clairai.capture.collector import Collector, OriginOf
from clairai.capture.consumers import Consumer, EngineInfo
from clairai.capture.results import CaptureResults
from clairai.capture.staging_arena import StagingArena
from clairai.capture.staging_reader import AnswerId, StagingReader, Wait
from clairai.engine.capture.capture_plan import CapturePlan
from clairai.store.codecs.base import Encoder
from clairai.store.row_block import Origin


class InProcessBackend:
    """A collector, and how tickets are read for it."""

    is_remote = False
    trouble = ""

    def __init__(
        self,
        consumers: Mapping[str, Consumer],
        collector: Collector,
        about: EngineInfo,
        arena: StagingArena,
    ) -> None:
        self._consumers, self.collector = consumers, collector
        self._about, self.arena = about, arena
        self._reader = StagingReader(arena)

    @property
    def results(self) -> CaptureResults:
        return self.collector.results

    @property
    def pending_nbytes(self) -> int:
        return self.collector.pending_nbytes

    def may_block(self, names: Iterable[str]) -> bool:
        return any(self._consumers[name].policy == "block" for name in names)

    def begin(self, seat: AnswerId, order: CapturePlan) -> None:
        self.collector.begin(seat, order)

    def amend(self, seat: AnswerId, steering: str) -> None:
        self.collector.amend(seat, steering)

    def finish(self, seat: AnswerId) -> None:
        self.collector.finish(seat)

    def relabel(self, weights: str) -> None:
        self.collector.relabel(origin_for(replace(self._about, weights=weights)))

    def commit(self) -> None:
        self.collector.commit()

    def plan(self, told: pipe_messages.StagingPlanMessage) -> None:
        self._reader.plan(told)

    def put(self, told: pipe_messages.StagedMessage, wait: Wait) -> None:
        self.collector.put(self._reader.taken(told, wait))

    def post(self) -> None:
        pass

    def close(self) -> None:
        self.collector.close()
        self.arena.close()


def origin_for(about: EngineInfo) -> OriginOf:
    """What all rows of an encoder have in common."""
    return partial(_make_origin, about)


def _make_origin(about: EngineInfo, encoder: Encoder) -> Origin:
    return Origin.of(
        model=about.model,
        weights=about.weights,
        dtype=about.dtype,
        width=about.width,
        encoder=encoder.name,
        parameters=encoder.parameters,
    )
