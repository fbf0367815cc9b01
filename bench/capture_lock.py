"""How long a thread waits for Python's lock beside captures.

A thread plays the engine: every 5.7 ms it needs the lock for 2 ms, then a step of 64 requests is
captured: not at all, into a folder by threads of this process, or by the capture writer process. A
copy into the arena plays the GPU's copy, and is not timed. Counted is the time in which the thread
could not run though a processor was free for it: not its own work, and not its wait for a processor
on a busy machine (from /proc/thread-self/schedstat). Needs no GPU and no engine.
Run: python -m bench.capture_lock [--steps 600]
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from clairai.capture.backend import CaptureBackend, open_backend
from clairai.capture.capture_settings import PROCESSES, CaptureSettings
from clairai.capture.consumers import EngineInfo
from clairai.capture.staging_reader import ROWS, SAMPLE, WHOLE_STEP
from clairai.engine.capture.capture_plan import CapturePlan
from clairai.engine.capture.row_selection import RowSelector
from clairai.engine.capture.staging_layout import StagingPlan
from clairai.engine.step import RequestMark, StepBatch
from clairai.store.codecs.base import Encoder
from clairai.store.codecs.registry import named

WIDTH, NUM_REQUESTS, STASH_ROWS = 4096, 64, 64
STEP_S: Final = 0.0057
NEEDED_S: Final = 0.002
DTYPES: Final = {"row": "bfloat16", "token": "int32", "position": "int64"}
LOADS: Final = (
    ("raw", 1, {"dtype": "bfloat16"}),
    ("rp8", 1, {"k": 512, "seed": 0}),
    ("rp8", 32, {"k": 512, "seed": 0}),
)


@dataclass(frozen=True)
class Load:
    """What every request captures."""

    encoder: Encoder
    points: tuple[str, ...]

    @property
    def plan(self) -> CapturePlan:
        parameters = tuple(self.encoder.parameters.items())
        return CapturePlan(self.points, ((0, 1 << 30),), self.encoder.name, parameters, ("fs",))


class Steps:
    """Steps of an engine, as its backend is told of them."""

    def __init__(self, backend: CaptureBackend, load: Load) -> None:
        self._backend, self._number = backend, 0
        self._selector = RowSelector({point: site for site, point in enumerate(load.points)})
        self._ids = [f"r{index}" for index in range(NUM_REQUESTS)]
        for index, req_id in enumerate(self._ids):
            self._selector.open(req_id, RequestMark(index + 1), 0, load.plan)
            backend.begin((index + 1, 0), load.plan)
        selection = self._selector.step(self._batch())
        assert selection is not None
        self._plan = StagingPlan(
            1,
            selection,
            stash_rows=STASH_ROWS,
            width=WIDTH,
            dtypes=DTYPES,
            rng=np.random.default_rng(0),
        )
        self._arrays = _arrays(load.encoder, self._plan)
        backend.set_layout(self._plan.layout)
        backend.send()

    def _batch(self) -> StepBatch:
        ones_R = np.ones(NUM_REQUESTS, np.int32)
        return StepBatch(self._ids, ones_R, np.full(NUM_REQUESTS, self._number, np.int32))

    def copy(self) -> Callable[[], None]:
        """What the GPU does; gives what the engine does."""
        self._number += 1
        selection = self._selector.step(self._batch())
        arena = self._backend.arena
        region = arena.allocate(self._plan.nbytes)
        assert selection is not None
        assert region is not None, "the arena is full: this machine is too slow for the load"
        self._arrays[WHOLE_STEP, "position"] = selection.position_N
        for key, array in self._arrays.items():
            start = region.start + self._plan.arrays[key].start
            arena.memory[start : start + array.nbytes] = array.view(np.uint8).ravel()
        arena.mark_copied(self._number)
        message = self._plan.staged_rows(selection, self._number, region)

        def send() -> None:
            self._backend.put(message, lambda: None)
            self._backend.send()

        return send


def _arrays(encoder: Encoder, plan: StagingPlan) -> dict[tuple[int, str], NDArray[Any]]:
    (group,) = plan.layout.groups
    sample_K = np.frombuffer(group.sample, np.int64)
    rows_ND = np.random.default_rng(0).standard_normal((NUM_REQUESTS, WIDTH)).astype(np.float32)
    rows_ND = (rows_ND.view(np.uint32) & 0xFFFF0000).view(np.float32)  # bfloat16 has no more
    times = len(group.parts[0].points)
    bits_ND = (rows_ND.view(np.uint32) >> 16).astype(np.uint16)
    found = {
        (0, f"{ROWS}{name}"): np.tile(array, (times, 1))
        for name, array in encoder.encode(rows_ND).items()
    }
    found[0, SAMPLE] = bits_ND[sample_K % NUM_REQUESTS]
    found[WHOLE_STEP, "token"] = np.zeros(NUM_REQUESTS, np.int32)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=600)
    options = parser.parse_args()
    sys.stdout.write("| captured | by | late p50 ms | mean | p99 | max | other threads here |\n")
    sys.stdout.write("|---|---|---|---|---|---|---|\n")
    found = [_line("nothing", "nobody", *_measured(options.steps, lambda: _nothing))]
    for name, num_points, parameters in LOADS:
        points = tuple(f"post_block.{layer}" for layer in range(num_points))
        load = Load(named(name, parameters), points)
        for process in PROCESSES:
            said = f"{num_points} layers {name}"
            found.append(_line(said, process, *_captured(load, process, options.steps)))
    sys.stdout.write(json.dumps({"bench": "capture_lock", "cases": found}) + "\n")


def _captured(load: Load, process: str, steps: int) -> tuple[NDArray[np.float64], float]:
    about = EngineInfo("m", "w", DTYPES["row"], WIDTH, load.points)
    with tempfile.TemporaryDirectory() as folder:
        setting = {"folder": str(Path(folder) / "store"), "staging_mib": 512, "process": process}
        backend = open_backend(CaptureSettings.parse(setting), about)
        try:
            return _measured(steps, Steps(backend, load).copy)
        finally:
            backend.close()


def _measured(
    steps: int, copy: Callable[[], Callable[[], None]]
) -> tuple[NDArray[np.float64], float]:
    """How late 2 ms of work were done in each step, in ms, and what other threads here used."""
    late = []
    begin_s, own_s, alone_s = time.perf_counter(), time.process_time(), time.thread_time()
    for step in range(steps):
        tell = copy()
        began_s, ran_s = time.perf_counter(), _scheduled_s()
        _work()
        tell()
        ran_s = _scheduled_s() - ran_s  # asking is counted too, and lets go of the lock twice
        late.append(time.perf_counter() - began_s - ran_s)
        time.sleep(max(0.0, begin_s + (step + 1) * STEP_S - time.perf_counter()))
    others_s = time.process_time() - own_s - (time.thread_time() - alone_s)
    return 1e3 * np.array(late[steps // 10 :]), others_s / (time.perf_counter() - begin_s)


def _work() -> None:
    """Holds the lock for as long as it needs the processor."""
    end_s = time.thread_time() + NEEDED_S
    while time.thread_time() < end_s:
        sum(range(50))


def _scheduled_s() -> float:
    """In which this thread ran, or waited for a processor."""
    _, waited, _ = Path("/proc/thread-self/schedstat").read_text().split()
    return time.thread_time() + int(waited) / 1e9


def _nothing() -> None:
    pass


def _line(captured: str, by: str, late: NDArray[np.float64], share: float) -> dict[str, Any]:
    p50, p99 = np.percentile(late, (50, 99))
    numbers = {"p50": p50, "mean": late.mean(), "p99": p99, "max": late.max()}
    said = " | ".join(f"{value:.2f}" for value in numbers.values())
    sys.stdout.write(f"| {captured} | {by} | {said} | {100 * share:.0f} % |\n")
    sys.stdout.flush()
    return {"captured": captured, "by": by, "cpu": share, **numbers}


if __name__ == "__main__":
    main()
