"""Takes what the worker tells of each step; gives records in the ring. One per engine worker.

The order of calls in a step is the order in which the engine does things: `begin` (requests come
and go), `place` (the runner laid out the batch), `end` (the forward is on its way).
"""

from __future__ import annotations

import os
import threading
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Final

from clairai.engine.publish.ring_setup import open_ring
from clairai.engine.publish.step_extension import load_step_extension
from clairai.engine.publish.step_rows import RowBuilder, StepRows
from clairai.engine.score.score_tables import ScoreTables
from clairai.engine.steer.steering_plan import SteeringPlan
from clairai.engine.step import ForwardInputs, NewRequest, StepBatch
from clairai.local.private_socket import runtime_dir
from clairai.local.shared_buffer import BufferCopier
from clairai.probe.bank import EngineBank
from clairai.ring.server import RingServer
from clairai.ring.writer import new_epoch
from clairai.settings import Settings
from clairai.wire import control_messages, ring_messages

MAX_STREAMS_KEPT: Final = 1 << 16
MAX_BANKS_KEPT: Final = 256
DESCRIBE_DELAY_S: Final = 0.02


class StepPublisher:
    """The worker's side of clairai: who is in the batch, what was scored, where it goes."""

    def __init__(
        self, settings: Settings, tables: ScoreTables, columns: EngineBank, about: EngineInfo
    ) -> None:
        self.tables = tables
        self.about = about
        self.copier = BufferCopier()  # of rows that come in shared memory
        self._builder = RowBuilder(load_step_extension())
        self._is_serving = False
        self._is_announced = False  # this step
        self._rows: StepRows | None = None  # of this step
        self._streams: OrderedDict[str, tuple[int, int]] = OrderedDict()  # and its first record
        self._began: OrderedDict[int, int] = OrderedDict()  # streams, and with which weights
        self._describing = ThreadPoolExecutor(1, thread_name_prefix="clairai-bank")
        self._settling: deque[BankDescription] = deque()  # banks that were replaced
        self._banks: OrderedDict[int, BankDescription] = OrderedDict()
        self._known_since = 0  # records there were when the last bank came
        self.weights = about.weights
        self.weights_listeners: list[Callable[[int], None]] = []  # who else is told of new weights
        self._open_ring(settings)
        self.columns = columns
        self.tables.load(columns)
        self._make_known(columns)

    def _open_ring(self, settings: Settings) -> None:
        epoch = self.epoch = new_epoch()
        home = self._home = open_ring(settings, self.tables, self.about.max_requests, epoch)
        welcome = ring_messages.Welcome(
            wire_version=ring_messages.WIRE_VERSION,
            epoch=epoch,
            pid=os.getpid(),
            model=self.about.model,
            vllm=self.about.vllm,
            home=home.memory.home,
            nbytes=home.shape.nbytes,
            slots=home.shape.slots,
            slot_bytes=home.shape.slot_bytes,
            points=self.about.points,
            handle=home.memory.handle,
            gpu=home.memory.uuid,
            address=home.memory.address,
        )
        folder = runtime_dir(settings.runtime_dir)
        self.server = RingServer(folder, home.memory, welcome, self.bank)
        self._publisher, self.forwards = home.publisher, home.forwards
        self.repeat_path = home.publisher.repeat_path

    def install(self, columns: EngineBank) -> EngineBank:
        """Make this the bank of every step from now on; gives it with the version it has here."""
        self.repeat_path.is_on = False
        self._publisher.flush()  # until then the last steps still read the old one
        try:
            self.tables.load(columns)
        except BaseException:  # such as no memory left: the old bank is whole
            self.tables.load(self.columns)
            raise
        self._make_known(replace(columns, version=self.columns.version + 1))
        return self.columns

    def set_weights_version(self, version: int) -> None:
        """Rows from now on are of these weights of the model; runs between steps."""
        self._publisher.flush()
        self.weights = version
        self._make_known(replace(self.columns, version=self.columns.version + 1))
        for follower in self.weights_listeners:
            follower(version)

    def bank(self, version: int) -> ring_messages.Bank | None:
        """What readers are told of this bank; None if it is not remembered any more."""
        described = self._banks.get(version)
        return None if described is None else described.bank()

    def _make_known(self, columns: EngineBank) -> None:
        """To readers before the first record that carries its version is published."""
        self._let_go()
        self._known_since = self._publisher.published
        self.columns = columns
        self.repeat_path.is_on = False
        self._banks[columns.version] = BankDescription(columns, self.weights)
        while len(self._banks) > MAX_BANKS_KEPT:
            self._banks.popitem(last=False)

    def _let_go(self) -> None:
        """Of the numbers of the bank that is replaced; runs when its last record is published."""
        before = self._banks.get(self.columns.version)
        if before is None:
            return
        if self._publisher.published == self._known_since:  # no record has its version: nobody asks
            del self._banks[self.columns.version]
            return
        self._settling.append(before)  # make the words
        self._describing.submit(self._settle)

    def _settle(self) -> None:
        """Not at once: who changed the bank waits for an answer, and this would delay it."""
        if not self._settling:  # the last one did it
            return
        time.sleep(DESCRIBE_DELAY_S)
        while self._settling:
            self._settling.popleft().bank()

    def prepare(self, inputs: ForwardInputs) -> None:
        """Do what would otherwise make the first request wait."""
        self._publisher.prepare(inputs)

    def serve(self) -> None:
        """Start-up is over. Until now steps were vLLM's own warm-up: nobody's rows."""
        self._publisher.flush()  # a graph that is still replayed must not find the first brief
        self._is_serving = True

    def begin(self, new: Sequence[NewRequest], finished: Sequence[str]) -> None:
        if not self._is_serving:
            return
        self._publisher.begin_step()
        self._rows, self._is_announced = None, False
        if not new and not finished:
            return
        for req_id in finished:
            self._builder.finish_request(req_id)
        for request in new:
            self._builder.add_request(request.req_id, request.mark, request.prompt_len)
            self._remember(request)

    def _remember(self, request: NewRequest) -> None:
        stream, first = request.mark.stream, self._publisher.published
        known = self._streams.get(request.request_id)
        if known is not None and known[0] == stream:
            first = known[1]  # another answer to the same request
        self._streams[request.request_id] = (stream, first)
        if len(self._streams) > MAX_STREAMS_KEPT:
            self._streams.popitem(last=False)
        if self.weights is not None:
            self._began[request.mark.stream] = self.weights
        if len(self._began) > MAX_STREAMS_KEPT:
            self._began.popitem(last=False)

    def place(self, batch: StepBatch) -> None:
        if not self._is_serving:
            return
        self._rows = self._builder.build(batch)
        self._is_announced = self._publisher.announce(self._rows, self.columns.version)

    def end(self, inputs: Callable[[], ForwardInputs]) -> None:
        if self._is_announced:
            self._is_announced = False
            self._publisher.finish(inputs)
            return
        rows = self._builder.build_idle() if self._rows is None else self._rows
        self._rows = None
        if rows.num_tokens or len(rows.events):
            self._publisher.publish(rows, self.columns.version, inputs())

    def can_skip(self) -> bool:
        """True if `repeat_path` announces the next step, should it be like this one."""
        batch = self._builder.repeated
        self._is_announced = batch is not None and self._publisher.start_repeating(batch)
        return self._is_announced

    def amend(self, req_id: str, plan: SteeringPlan | None) -> None:
        """Whose rows they are does not depend on what steers them."""

    def before_dummy_run(self) -> None:
        """Its rows are not published, but written to where those of the last step are."""
        if self._is_serving:
            self._publisher.begin_step()
            self.repeat_path.is_on = False
            self._publisher.before_dummy_run()

    def after_dummy_run(self) -> None:
        if self._is_serving:
            self._publisher.after_dummy_run()

    def flush(self) -> None:
        """Return when every step so far is in the ring: what a caller asks for next is there."""
        self._publisher.flush()

    def column(self, probe: str) -> tuple[int, int] | None:
        """A probe's site and its place there, in the bank as it is now."""
        found = zip(self.columns.probes, self.columns.slots, strict=True)
        return next((slot for one, slot in found if one.name == probe), None)

    def follow(self, stream: int) -> None:
        """Have this stream of the GPU wait until the last step's scores are there."""
        self._publisher.make_wait(stream)

    @property
    def published(self) -> int:
        """Records in the ring, or on their way there."""
        return self._publisher.published

    def find_streams(self, request_ids: Sequence[str]) -> control_messages.Streams:
        found = [self._streams.get(request_id, (None, None)) for request_id in request_ids]
        firsts = [first for _, first in found if first is not None]
        return control_messages.Streams(
            tuple(stream for stream, _ in found), min(firsts, default=0)
        )

    def first_weights_of(self, stream: int) -> int | None:
        """Version of the weights of a stream's first forward; None if there was none yet."""
        return self._began.get(stream)

    def close(self) -> None:
        self.repeat_path.is_on = False
        self._publisher.close()
        self.server.close()
        self._describing.shutdown()
        self._home.close()


class BankDescription:
    """A bank in words, made when they are asked for: digests of hundreds of probes take a while."""

    def __init__(self, columns: EngineBank, weights: int | None) -> None:
        self._columns: EngineBank | None = columns
        self._weights = weights
        self._bank: ring_messages.Bank | None = None
        self._making = threading.Lock()  # readers ask on the server's thread

    def bank(self) -> ring_messages.Bank:
        with self._making:
            if self._columns is not None:
                self._bank, self._columns = self._columns.to_message(self._weights), None
            assert self._bank is not None
            return self._bank


@dataclass(frozen=True)
class EngineInfo:
    """What readers are told about the engine."""

    model: str
    vllm: str
    points: tuple[str, ...]
    max_requests: int = 1024  # at once
    weights: int | None = None  # version of those it is started with; None: it takes no others
