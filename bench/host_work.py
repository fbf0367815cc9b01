"""Measures the host's own work per engine step, on a CPU engine and on a GPU's.

What a worker does beside the forward pass, for decode steps of 1 to 256 requests with 16 probes. On
a CPU: rows, scores, ring. On a GPU: rows and header, for steps that Python handles (gpu_host.py has
the others); the GPU does the rest. What the launch itself costs is not in it, so that this runs on
any machine. Another batch is the worst case: each step has other requests, or the same in another
order, so that nothing is known from the last.
Run: python -m bench.host_work
"""

from __future__ import annotations

import ctypes
import json
import sys
import time
from collections.abc import Callable
from types import SimpleNamespace

import numpy as np
import torch
from numpy.typing import NDArray

from clairai.engine.kernel_launch import DRIVER_CALLS, CudaDriver, KernelLaunch
from clairai.engine.publish.device_publisher import DevicePublisher
from clairai.engine.publish.launch_list import LaunchList, LaunchStreams, StepLauncher
from clairai.engine.publish.publisher import HostPublisher, Publisher
from clairai.engine.publish.step_extension import load_step_extension
from clairai.engine.publish.step_header import StepHeaders, StepShape
from clairai.engine.publish.step_rows import RowBuilder
from clairai.engine.score.score_tables import ScoreTables
from clairai.engine.step import ForwardInputs, RequestMark, StepBatch
from clairai.points import Point
from clairai.probe.bank import EngineBank
from clairai.probe.model import Probe
from clairai.ring.layout import RingHeader, RingShape
from clairai.ring.memory import HostMemory
from clairai.ring.writer import RingWriter

NUM_PROBES, WIDTH, MAX_TOKENS = 16, 64, 8192
NUM_STEPS, NUM_WARM = 4000, 500
REQUESTS = (1, 16, 64, 256)

Stepper = Callable[[int, NDArray[np.int32]], None]


class NoLaunch:
    """Stands where the kernel is launched; the step counts as published when we say so."""

    def __init__(self) -> None:
        # Of zero it returns zero: the driver's word for success.
        calls = {name: ctypes.PyDLL(None)["labs"] for name in DRIVER_CALLS}
        driver, streams = CudaDriver(SimpleNamespace(**calls)), LaunchStreams(int, 0, 0, 0)
        self._launcher = StepLauncher(driver, streams, load_step_extension())
        self._header, parameters = ctypes.c_uint64(0), (ctypes.c_void_p * 1)()
        launch = KernelLaunch(0, (1, 1, 1), 1, 0, parameters, ())
        self._launcher.use(LaunchList.of([launch, launch], self._header))
        self._headers: StepHeaders | None = None
        self.begin_step = self._launcher.begin_step
        self.published_by_graph = self._launcher.published_by_graph

    def prepare(self, headers: StepHeaders, inputs: ForwardInputs) -> None:
        pass

    def __call__(self, headers: StepHeaders, inputs: ForwardInputs, shape: StepShape) -> None:
        del inputs, shape
        self._headers = headers
        self._launcher.run(headers)

    def capture(self, num_tokens: int) -> None:
        pass

    def make_wait(self, stream: int) -> None:
        pass

    def flush(self) -> None:
        """What the GPU does at the end of a step: say that its header is published."""
        if self._headers is not None:
            head = self._headers.last().head
            head.done = head.number


def main() -> None:
    tables = _tables()
    with HostMemory.create(_shape().nbytes) as memory:
        on_host = HostPublisher(RingWriter(memory, _shape(), epoch=1), tables)
        _print("CPU engine", on_host, turn=0)
        del on_host
    for name, turn in (("GPU engine", 0), ("GPU engine, another batch each step", 1)):
        header = RingHeader(1, _shape())
        publisher = DevicePublisher(
            NoLaunch(), header, tables, max(REQUESTS), load_step_extension()
        )
        _print(name, publisher, turn=turn)


def _shape() -> RingShape:
    return RingShape.for_budget(64 << 20, NUM_PROBES)


def _tables() -> ScoreTables:
    here = Point("post_block", 0)
    tables = ScoreTables(
        [str(here)], width=WIDTH, capacity=NUM_PROBES, max_tokens=MAX_TOKENS, device="cpu"
    )
    probes = [Probe(f"p{index}", here, np.ones(WIDTH, np.float32)) for index in range(NUM_PROBES)]
    tables.load(EngineBank.empty((here,), NUM_PROBES, WIDTH, "toy").add(probes))
    return tables


def _print(name: str, publisher: Publisher, *, turn: int) -> None:
    """`turn`: by how many places the batch is turned from step to step."""
    found = {}
    for num_requests in REQUESTS:
        times = _time(_stepper(publisher, num_requests, turn), publisher, num_requests)
        p50, p99 = np.percentile(times, (50, 99)) * 1e6
        found[num_requests] = {"p50_us": round(p50, 1), "p99_us": round(p99, 1)}
        line = f"{name}, {num_requests:4d} requests: p50 {p50:6.1f} us, p99 {p99:6.1f} us"
        sys.stdout.write(line + "\n")
    sys.stdout.write(json.dumps({"bench": "host_work", "engine": name, "requests": found}) + "\n")


def _time(step: Stepper, publisher: Publisher, num_requests: int) -> list[float]:
    seconds = []
    for number in range(1, NUM_STEPS + 1):
        # the runner's own work, not ours
        starts_R = np.full(num_requests, number, np.int32)
        begin = time.perf_counter()
        step(number, starts_R)
        seconds.append(time.perf_counter() - begin)
        publisher.flush()
    return seconds[NUM_WARM:]


def _stepper(publisher: Publisher, num_requests: int, turn: int) -> Stepper:
    builder = RowBuilder(load_step_extension())
    req_ids = [f"request-{index}" for index in range(num_requests)]
    for index, req_id in enumerate(req_ids):
        builder.add_request(req_id, RequestMark(index + 1), prompt_len=0)
    counts_R = np.ones(num_requests, np.int32)
    positions_T = torch.zeros(MAX_TOKENS, dtype=torch.int64)
    inputs = ForwardInputs(positions_T, torch.zeros(MAX_TOKENS, dtype=torch.int32))

    def step(number: int, starts_R: NDArray[np.int32]) -> None:
        publisher.begin_step()
        first = number * turn % num_requests
        batch = StepBatch(req_ids[first:] + req_ids[:first], counts_R, starts_R)
        rows = builder.build(batch)
        if publisher.announce(rows, 1):
            publisher.finish(lambda: inputs)
        else:
            publisher.publish(rows, 1, inputs)

    return step


if __name__ == "__main__":
    main()
