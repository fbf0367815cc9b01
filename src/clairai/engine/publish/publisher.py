"""How a step's rows and scores get into the ring.

Runs in: the worker. A CPU engine publishes each step before it goes on (HostPublisher); a GPU
writes the ring itself (device_publisher.py). T = tokens in this step, P = probes.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from clairai.engine.publish.repeat_path import RepeatPath
from clairai.engine.publish.ring_room import NO_LIMIT, FindLimit
from clairai.engine.publish.step_rows import RepeatedBatch, StepRows
from clairai.engine.score.score_tables import ScoreTables
from clairai.engine.step import ForwardInputs
from clairai.ring.writer import RingWriter


class Publisher(Protocol):
    """The one writer of a ring.

    A step is announced before its forward and finished behind it, or else published behind it.
    """

    repeat_path: RepeatPath

    @property
    def published(self) -> int:
        """Records given to the ring so far."""

    @property
    def last_step(self) -> int:
        """Number of the last step: they count from one on."""

    def prepare(self, inputs: ForwardInputs) -> None:
        """Start-up is over: steps with inputs like these will follow."""

    def set_limit(self, find_limit: FindLimit) -> None:
        """Before a step would pass the limit of the ring, ask for the next one."""

    def begin_step(self) -> None:
        """What the last step left behind may be overwritten from here on."""

    def announce(self, rows: StepRows, bank_version: int) -> bool:
        """A step whose forward comes next. False: publish it when that is over."""

    def finish(self, inputs: Callable[[], ForwardInputs]) -> None:
        """The forward of the step that was announced is queued."""

    def start_repeating(self, batch: RepeatedBatch) -> bool:
        """Have `repeat_path` announce steps like the last one. False: it cannot."""

    def publish(self, rows: StepRows, bank_version: int, inputs: ForwardInputs) -> None:
        """A step that was not announced, and whose forward, if it has one, is queued."""

    def abandon(self) -> None:
        """`finish` or `publish` raised: the step's rows are lost, and those of the next are not."""

    def before_dummy_run(self) -> None:
        """A forward that belongs to no request comes next."""

    def after_dummy_run(self) -> None:
        """That forward is queued."""

    def make_wait(self, stream: int) -> None:
        """Have this stream of the GPU wait until the last step is in the ring."""

    def flush(self) -> None:
        """Return when every step so far is in the ring."""

    def close(self) -> None: ...


class ForwardListener(Protocol):
    """Hears how forwards run: one that is a graph can publish its own step."""

    def forward_ran(self, inputs: Callable[[], ForwardInputs]) -> None:
        """A forward ran as Python, and not as a replay of a graph."""

    def capture_publish(self, num_tokens: int) -> None:
        """A graph of a whole forward is being captured, and its last tap has run."""

    def disable_graphs(self) -> None:
        """A graph was captured that does not publish: from now on, none does."""


class HostPublisher:
    """For an engine whose tensors are host memory: every step is published at once."""

    def __init__(self, writer: RingWriter, tables: ScoreTables) -> None:
        self._writer, self._tables = writer, tables
        self._limit = NO_LIMIT
        self._find_limit: FindLimit | None = None
        self.repeat_path = RepeatPath()
        self.last_step = 0

    @property
    def published(self) -> int:
        return self._writer.statistics().published

    def prepare(self, inputs: ForwardInputs) -> None:
        pass

    def set_limit(self, find_limit: FindLimit) -> None:
        self._limit, self._find_limit = 0, find_limit

    def begin_step(self) -> None:
        pass

    def announce(self, rows: StepRows, bank_version: int) -> bool:
        del rows, bank_version
        return False

    def finish(self, inputs: Callable[[], ForwardInputs]) -> None:
        raise AssertionError(f"no step was announced: {inputs}")

    def start_repeating(self, batch: RepeatedBatch) -> bool:
        del batch
        return False

    def publish(self, rows: StepRows, bank_version: int, inputs: ForwardInputs) -> None:
        """Events carry no scores: their columns are NaN."""
        if inputs.drafts is not None:  # of the V2 runner, on a CPU
            rows = rows.leave_out(inputs.drafts.rejected_R.numpy())
        num_tokens, num_events = rows.num_tokens, len(rows.events)
        positions_T, token_ids_T = inputs.positions_T[:num_tokens], inputs.token_ids_T[:num_tokens]
        filled = rows.fill(positions_T.numpy(), token_ids_T.numpy())
        scores_RP = self._tables.gather(num_tokens).numpy()
        if rows.is_kept_T is not None:
            scores_RP = scores_RP[rows.is_kept_T]
        if num_events:
            no_scores = np.full((num_events, scores_RP.shape[1]), np.nan, np.float32)
            scores_RP = np.concatenate([no_scores, scores_RP])
        self._make_room(scores_RP)
        self.last_step += 1
        self._writer.publish(filled, scores_RP, bank_version=bank_version, step=self.last_step)

    def _make_room(self, scores_RP: NDArray[np.float32]) -> None:
        published, num_records = self.published, self._writer.count_records(*scores_RP.shape)
        if published + num_records > self._limit:
            assert self._find_limit is not None
            self._limit = self._find_limit(published, num_records)

    def abandon(self) -> None:
        pass

    def before_dummy_run(self) -> None:
        pass

    def after_dummy_run(self) -> None:
        pass

    def make_wait(self, stream: int) -> None:
        """All is in the ring already, and there is no GPU."""

    def flush(self) -> None:
        pass

    def close(self) -> None:
        pass
