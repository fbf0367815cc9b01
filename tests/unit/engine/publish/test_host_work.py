"""What the host does in a step does not grow with the rows of the step."""

from __future__ import annotations

import gc
import sys
from collections.abc import Iterator
from types import FrameType, SimpleNamespace
from typing import Any

import msgspec
import numpy as np
import pytest
import torch

from clairai.compat import worker
from clairai.engine.publish.device_publisher import DevicePublisher
from clairai.engine.publish.header_layout import NUM_HEADERS
from clairai.engine.publish.publisher import HostPublisher, Publisher
from clairai.engine.publish.step_header import StepHeaders, StepShape
from clairai.engine.publish.step_rows import RowBuilder
from clairai.engine.score.score_tables import ScoreTables
from clairai.engine.step import ForwardInputs, RequestMark, StepBatch
from clairai.points import Point
from clairai.ring.layout import RingHeader, RingShape
from clairai.ring.memory import HostMemory
from clairai.ring.writer import RingWriter
from clairai.wire import control_messages, ring_messages

MAX_TOKENS, MAX_REQUESTS = 4096, 256
SHAPE = RingShape(slots=8, slot_bytes=1 << 20)


class NoLaunch:
    """Stands where the GPU is; every step is published at once."""

    def prepare(self, headers: StepHeaders, inputs: ForwardInputs) -> None: ...

    def begin_step(self) -> None: ...

    def __call__(self, headers: StepHeaders, inputs: ForwardInputs, shape: StepShape) -> None:
        del inputs, shape
        head = headers.last().head
        head.done = head.number

    def published_by_graph(self) -> None: ...

    def capture(self, num_tokens: int) -> None: ...

    def make_wait(self, stream: int) -> None: ...

    def flush(self) -> None: ...


@pytest.fixture(params=["host", "device"])
def publisher(request: pytest.FixtureRequest) -> Iterator[Publisher]:
    site = str(Point("post_block", 0))
    tables = ScoreTables([site], width=4, capacity=4, max_tokens=MAX_TOKENS, device="cpu")
    if request.param == "device":
        yield DevicePublisher(NoLaunch(), RingHeader(1, SHAPE), tables, MAX_REQUESTS)
        return
    with HostMemory.create(SHAPE.nbytes) as memory:
        yield HostPublisher(RingWriter(memory, SHAPE, epoch=1), tables)


def calls_of(publisher: Publisher, counts: list[int], *, warm: int = 0) -> int:
    """Python calls, built-in ones too, of one step after `warm` others of the same batch."""
    builder = RowBuilder()
    req_ids = [f"r{index}" for index in range(len(counts))]
    for req_id in req_ids:
        builder.add_request(req_id, RequestMark(1), prompt_len=7)
    inputs = ForwardInputs(torch.arange(MAX_TOKENS), torch.arange(MAX_TOKENS, dtype=torch.int32))
    calls = 0

    def count(_frame: FrameType, event: str, _argument: Any) -> None:
        nonlocal calls
        calls += event in ("call", "c_call")

    for number in range(warm + 1):
        batch = StepBatch(req_ids, np.array(counts, np.int32), np.zeros(len(counts), np.int32))
        gc.disable()  # what others left is not ours to count
        sys.setprofile(count if number == warm else None)
        try:
            publisher.publish(builder.build(batch), 1, inputs)
        finally:
            sys.setprofile(None)
            gc.enable()
    return calls


def test_pitfall_13_a_step_of_many_rows_costs_no_more_python_than_a_step_of_one(
    publisher: Publisher,
) -> None:
    assert calls_of(publisher, [MAX_TOKENS]) == calls_of(publisher, [1]) > 0


def test_pitfall_13_a_batch_that_stays_costs_the_same_for_every_number_of_requests(
    publisher: Publisher,
) -> None:
    warm = 2 * NUM_HEADERS
    many = calls_of(publisher, [1] * MAX_REQUESTS, warm=warm)
    assert many == calls_of(publisher, [1], warm=warm) > 0


def test_pitfall_11_a_rank_without_a_ring_replies_too() -> None:
    """collective_rpc waits for every rank: one that raised would break the call for all."""
    another = SimpleNamespace(vllm_config=SimpleNamespace(weight_transfer_config=None))
    asked = msgspec.msgpack.encode(control_messages.ListProbes())
    reply = msgspec.msgpack.decode(
        worker.handle_control(another, asked), type=control_messages.ControlReply
    )
    assert isinstance(reply, ring_messages.Refusal)
    assert "no taps" in reply.reason
