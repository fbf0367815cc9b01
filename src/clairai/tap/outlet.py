"""Takes one step's raw scores where the forward left them; gives finished records to the ring.

T = tokens in this step, P = probes. On a CPU engine the step is published before the engine goes
on. On a GPU the copies are queued behind the forward on its own stream, and a thread publishes them
when they have landed, so that the engine never waits.
"""

from __future__ import annotations

import logging
import queue
import threading
from dataclasses import dataclass
from typing import Final, Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from clairai.probe.columns import Columns
from clairai.ring.writer import RingWriter
from clairai.tap.rows import StepRows

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Finish:
    """What turns raw products into scores: constant for one version of the bank."""

    version: int
    bias_P: NDArray[np.float32]
    is_relu_P: NDArray[np.bool_]
    is_sigmoid_P: NDArray[np.bool_]

    @classmethod
    def of(cls, columns: Columns) -> Finish:
        probes = columns.probes
        return cls(
            version=columns.version,
            bias_P=np.array([p.bias for p in probes], np.float32),
            is_relu_P=np.array([p.activation == "relu" for p in probes], np.bool_),
            is_sigmoid_P=np.array([p.activation == "sigmoid" for p in probes], np.bool_),
        )

    def __call__(self, raw_TP: NDArray[np.float32]) -> NDArray[np.float32]:
        with np.errstate(over="ignore"):  # a row that overflowed in the model scores inf
            scores_TP = raw_TP + self.bias_P
        if self.is_relu_P.any():
            np.maximum(scores_TP, 0, out=scores_TP, where=self.is_relu_P)
        if self.is_sigmoid_P.any():
            # exp(-|z|) never overflows, whatever the score.
            small_TP = np.exp(-np.abs(scores_TP))
            upper_TP = np.where(scores_TP >= 0, np.float32(1), small_TP) / (1 + small_TP)
            np.copyto(scores_TP, upper_TP, where=self.is_sigmoid_P)
        return scores_TP


@dataclass(frozen=True)
class Step:
    """One step on its way out; the tensors may still be in flight."""

    number: int
    rows: StepRows
    finish: Finish
    raw_TP: torch.Tensor
    positions_T: torch.Tensor
    token_ids_T: torch.Tensor


class Outlet(Protocol):
    @property
    def num_failed(self) -> int:
        """Steps that never reached the ring; 0 unless something is broken, and reported."""

    def send(self, step: Step) -> None: ...

    def flush(self) -> None:
        """Return when every step that was sent is in the ring."""

    def close(self) -> None: ...


def publish(writer: RingWriter, step: Step) -> None:
    """Events carry no scores: their columns are NaN."""
    rows = step.rows.fill(step.positions_T.numpy(), step.token_ids_T.numpy())
    scores_TP = step.finish(step.raw_TP.numpy())
    num_events = len(rows) - len(scores_TP)
    if num_events:
        blank = np.full((num_events, scores_TP.shape[1]), np.nan, np.float32)
        scores_TP = np.concatenate([blank, scores_TP])
    writer.publish(rows, scores_TP, bank_version=step.finish.version, step=step.number)


class HostOutlet:
    """For an engine whose tensors are host memory: publish now."""

    num_failed: Final = 0  # a failure here is raised into the step itself

    def __init__(self, writer: RingWriter) -> None:
        self._writer = writer

    def send(self, step: Step) -> None:
        publish(self._writer, step)

    def flush(self) -> None:
        pass

    def close(self) -> None:
        pass


class DeviceOutlet:
    """For a GPU engine: queue the copies on the forward's stream, publish from a thread."""

    def __init__(self, writer: RingWriter) -> None:
        self._writer = writer
        self.num_failed = 0
        self._steps: queue.Queue[tuple[Step, torch.cuda.Event] | None] = queue.Queue()
        self._thread = threading.Thread(target=self._drain, name="clairai-outlet", daemon=True)
        self._thread.start()

    def send(self, step: Step) -> None:
        landed = Step(
            number=step.number,
            rows=step.rows,
            finish=step.finish,
            raw_TP=_to_host(step.raw_TP),
            positions_T=_to_host(step.positions_T),
            token_ids_T=_to_host(step.token_ids_T),
        )
        # pairs with synchronize() in _drain: recorded behind the copies on the same stream
        event = torch.cuda.Event(blocking=True)
        event.record()
        self._steps.put((landed, event))

    def flush(self) -> None:
        self._steps.join()

    def close(self) -> None:
        self._steps.put(None)
        self._thread.join(timeout=10)

    def _drain(self) -> None:
        while (item := self._steps.get()) is not None:
            self._publish(*item)
            self._steps.task_done()
        self._steps.task_done()

    def _publish(self, step: Step, event: torch.cuda.Event) -> None:
        try:
            event.synchronize()  # pairs with record() in send: the host copies are complete
            publish(self._writer, step)
        except Exception:
            # The thread must live: a dead one would lose every later step in silence.
            self.num_failed += 1
            logger.exception("clairai: step %d could not be published", step.number)


def _to_host(tensor: torch.Tensor) -> torch.Tensor:
    """A pinned copy; torch hands the buffer to no one else until the copy has run."""
    host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
    return host.copy_(tensor, non_blocking=True)
