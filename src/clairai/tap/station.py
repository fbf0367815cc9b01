"""Takes what the worker tells of each step; gives records in the ring. One per engine worker.

The order of calls in a step is the order in which the engine does things: `begin` (requests come
and go), `place` (the runner laid out the batch), `end` (the forward is on its way).
"""

from __future__ import annotations

import os
from collections import OrderedDict
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Final

import torch

from clairai import wire
from clairai.probe.columns import Columns
from clairai.ring.handshake import RingServer, runtime_dir
from clairai.ring.layout import RingShape
from clairai.ring.memory import HostMemory
from clairai.ring.writer import RingWriter, new_epoch
from clairai.settings import Settings
from clairai.tap.outlet import DeviceOutlet, Finish, HostOutlet, Outlet, Step
from clairai.tap.rows import Batch, Mark, RowBook, StepRows
from clairai.tap.tables import Tables

REMEMBERED_STREAMS: Final = 1 << 16
REMEMBERED_BANKS: Final = 256


@dataclass(frozen=True)
class NewRequest:
    """A request as it first reaches the worker."""

    req_id: str
    request_id: str  # what the caller of vLLM knows it by
    mark: Mark
    prompt_len: int


@dataclass(frozen=True)
class Inputs:
    """The forward's own inputs: device tensors, at least as long as the step."""

    positions_T: torch.Tensor
    token_ids_T: torch.Tensor


class Station:
    """The worker's side of clairai: who is in the batch, what was scored, where it goes."""

    def __init__(self, settings: Settings, tables: Tables, columns: Columns, about: About) -> None:
        self.tables = tables
        self.about = about
        self._book = RowBook()
        self._is_serving = False
        self._step_number = 0
        self._rows: StepRows | None = None
        self._streams: OrderedDict[str, int] = OrderedDict()
        self._banks: OrderedDict[int, wire.Bank] = OrderedDict()
        self._open_ring(settings, columns)
        self.install(columns)

    def _open_ring(self, settings: Settings, columns: Columns) -> None:
        num_columns = len(self.tables.sites) * columns.capacity
        shape = RingShape.for_budget(settings.ring_mib << 20, num_columns)
        epoch = self.epoch = new_epoch()
        self._memory = HostMemory.create(shape.nbytes)
        self.writer = RingWriter(self._memory, shape, epoch)
        welcome = wire.Welcome(
            wire_version=wire.WIRE_VERSION,
            epoch=epoch,
            pid=os.getpid(),
            model=self.about.model,
            vllm=self.about.vllm,
            home="host",
            nbytes=shape.nbytes,
            slots=shape.slots,
            slot_bytes=shape.slot_bytes,
            points=self.about.points,
        )
        folder = runtime_dir(settings.runtime_dir)
        self.server = RingServer(folder, self._memory, welcome, self._banks.get)
        is_host = self.tables.device.type == "cpu"
        self._outlet: Outlet = HostOutlet(self.writer) if is_host else DeviceOutlet(self.writer)

    def install(self, columns: Columns) -> None:
        """Make this the bank of every step from now on."""
        self.tables.load(columns)
        self.columns = columns
        self._finish = Finish.of(columns)
        # Known to readers before the first record that carries it is published.
        self._banks[columns.version] = columns.bank()
        while len(self._banks) > REMEMBERED_BANKS:
            self._banks.popitem(last=False)

    def serve(self) -> None:
        """Start-up is over. Until now steps were vLLM's own warm-up: nobody's rows."""
        self._is_serving = True

    def begin(self, new: Iterable[NewRequest], finished: Iterable[str]) -> None:
        if not self._is_serving:
            return
        for req_id in finished:
            self._book.close(req_id)
        for request in new:
            self._book.open(request.req_id, request.mark, request.prompt_len)
            self._streams[request.request_id] = request.mark.stream
        while len(self._streams) > REMEMBERED_STREAMS:
            self._streams.popitem(last=False)
        self._rows = None

    def place(self, batch: Batch) -> None:
        if self._is_serving:
            self._rows = self._book.step(batch)

    def end(self, inputs: Callable[[], Inputs]) -> None:
        rows = self._book.idle() if self._rows is None else self._rows
        self._rows = None
        if rows.num_tokens or len(rows.events):
            self._send(rows, inputs())

    def _send(self, rows: StepRows, inputs: Inputs) -> None:
        num_tokens = rows.num_tokens
        self._step_number += 1
        self._outlet.send(
            Step(
                number=self._step_number,
                rows=rows,
                finish=self._finish,
                raw_TP=self.tables.gather(num_tokens),
                positions_T=inputs.positions_T[:num_tokens],
                token_ids_T=inputs.token_ids_T[:num_tokens],
            )
        )

    def flush(self) -> None:
        """Return when every step so far is in the ring: what a caller asks for next is there."""
        self._outlet.flush()

    @property
    def num_failed(self) -> int:
        return self._outlet.num_failed

    def stream_of(self, request_id: str) -> int | None:
        return self._streams.get(request_id)

    def close(self) -> None:
        self._outlet.close()
        self.server.close()
        self._memory.close()


@dataclass(frozen=True)
class About:
    """What readers are told about the engine."""

    model: str
    vllm: str
    points: tuple[str, ...]
