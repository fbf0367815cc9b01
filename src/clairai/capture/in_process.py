"""The capture backend on a thread of the worker.

For consumers that must run in the engine's process, such as a function of the user's.

Runs in: the worker.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from clairai.capture.collector import Collector
from clairai.capture.consumers import Consumer
from clairai.capture.pipe_messages import StagedMessage, StagingLayout
from clairai.capture.results import CaptureResults
from clairai.capture.staging_arena import StagingArena
from clairai.capture.staging_reader import StagingReader, Wait
from clairai.engine.capture.capture_plan import AnswerId, CapturePlan


class InProcessBackend:
    """A collector, and a reader of the arena for it."""

    is_remote = False
    failure = lasting_failure = ""

    def __init__(
        self, consumers: Mapping[str, Consumer], collector: Collector, arena: StagingArena
    ) -> None:
        self._consumers, self.collector, self.arena = consumers, collector, arena
        self._reader = StagingReader(arena)

    @property
    def results(self) -> CaptureResults:
        return self.collector.results

    @property
    def pending_nbytes(self) -> int:
        return self.collector.pending_nbytes

    def may_block(self, consumers: Iterable[str]) -> bool:
        return any(self._consumers[name].policy == "block" for name in consumers)

    def begin(self, answer: AnswerId, plan: CapturePlan) -> None:
        self.collector.begin(answer, plan)

    def amend(self, answer: AnswerId, steering: str) -> None:
        self.collector.amend(answer, steering)

    def finish(self, answer: AnswerId) -> None:
        self.collector.finish(answer)

    def set_weights(self, weights: str) -> None:
        self.collector.set_weights(weights)

    def commit(self) -> None:
        self.collector.commit()

    def set_layout(self, layout: StagingLayout) -> None:
        self._reader.set_layout(layout)

    def put(self, message: StagedMessage, wait: Wait) -> None:
        self.collector.put(self._reader.open(message, wait))

    def send(self) -> None:
        pass

    def close(self) -> None:
        self.collector.close()
        self.arena.close()
