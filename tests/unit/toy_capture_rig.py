"""Takes consumers; gives a worker's captures on tables of their own, step by step."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch

from clairai import wire_capture
from clairai.capture.collector import Collector
from clairai.capture.guarded import Guarded
from clairai.capture.order import Order
from clairai.store.codecs.base import Encoder
from clairai.store.rows import Origin
from clairai.tap.capture import Capture
from clairai.tap.outlet import Inputs
from clairai.tap.rows import Mark
from clairai.tap.station import NewRequest
from clairai.tap.tables import Tables
from clairai.tap.taker import Taker
from tests.unit.toy_captures_engine import ToyConsumer, batch

WIDTH, ROWS = 64, 32
SITE_NAMES = ("pre_attn.0", "post_block.0", "post_block.1")
SITES = {name: index for index, name in enumerate(SITE_NAMES)}


class ToyScores:
    """Probes of the bank: their sites and places."""

    def __init__(self, **columns: tuple[int, int]) -> None:
        self._columns = columns
        self.followed: list[int] = []

    def column(self, probe: str) -> tuple[int, int] | None:
        return self._columns.get(probe)

    def follow(self, stream: int) -> None:
        self.followed.append(stream)


class Rig:
    """A worker's captures on tables of their own."""

    def __init__(
        self,
        consumers: dict[str, ToyConsumer],
        *,
        nbytes: int,
        dtype: torch.dtype,
        device: str = "cpu",
    ) -> None:
        self.tables = Tables(
            SITE_NAMES,
            width=WIDTH,
            capacity=2,
            max_tokens=ROWS,
            device=device,
            dtype=dtype,
            stash_rows=ROWS,
            is_capturing=True,
        )
        self.consumers = consumers
        guarded: dict[str, Any] = {name: Guarded(one) for name, one in consumers.items()}
        name = str(dtype).removeprefix("torch.")

        def origin(encoder: Encoder) -> Origin:
            return Origin.of(
                model="m",
                weights="w",
                dtype=name,
                width=WIDTH,
                encoder=encoder.name,
                parameters=encoder.parameters,
            )

        self.collector = Collector(guarded, origin, batch_nbytes=1 << 20, pending_nbytes=20_000)
        self.taker = Taker(self.tables, guarded, self.collector, staging_nbytes=nbytes)
        self.scores = ToyScores(anger=(1, 1))
        self.capture = Capture(self.taker, self.collector, SITES, self.scores)
        self.rng = np.random.default_rng(3)

    def enter(self, name: str, stream: int, wanted: Order, choice: int = 0) -> None:
        request = NewRequest(name, f"api-{name}", Mark(stream, choice), 4, None, wanted)
        self.capture.begin([request], [])

    def step(self, *laid: tuple[str, int, int], finished: tuple[str, ...] = ()) -> Any:
        """Rows of a forward, as they were; token 1000 + position everywhere."""
        self.capture.begin([], finished)
        given = batch(*laid)
        num_tokens = int(given.counts_R.sum())
        self.capture.place(given)
        rows_STD = torch.tensor(self.rng.standard_normal((3, num_tokens, WIDTH)) * 3)
        for index, name in enumerate(SITE_NAMES):
            self.tables.site(name).read(rows_STD[index].to(self.tables.stash_SRD))
        positions = np.concatenate([np.arange(s, s + n) for _, s, n in laid])
        device = self.tables.device
        tokens = torch.tensor(positions + 1000, dtype=torch.int32, device=device)
        inputs = Inputs(torch.tensor(positions, device=device), tokens)
        self.capture.end(lambda: inputs)
        return self.tables.stash_SRD[:, :num_tokens].clone()

    def found(self, stream: int) -> wire_capture.Captured:
        """Of a stream's first answer, when all so far is settled."""
        done = threading.Event()
        self.collector._queue.put(done.set)
        assert done.wait(10)
        return self.capture.answer(wire_capture.FindCaptures(streams=(stream,))).found[0][0]  # type: ignore[union-attr]

    def ended(self, request_id: str, state: str) -> wire_capture.Captured:
        """The same of a request whose last token its caller has, when it has come to this state."""
        asked = wire_capture.FindCaptures((request_id,), is_ended=True)
        for _ in range(1000):
            reply = self.capture.answer(asked)
            assert isinstance(reply, wire_capture.Captures)
            ((told,),) = reply.found
            if told.state == state:
                break
            self.found(told.stream)
        return told


@contextmanager
def rig(
    *,
    nbytes: int = 1 << 20,
    dtype: torch.dtype = torch.float32,
    device: str = "cpu",
    **consumers: ToyConsumer,
) -> Iterator[Rig]:
    made = Rig(consumers or {"toy": ToyConsumer()}, nbytes=nbytes, dtype=dtype, device=device)
    try:
        yield made
    finally:
        made.collector.close()
