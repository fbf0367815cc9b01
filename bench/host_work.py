"""The host's own work per engine step, for a CPU engine and for a GPU's.

What a worker does beside the forward pass, for decode steps of 1 to 256 requests with 16 probes. On
a CPU: row book, rows, scores, ring. On a GPU: row book and brief, for steps that Python is told of
(bench/gpu_host.py has the others); the GPU does the rest. What the
launch itself costs is not in it, so that this runs on any machine. Another batch is the worst case:
each step has other requests, or the same in another order, so that nothing is known from the last.
Run: python -m bench.host_work
"""

from __future__ import annotations

import ctypes
import json
import sys
import time
from collections.abc import Callable, Sequence
from types import SimpleNamespace

import numpy as np
import torch
from numpy.typing import NDArray

from clairai.engine.kernel_launch import DRIVER_CALLS, CudaDriver, KernelLaunch
from clairai.engine.publish import step_library
from clairai.engine.publish.device_publisher import DevicePublisher
from clairai.engine.publish.launch_list import LaunchList, LaunchStreams, NativeLauncher
from clairai.engine.publish.publish_kernel import DONE_WORD
from clairai.engine.publish.publisher import FinishedStep, HostPublisher, Publisher
from clairai.engine.publish.step_header import StepHeader, StepShape
from clairai.engine.publish.step_rows import RowBuilder, StepRows
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
NUMBER_WORD = 9  # of a brief's head
REQUESTS = (1, 16, 64, 256)

Stepper = Callable[[int, NDArray[np.int32]], None]


class NoLaunch:
    """Stands where the kernel is launched; the step counts as published when we say so."""

    def __init__(self) -> None:
        # Of zero it gives zero: the driver's word for success.
        driver = CudaDriver(
            SimpleNamespace(**{name: ctypes.PyDLL(None)["labs"] for name in DRIVER_CALLS})
        )
        self._launches = NativeLauncher(
            driver, LaunchStreams(int, 0, 0, 0), step_library.load_library("step.c")
        )
        self._brief, parameters = ctypes.c_uint64(0), (ctypes.c_void_p * 1)()
        launch = KernelLaunch(0, (1, 1, 1), 1, 0, parameters, ())
        self._launches.use(LaunchList.of([launch, launch], self._brief))
        self._at: set[int] = set()  # where briefs are

    def prepare(self, step_headers: Sequence[StepHeader], inputs: ForwardInputs) -> None:
        pass

    def begin(self) -> None:
        self._launches.begin()

    def __call__(
        self, step_header: StepHeader, inputs: ForwardInputs, form: StepShape, ledger: int
    ) -> None:
        del inputs, form
        self._at.add(step_header.address)
        self._launches.run(step_header.address, ledger)

    def note(self, ledger: int, step: int) -> bool:
        return bool(self._launches.note(ledger, step))

    def noted(self) -> None:
        self._launches.noted()

    def capture(self, num_tokens: int) -> None:
        pass

    def follow(self, stream: int) -> None:
        pass

    def flush(self) -> None:
        """What the GPU does at the end of a step: give the brief back."""
        for address in self._at:
            words = (ctypes.c_int64 * (DONE_WORD + 1)).from_address(address)
            words[DONE_WORD] = words[NUMBER_WORD]


def main() -> None:
    tables = _tables()
    with HostMemory.create(_shape().nbytes) as memory:
        publisher = HostPublisher(RingWriter(memory, _shape(), epoch=1), tables)
        _print("CPU engine", publisher, turn=0)
        del publisher
    for name, turn in (("GPU engine", 0), ("GPU engine, another batch each step", 1)):
        header = RingHeader(1, _shape())
        _print(name, DevicePublisher(NoLaunch(), header, tables, max(REQUESTS)), turn=turn)


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
    book = RowBuilder(step_library.load_library("step.c"))
    req_ids = [f"request-{index}" for index in range(num_requests)]
    for index, req_id in enumerate(req_ids):
        book.open(req_id, RequestMark(index + 1), prompt_len=0)
    counts_R = np.ones(num_requests, np.int32)
    positions_T = torch.zeros(MAX_TOKENS, dtype=torch.int64)
    inputs = ForwardInputs(positions_T, torch.zeros(MAX_TOKENS, dtype=torch.int32))

    sent: list[StepRows | None] = [None]

    def step(number: int, starts_R: NDArray[np.int32]) -> None:
        publisher.begin()
        first = number * turn % num_requests
        batch = StepBatch(req_ids[first:] + req_ids[:first], counts_R, starts_R)
        rows = book.step(batch)
        if (rows is sent[0] and publisher.again(number)) or publisher.note(number, rows, 1):
            publisher.settle(lambda: inputs)
            sent[0] = rows
        else:
            publisher.send(FinishedStep(number, rows, 1, inputs))

    return step


if __name__ == "__main__":
    main()
