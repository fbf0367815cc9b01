"""Has the GPU publish rows that say which they are, into a ring in host or GPU memory.

The same publisher and kernel that an engine has, with a kernel of its own in front that fills in
positions, token ids and scores.
"""

from __future__ import annotations

import functools
import os
from pathlib import Path
from typing import Any, Final, Self

import numpy as np
import torch
import triton
import triton.language as tl

from clairai.engine.publish import ring_setup
from clairai.engine.publish.step_rows import RowBuilder, StepRows
from clairai.engine.score.score_tables import ScoreTables
from clairai.engine.step import ForwardInputs, RequestMark, StepBatch
from clairai.points import Point
from clairai.probe.bank import EngineBank
from clairai.probe.model import Probe
from clairai.ring.server import RingServer
from clairai.ring.writer import new_epoch
from clairai.settings import Settings
from clairai.wire import ring_messages

NUM_COLUMNS: Final = 16
STREAM: Final = 0x1234_5678_9ABC_DEF0


@triton.jit(do_not_specialize=["first"])  # type: ignore[untyped-decorator]
def mark(  # type: ignore[no-untyped-def]
    positions_ptr, token_ids_ptr, scores_ptr, first: tl.int64, C: tl.constexpr
):
    """Row i is number n = first + i, and says so in its position, its token and every score."""
    i = tl.program_id(0)
    n = first.to(tl.int64) + i
    k = tl.arange(0, C)
    tl.store(positions_ptr + i, n % 2147483647)
    tl.store(token_ids_ptr + i, (n * 7919 % 2147483647).to(tl.int32))
    tl.store(scores_ptr + i * C + k, ((n + 17 * k) % 8191).to(tl.float32))


class Writer:
    """An engine's side of the ring, without the engine."""

    def __init__(self, folder: Path, kind: str, ahead: int) -> None:
        ring_setup.MAX_AHEAD = ahead  # type: ignore[misc]  # an engine never writes so much at once
        settings = Settings(points=("post_block.0",), ring_mib=256, ring_home=kind)
        self._tables = _tables()
        epoch = new_epoch()
        self._home = ring_setup.open_ring(settings, self._tables, 1, epoch)
        shape, memory = self._home.shape, self._home.memory
        welcome = ring_messages.Welcome(
            wire_version=ring_messages.WIRE_VERSION,
            epoch=epoch,
            pid=os.getpid(),
            model="none",
            vllm="none",
            home=memory.home,
            nbytes=shape.nbytes,
            slots=shape.slots,
            slot_bytes=shape.slot_bytes,
            points=("post_block.0",),
            handle=memory.handle,
            gpu=memory.uuid,
            address=memory.address,
        )
        self._server = RingServer(folder, memory, welcome, lambda _: None)
        self.path = self._server.path
        self.per_record = shape.rows_per_record(NUM_COLUMNS)
        self.most_rows = shape.ahead * self.per_record
        self._inputs = _inputs(self._tables)
        self._publisher: Any = self._home.publisher
        self._publisher.prepare(self._inputs)
        self._rows = 0

    @property
    def published(self) -> int:
        return int(self._publisher.published)

    def write(self, num_rows: int) -> None:
        inputs = self._inputs
        given = (inputs.positions_T, inputs.token_ids_T, self._tables.scores_STK)
        self._publisher.begin_step()  # the last step is read: its inputs may be overwritten
        mark[(num_rows,)](*given, self._rows, C=NUM_COLUMNS)
        self._rows += num_rows
        self._publisher.publish(_rows(num_rows), 1, inputs)

    def stamp_with(self, offset_ns: int) -> None:
        """From now on records carry the GPU's clock at publishing, on the host's scale."""
        launcher = self._publisher._launcher
        launcher._constants["CLOCK"] = True
        self._publisher.prepare(self._inputs)
        self._publisher._launcher = _Stamped(launcher, offset_ns)

    def flush(self) -> None:
        self._publisher.flush()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._server.close()
        self._home.close()


class _Stamped:
    def __init__(self, launcher: Any, offset_ns: int) -> None:
        self._launcher, self._offset_ns = launcher, offset_ns
        self.flush = launcher.flush

    def __call__(self, headers: Any, *given: Any) -> None:
        headers.last().head.stamp_ns = self._offset_ns
        self._launcher(headers, *given)


def _tables() -> ScoreTables:
    point = Point("post_block", 0)
    tables = ScoreTables(
        ["post_block.0"], width=16, capacity=NUM_COLUMNS, max_tokens=1 << 16, device="cuda:0"
    )
    ones = np.ones(16, np.float32)
    probes = [Probe(f"p{k}", point, ones) for k in range(NUM_COLUMNS)]
    tables.load(EngineBank.empty((point,), NUM_COLUMNS, 16, "none").add(probes))
    return tables


def _inputs(tables: ScoreTables) -> ForwardInputs:
    size = tables.max_tokens
    return ForwardInputs(
        positions_T=torch.zeros(size, dtype=torch.int64, device=tables.device),
        token_ids_T=torch.zeros(size, dtype=torch.int32, device=tables.device),
    )


@functools.cache
def _rows(num_rows: int) -> StepRows:
    builder = RowBuilder()
    builder.add_request("only", RequestMark(STREAM), prompt_len=0)
    return builder.build(StepBatch(["only"], np.array([num_rows], np.int32), np.zeros(1, np.int32)))
