"""What the host does in a step does not grow with the rows of the step."""

from __future__ import annotations

import sys
from types import FrameType
from typing import Any

import msgspec
import numpy as np
import torch

from clairai import wire
from clairai.compat import worker
from clairai.ring.layout import RingShape
from clairai.ring.memory import HostMemory
from clairai.ring.writer import RingWriter
from clairai.tap.outlet import Finish, Step, publish
from clairai.tap.rows import Batch, Mark, RowBook

NUM_PROBES = 4


def count_calls(num_tokens: int) -> int:
    """Python calls, built-in ones too, of one prefill step of one request."""
    shape = RingShape(slots=8, slot_bytes=1 << 20)
    book = RowBook()
    book.open("a", Mark(1), prompt_len=num_tokens)
    nothing_P = np.zeros(NUM_PROBES, np.bool_)
    finish = Finish(1, np.zeros(NUM_PROBES, np.float32), nothing_P, nothing_P)
    inputs = torch.randn(num_tokens, NUM_PROBES), torch.arange(num_tokens)
    calls = 0

    def count(_frame: FrameType, event: str, _argument: Any) -> None:
        nonlocal calls
        calls += event in ("call", "c_call")

    with HostMemory.create(shape.nbytes) as memory:
        writer = RingWriter(memory, shape, epoch=1)
        sys.setprofile(count)
        try:
            counts_R = np.array([num_tokens], np.int32)
            rows = book.step(Batch(["a"], counts_R, np.zeros(1, np.int32)))
            publish(writer, Step(1, rows, finish, inputs[0], inputs[1], inputs[1]))
        finally:
            sys.setprofile(None)
        del writer
    return calls


def test_pitfall_13_a_step_of_many_rows_costs_no_more_python_than_a_step_of_one() -> None:
    assert count_calls(4096) == count_calls(1) > 0


def test_pitfall_11_a_rank_without_a_ring_replies_too() -> None:
    """collective_rpc waits for every rank: one that raised would break the call for all."""
    reply = msgspec.msgpack.decode(worker.control(object(), b"anything"), type=wire.ControlReply)
    assert isinstance(reply, wire.Refusal)
    assert "no taps" in reply.reason
