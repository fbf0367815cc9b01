"""The worker's listener for scores: it publishes every step to the ring.

Runs in: the worker, one per engine. The order of calls in a step is the order in which the engine
does things: `begin` (requests come and go), `place` (the runner laid out the batch), `end` (the
forward is queued on the device).
"""

from __future__ import annotations

import os
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Final

import numpy as np
from numpy.typing import NDArray

from clairai.engine.publish.bank_history import BankHistory
from clairai.engine.publish.ring_room import RingRoom
from clairai.engine.publish.ring_setup import NUM_STEPS, largest_step_nbytes, open_ring
from clairai.engine.publish.step_extension import load_step_extension
from clairai.engine.publish.step_rows import RowBuilder, StepRows
from clairai.engine.score.score_tables import ScoreTables
from clairai.engine.steer.steering_plan import SteeringPlan
from clairai.engine.step import (
    ForwardInputs,
    NewRequest,
    RequestErrors,
    RequestMark,
    StepBatch,
    try_each,
)
from clairai.fields.request_fields import new_stream_id
from clairai.local.private_socket import runtime_dir
from clairai.local.shared_buffer import BufferCopier
from clairai.probe.bank import EngineBank
from clairai.ring.layout import RingShape
from clairai.ring.server import RingServer
from clairai.ring.writer import new_epoch
from clairai.settings import Settings
from clairai.spool.launch import SpoolLauncher
from clairai.wire import control_messages, ring_messages

MAX_STREAMS_KEPT: Final = 1 << 16
MAX_STREAMS_SPOOLED: Final = 1 << 20  # as many as one call of LLM.generate may have


@dataclass(frozen=True)
class WorkerInfo:
    """What readers are told about the engine."""

    model: str
    vllm: str
    points: tuple[str, ...]
    max_requests: int = 1024  # at once
    weights: int | None = None  # version that it starts with; None: its weights cannot change
    engine: str = ""  # the same for all cores of an engine that has several


class StepPublisher:
    """Knows the requests, the bank and the ring; one of the listeners of every step."""

    def __init__(
        self, settings: Settings, tables: ScoreTables, bank: EngineBank, info: WorkerInfo
    ) -> None:
        self.tables, self.info, self.bank = tables, info, bank
        self.weights = info.weights
        self.weights_listeners: list[Callable[[int], None]] = []  # who else hears of new weights
        self.copier = BufferCopier()  # of rows that come in shared memory
        self._builder = RowBuilder(load_step_extension())
        self._is_serving = False
        self._is_announced = False  # this step
        self._is_lost = False  # this step was placed as one of no request
        self.num_steps_lost = 0  # since the start, by errors of our own
        self._rows: StepRows | None = None  # of this step
        # By the request's id: its stream, and how many records there were before its first.
        self._streams: OrderedDict[str, tuple[int, int]] = OrderedDict()
        self._first_weights: OrderedDict[int, int] = OrderedDict()  # by stream
        self._banks = BankHistory()
        self._open_ring(settings)
        self.tables.load(bank)
        self._serve_bank(bank)
        spooled = settings.spool_settings
        self._spool = None if spooled is None else SpoolLauncher(self.server.path, spooled)
        if self._spool is not None:
            self._publisher.set_limit(RingRoom(self._ring.shape, self._spool).find_limit)

    def _open_ring(self, settings: Settings) -> None:
        epoch = self.epoch = new_epoch()
        ring = self._ring = open_ring(settings, self.tables, self.info.max_requests, epoch)
        welcome = ring_messages.Welcome(
            wire_version=ring_messages.WIRE_VERSION,
            epoch=epoch,
            pid=os.getpid(),
            model=self.info.model,
            vllm=self.info.vllm,
            home=ring.memory.home,
            nbytes=ring.shape.nbytes,
            slots=ring.shape.slots,
            slot_bytes=ring.shape.slot_bytes,
            points=self.info.points,
            handle=ring.memory.handle,
            gpu=ring.memory.uuid,
            address=ring.memory.address,
            engine=self.info.engine,
        )
        folder = runtime_dir(settings.runtime_dir)
        self.server = RingServer(folder, ring.memory, welcome, self.describe_bank)
        self._publisher, self.forwards = ring.publisher, ring.forwards
        self.repeat_path = ring.publisher.repeat_path

    @property
    def ring_shape(self) -> RingShape:
        return self._ring.shape

    def find_ring_problem(self) -> str | None:
        """What is lost for certain, in words; None if every step fits the ring."""
        step_nbytes, nbytes = largest_step_nbytes(self.tables), self.ring_shape.nbytes
        if step_nbytes <= nbytes:
            return None
        return (
            f"clairai: a step of {self.tables.max_tokens} tokens and a full bank has "
            f"{step_nbytes >> 20} MiB of scores, the ring has {nbytes >> 20} MiB: rows of such a "
            f"step are lost; raise ring_mib to {NUM_STEPS * step_nbytes >> 20}, or lower capacity "
            f"or max_num_batched_tokens"
        )

    def install(self, bank: EngineBank) -> EngineBank:
        """Score with this bank from the next step on; returns it with the version it has here."""
        self.repeat_path.is_on = False
        self._publisher.flush()  # until then the last steps still read the old one
        try:
            self.tables.load(bank)
        except BaseException:  # such as no memory left: go back to the old bank
            self.tables.load(self.bank)
            raise
        self._serve_bank(replace(bank, version=self.bank.version + 1))
        return self.bank

    def set_weights_version(self, version: int, bank_version: int | None = None) -> None:
        """Rows from now on are of this version of the model's weights; called between steps.

        The bank has the next version then, or the one that is given.
        """
        self._publisher.flush()
        self.weights = version
        self._serve_bank(replace(self.bank, version=bank_version or self.bank.version + 1))
        for listener in self.weights_listeners:
            listener(version)

    def _serve_bank(self, bank: EngineBank) -> None:
        self._banks.add(bank, self.weights, self._publisher.published)
        self.bank, self.repeat_path.is_on = bank, False

    def describe_bank(self, version: int) -> ring_messages.Bank | None:
        """What readers are told of this bank; None if it is not kept any more."""
        return self._banks.describe(version)

    def prepare(self, inputs: ForwardInputs) -> None:
        """Do what would otherwise make the first request wait."""
        self._publisher.prepare(inputs)

    def serve(self) -> None:
        """Start-up is over. Until now steps were vLLM's own warm-up and belonged to no request."""
        self._publisher.flush()  # a graph that still runs must not find the first header
        self._is_serving = True

    def begin(self, new: Sequence[NewRequest], finished: Sequence[str]) -> RequestErrors:
        if not self._is_serving:
            return {}
        self._publisher.begin_step()
        self._rows, self._is_announced = None, False
        for req_id in finished:
            self._builder.finish_request(req_id)
        return try_each(new, self._add) if new else {}

    def _add(self, request: NewRequest) -> None:
        given = (request.mark, request.prompt_len, request.media, request.num_known)
        self._builder.add_request(request.req_id, *given)
        self._remember(request)

    def drop(self, req_id: str, reason: str) -> None:
        """Its stream ends here: rows that it still forwards get one that nobody asks for."""
        del reason
        if self._is_serving:
            self._builder.finish_request(req_id)
            self._builder.add_request(req_id, RequestMark(new_stream_id()), 0)

    def place_failed(self, batch: StepBatch) -> Sequence[str]:
        """The forward is published as one that belongs to no request; its rows are lost."""
        del batch
        self._lose_step()
        self._is_lost = True
        self._publisher.before_dummy_run()
        return ()

    def end_failed(self, batch: StepBatch | None) -> Sequence[str]:
        del batch
        self._lose_step()
        self._publisher.abandon()
        return ()

    def _lose_step(self) -> None:
        """Readers find the positions of its rows missing, and count them as lost."""
        self.num_steps_lost += 1
        self._rows, self._is_announced = None, False
        self.repeat_path.is_on = False

    def _remember(self, request: NewRequest) -> None:
        stream, first = request.mark.stream, self._publisher.published
        known = self._streams.get(request.request_id)
        if known is not None and known[0] == stream:
            first = known[1]  # another answer to the same request
        self._streams[request.request_id] = (stream, first)
        if len(self._streams) > (MAX_STREAMS_KEPT if self._spool is None else MAX_STREAMS_SPOOLED):
            self._streams.popitem(last=False)
        if self.weights is not None:
            self._first_weights[stream] = self.weights
        if len(self._first_weights) > MAX_STREAMS_KEPT:
            self._first_weights.popitem(last=False)

    def place(self, batch: StepBatch) -> None:
        if not self._is_serving:
            return
        self._rows = self._builder.build(batch)
        self._is_announced = self._publisher.announce(self._rows, self.bank.version)

    def reject(self, rejected_R: NDArray[np.int32]) -> None:
        if self._rows is not None:  # else it is lost
            self._builder.reject(rejected_R)
            self._rows = self._rows.leave_out(rejected_R)

    def end(self, inputs: Callable[[], ForwardInputs]) -> None:
        if self._is_lost:
            self._is_lost = False
            self._publisher.after_dummy_run()
            return
        if self._is_announced:
            self._is_announced = False
            self._publisher.finish(inputs)
            return
        rows = self._builder.build_idle() if self._rows is None else self._rows
        self._rows = None
        if rows.num_tokens or len(rows.events):
            self._publisher.publish(rows, self.bank.version, inputs())

    def can_skip(self) -> bool:
        """True if `repeat_path` announces the next step, should it be like this one."""
        batch = self._builder.repeated
        self._is_announced = batch is not None and self._publisher.start_repeating(batch)
        return self._is_announced

    def amend(self, req_id: str, plan: SteeringPlan | None) -> None:
        """Nothing to do: a request's rows are its own, however it is steered."""

    def before_dummy_run(self) -> None:
        """Its rows are not published, but they overwrite those of the last step."""
        if self._is_serving:
            self._publisher.begin_step()
            self.repeat_path.is_on = False
            self._publisher.before_dummy_run()

    def after_dummy_run(self) -> None:
        if self._is_serving:
            self._publisher.after_dummy_run()

    def flush(self) -> None:
        """Return when every step so far is in the ring."""
        self._publisher.flush()

    def column(self, probe: str) -> tuple[int, int] | None:
        """A probe's site and its slot there, in the bank that serves."""
        found = zip(self.bank.probes, self.bank.slots, strict=True)
        return next((slot for one, slot in found if one.name == probe), None)

    def make_wait(self, stream: int) -> None:
        """Have this stream of the GPU wait until the last step's scores are there."""
        self._publisher.make_wait(stream)

    @property
    def published(self) -> int:
        """Records in the ring, or on their way there."""
        return self._publisher.published

    def keeps_scores(self) -> bool:
        """True if a spool has the rows, also those that the ring has overwritten."""
        return self._spool is not None and self._spool.ensure_running()

    def find_streams(self, request_ids: Sequence[str]) -> control_messages.Streams:
        found = [self._streams.get(request_id, (None, None)) for request_id in request_ids]
        firsts = [first for _, first in found if first is not None]
        return control_messages.Streams(
            tuple(stream for stream, _ in found), min(firsts, default=0), self.published
        )

    def first_weights_of(self, stream: int) -> int | None:
        """Version of the weights of a stream's first forward; None if there was none yet."""
        return self._first_weights.get(stream)

    def close(self) -> None:
        self.repeat_path.is_on = False
        self._publisher.close()
        self.server.close()
        if self._spool is not None:
            self._spool.close()
        self._banks.close()
        self._ring.close()
