"""Takes one step's scores where the forward left them; gives records to the ring.

T = tokens in this step, P = probes. On a CPU engine the step is published before the engine goes
on, here; a GPU writes the ring itself (commit.py).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from clairai.engine.publish.repeat_path import NoRepeatPath, RepeatPath
from clairai.engine.publish.step_rows import RepeatedBatch, StepRows
from clairai.engine.score.score_tables import ScoreTables
from clairai.engine.step import ForwardInputs
from clairai.ring.writer import RingWriter


@dataclass(frozen=True)
class FinishedStep:
    """One step on its way out."""

    number: int
    rows: StepRows
    bank_version: int
    inputs: ForwardInputs


class Publisher(Protocol):
    repeat_path: RepeatPath

    @property
    def published(self) -> int:
        """Records given to the ring so far."""

    @property
    def last_step(self) -> int:
        """The number of the last one."""

    def prepare(self, inputs: ForwardInputs) -> None:
        """Start-up is over: steps with inputs like these will follow."""

    def begin(self) -> None:
        """A step begins: what the last one left behind may be overwritten from here on."""

    def note(self, number: int, rows: StepRows, bank_version: int) -> bool:
        """A step whose forward comes next; False: send it when that is over."""

    def again(self, number: int) -> bool:
        """The last note once more, with the next rows of its requests; False: it was not."""

    def settle(self, inputs: Callable[[], ForwardInputs]) -> None:
        """The forward of what was noted is on its way."""

    def repeat(self, pace: RepeatedBatch) -> bool:
        """Have `steady` note steps that keep the pace of the last one; False: it cannot."""

    def send(self, step: FinishedStep) -> None:
        """A step that was not noted."""

    def before_dummy_run(self) -> None:
        """A forward of nobody's rows comes next."""

    def after_dummy_run(self) -> None:
        """It is on its way."""

    def follow(self, stream: int) -> None:
        """Have this stream of the GPU wait until the last step that was sent is in the ring."""

    def flush(self) -> None:
        """Return when every step that was sent is in the ring."""

    def close(self) -> None: ...


class ForwardListener(Protocol):
    """Is told how forwards run: one that is a graph can publish its own step."""

    def forwarded(self, inputs: Callable[[], ForwardInputs]) -> None:
        """One ran as Python: not as a graph that was captured before."""

    def captured(self, num_tokens: int) -> None:
        """A graph of a whole one is being captured: here its step is to be published."""

    def disable_graphs(self) -> None:
        """A graph of a whole one was captured without that: then no graph publishes any more."""


class HostPublisher:
    """For an engine whose tensors are host memory: publish now."""

    def __init__(self, writer: RingWriter, tables: ScoreTables) -> None:
        self._writer = writer
        self._tables = tables
        self.repeat_path: RepeatPath = NoRepeatPath()
        self.last_step = 0

    @property
    def published(self) -> int:
        return self._writer.statistics().published

    def prepare(self, inputs: ForwardInputs) -> None:
        pass

    def begin(self) -> None:
        pass

    def send(self, step: FinishedStep) -> None:
        """Events carry no scores: their columns are NaN."""
        num_tokens, inputs = step.rows.num_tokens, step.inputs
        positions_T, token_ids_T = inputs.positions_T[:num_tokens], inputs.token_ids_T[:num_tokens]
        rows = step.rows.fill(positions_T.numpy(), token_ids_T.numpy())
        scores_RP = self._tables.gather(num_tokens).numpy()
        num_events = len(step.rows.events)
        if num_events:
            blank = np.full((num_events, scores_RP.shape[1]), np.nan, np.float32)
            scores_RP = np.concatenate([blank, scores_RP])
        self.last_step = step.number
        self._writer.publish(rows, scores_RP, bank_version=step.bank_version, step=step.number)

    def note(self, number: int, rows: StepRows, bank_version: int) -> bool:
        del number, rows, bank_version
        return False

    def again(self, number: int) -> bool:
        del number
        return False

    def settle(self, inputs: Callable[[], ForwardInputs]) -> None:
        raise AssertionError(f"nothing was noted: {inputs}")

    def repeat(self, pace: RepeatedBatch) -> bool:
        del pace
        return False

    def before_dummy_run(self) -> None:
        """Nothing looks for it."""

    def after_dummy_run(self) -> None:
        pass

    def follow(self, stream: int) -> None:
        """It is there already, and there is no GPU."""

    def flush(self) -> None:
        pass

    def close(self) -> None:
        pass
