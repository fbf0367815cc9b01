"""Takes nothing; gives the host's own work per engine step: row book, rows, scores, ring.

What a worker does beside the forward pass, for decode steps of 1 to 256 requests with 16 probes.
Run: python -m bench.host_work
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable

import numpy as np
import torch

from clairai.ring.layout import RingShape
from clairai.ring.memory import HostMemory
from clairai.ring.writer import RingWriter
from clairai.tap.outlet import Finish, Step, publish
from clairai.tap.rows import Batch, Mark, RowBook

NUM_PROBES = 16
NUM_STEPS = 2000


def main() -> None:
    shape = RingShape.for_budget(64 << 20, NUM_PROBES)
    with HostMemory.create(shape.nbytes) as memory:
        writer = RingWriter(memory, shape, epoch=1)
        for num_requests in (1, 16, 64, 256):
            times = _time(_stepper(writer, num_requests))
            p50, p99 = np.percentile(times, (50, 99)) * 1e6
            sys.stdout.write(f"{num_requests:4d} requests: p50 {p50:6.1f} us, p99 {p99:6.1f} us\n")
        del writer


def _stepper(writer: RingWriter, num_requests: int) -> Callable[[int], None]:
    book = RowBook()
    req_ids = [f"request-{index}" for index in range(num_requests)]
    for index, req_id in enumerate(req_ids):
        book.open(req_id, Mark(index + 1), prompt_len=0)
    counts_R = np.ones(num_requests, np.int32)
    finish = Finish(
        version=1,
        bias_P=np.zeros(NUM_PROBES, np.float32),
        is_relu_P=np.zeros(NUM_PROBES, np.bool_),
        is_sigmoid_P=np.ones(NUM_PROBES, np.bool_),
    )
    raw_TP = torch.randn(num_requests, NUM_PROBES)
    token_ids_T = torch.ones(num_requests, dtype=torch.int32)

    def step(number: int) -> None:
        starts_R = np.full(num_requests, number, np.int32)
        rows = book.step(Batch(req_ids, counts_R, starts_R))
        positions_T = torch.full((num_requests,), number)
        publish(writer, Step(number, rows, finish, raw_TP, positions_T, token_ids_T))

    return step


def _time(step: Callable[[int], None]) -> list[float]:
    seconds = []
    for number in range(NUM_STEPS):
        begin = time.perf_counter()
        step(number)
        seconds.append(time.perf_counter() - begin)
    return seconds[100:]


if __name__ == "__main__":
    main()
