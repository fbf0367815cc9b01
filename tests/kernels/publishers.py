"""Steps of a toy engine, published by the kernel and by the host.

Both are given the same rows and the same scores; each writes a real ring, and a real reader reads
it. The slow reference in tests/support/engine_steps.py says what every row must be.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
import torch

from clairai.engine.publish import publish_kernel
from clairai.engine.publish.device_publisher import DevicePublisher
from clairai.engine.publish.gpu_launcher import kernel_constants
from clairai.engine.publish.header_layout import NUM_HEADERS
from clairai.engine.publish.publisher import HostPublisher
from clairai.engine.publish.step_header import StepHeaders, StepShape
from clairai.engine.publish.step_rows import RowBuilder, StepRows
from clairai.engine.score.score_tables import ScoreTables
from clairai.engine.step import ForwardInputs, StepBatch
from clairai.points import Point
from clairai.probe.bank import EngineBank
from clairai.probe.model import Probe
from clairai.ring.layout import RingHeader, RingShape
from clairai.ring.memory import HostMemory
from clairai.ring.reader import Record, RingCursor
from clairai.ring.writer import RingWriter
from clairai.wire import ring_messages
from tests.support.engine_steps import Plan, Row, ToyEngine

EPOCH = 0xFEED_FACE_CAFE_BEEF
POINTS = (Point("post_block", 0), Point("post_block", 1))
WIDTH, CAPACITY = 4, 3
WIDE = RingShape(slots=64, slot_bytes=4096, ahead=4)
POLL = 1 << 20
Way = Literal["sent", "live", "graph"]


class InterpretedLaunch:
    """Runs the kernels in Triton's interpreter, on a ring in host memory."""

    def __init__(
        self, memory: HostMemory, shape: RingShape, tables: ScoreTables, most: int
    ) -> None:
        self._ring = torch.frombuffer(memory.buffer, dtype=torch.int64)
        self._from = (tables.scores_STK, tables.offset_C)
        self._ticket, self.turn = torch.zeros(1, dtype=torch.int32), torch.zeros(1).long()
        self._sizes: tuple[Any, ...] = (shape.slots, shape.slot_bytes, CAPACITY)
        self.constants = kernel_constants(shape, most) | {"IS_GPU": False}
        self.grids: list[tuple[int, int]] = []
        self.graphs: list[int] = []  # captured, of so many tokens

    def prepare(self, headers: StepHeaders, inputs: ForwardInputs) -> None:
        del inputs
        self._headers = headers.memory

    def begin_step(self) -> None:
        pass

    def _read(self, inputs: ForwardInputs) -> tuple[Any, ...]:
        given = (*self._from, inputs.positions_T, inputs.token_ids_T, self._ticket, self.turn)
        return (*given, *self._sizes)

    def __call__(self, headers: StepHeaders, inputs: ForwardInputs, shape: StepShape) -> None:
        if inputs.drafts is not None:
            given = (headers.last().memory, inputs.drafts.starts_R, inputs.drafts.rejected_R)
            sizes = {name: self.constants[name] for name in ("MAX_R", "MAX_E", "TILE_W")}
            publish_kernel.mark_rejected[len(shape.rows.counts_R),](*given, **sizes)
        for part, grid in enumerate(shape.grids):
            self.grids.append(grid)
            given = (self._ring, headers.last().memory, *self._read(inputs), part)
            publish_kernel.publish_step[grid](*given, **self.constants)
            assert not self._ticket.any()  # ready for the next launch

    def capture(self, num_tokens: int) -> None:
        self.graphs.append(num_tokens)

    def replay(self, inputs: ForwardInputs, grid: tuple[int, int] = (2, 2)) -> None:
        """A graph, whose forward has left scores and inputs behind."""
        given = (self._ring, self._headers, *self._read(inputs))
        places = {"NUM_HEADERS": NUM_HEADERS, "HEADER_WORDS": self._headers.shape[1]}
        publish_kernel.publish_in_graph[grid](*given, **self.constants, **places)
        assert not self._ticket.any()

    def published_by_graph(self) -> None:
        pass

    def make_wait(self, stream: int) -> None:
        pass

    def flush(self) -> None:
        pass


class KeepingBuilder(RowBuilder):
    """Keeps the rows of the last step."""

    def build(self, batch: StepBatch) -> StepRows:
        self.last = super().build(batch)
        return self.last


@dataclass
class Publishers:
    """One engine, one set of tables, two rings."""

    tables: ScoreTables
    device: DevicePublisher
    host: HostPublisher
    launch: InterpretedLaunch
    device_ring: RingCursor
    host_ring: RingCursor
    builder: KeepingBuilder = field(default_factory=KeepingBuilder)
    number: int = 0
    bank_version: int = 1

    def __post_init__(self) -> None:
        self.engine = ToyEngine(self.builder)

    def step(self, plan: Plan, way: Way = "sent") -> list[Row]:
        """One step by the kernel, in this way, and by the host; what its rows must be."""
        _, expected = self.engine.step(plan)
        self.number += 1
        generator = torch.Generator().manual_seed(self.number)
        self.tables.scores_STK.normal_(generator=generator)
        if expected:
            inputs = inputs_of(expected, self.tables.max_tokens)
            self.device.begin_step()
            self._publish_on_device(inputs, way)
            self.host.publish(self.builder.last, self.bank_version, inputs)
        return expected

    def _publish_on_device(self, inputs: ForwardInputs, way: Way) -> None:
        """Whether the header is written before the forward, and who publishes it then."""
        given = (self.builder.last, self.bank_version)
        is_announced = way != "sent" and self.device.announce(*given)
        if way == "graph":
            self.launch.replay(inputs)
        elif way == "live":
            self.device.forward_ran(lambda: inputs)
        if is_announced:
            self.device.finish(lambda: inputs)
        else:
            self.device.publish(*given, inputs)

    def load(self, num_probes: int) -> None:
        """Another bank: so many probes, spread over the sites."""
        self.bank_version += 1
        self.tables.load(bank(num_probes))

    def poll(self) -> tuple[list[Record], list[Record]]:
        """New records, of the kernel and of the host."""
        return self.device_ring.poll(POLL), self.host_ring.poll(POLL)


@contextmanager
def publishers(
    *,
    shape: RingShape = WIDE,
    num_probes: int = 4,
    max_requests: int = 32,
    max_tokens: int = 512,
) -> Iterator[Publishers]:
    tables = ScoreTables(
        [*map(str, POINTS)], width=WIDTH, capacity=CAPACITY, max_tokens=max_tokens, device="cpu"
    )
    tables.load(bank(num_probes))
    large = RingShape(slots=512, slot_bytes=shape.slot_bytes)
    with ExitStack() as held:
        here = held.enter_context(HostMemory.create(shape.nbytes))
        there = held.enter_context(HostMemory.create(large.nbytes))
        header = RingHeader(EPOCH, shape)
        here.buffer[: len(header.pack())] = header.pack()
        launch = InterpretedLaunch(here, shape, tables, max_requests)
        device = DevicePublisher(launch, header, tables, max_requests)
        host = HostPublisher(RingWriter(there, large, EPOCH), tables)
        anywhere = inputs_of([], max_tokens)
        device.forward_ran(lambda: anywhere)
        device.capture_publish(1)
        device.prepare(anywhere)
        yield Publishers(tables, device, host, launch, RingCursor(here), RingCursor(there))


def bank(num_probes: int) -> EngineBank:
    """The columns are not in the order of their places."""
    one_D = np.ones(WIDTH, np.float32)
    order = np.random.default_rng(num_probes).permutation(len(POINTS) * CAPACITY)[:num_probes]
    probes = [Probe(f"p{place}", POINTS[place % len(POINTS)], one_D) for place in order]
    empty = EngineBank.empty(POINTS, CAPACITY, WIDTH, "toy")
    return empty.add(probes) if probes else empty


def inputs_of(rows: list[Row], max_tokens: int) -> ForwardInputs:
    """The runner's buffers, longer than the step; what lies beyond is another step's."""
    tokens = [row for row in rows if row.token_id >= 0]
    positions_T = torch.full((max_tokens,), 999_999)
    token_ids_T = torch.full((max_tokens,), 888_888, dtype=torch.int32)
    positions_T[: len(tokens)] = torch.tensor([row.position for row in tokens], dtype=torch.int64)
    token_ids_T[: len(tokens)] = torch.tensor([row.token_id for row in tokens], dtype=torch.int32)
    return ForwardInputs(positions_T, token_ids_T)


def rows_in(records: list[Record]) -> list[Row]:
    return [Row(*map(int, row)) for record in records for row in record.rows]


def assert_same(found: list[Record], expected: list[Record]) -> None:
    """Every field and every bit, but for the time of day."""
    assert [head_of(record) for record in found] == [head_of(record) for record in expected]
    for ours, theirs in zip(found, expected, strict=True):
        assert ours.rows.tobytes() == theirs.rows.tobytes()
        assert np.array_equal(ours.scores_RC, theirs.scores_RC, equal_nan=True)


def head_of(record: Record) -> tuple[object, ...]:
    shape = record.scores_RC.shape
    return record.seq, record.step, record.bank_version, record.continued, shape


def assert_scored(records: list[Record], expected_TP: torch.Tensor) -> None:
    """Tokens carry what the tables hold, events carry nothing."""
    rows = np.concatenate([record.rows for record in records])
    scores_RC = np.concatenate([record.scores_RC for record in records])
    is_token_R = rows["phase"] <= ring_messages.DECODE
    assert np.array_equal(scores_RC[is_token_R], expected_TP.numpy())
    assert np.isnan(scores_RC[~is_token_R]).all()
