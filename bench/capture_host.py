"""The cost of captures on the engine's thread per decode step, on a CPU.

Everything a worker does for 64 requests of which every token is captured: begin, place, end, and
the messages to the capture writer process. Rows are 8 wide, so that copying them costs little: what
is left are calls, as many as on a GPU, where each of them launches something.
Run: python -m bench.capture_host [--steps 3000]
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch

from clairai.capture.backend import open_backend
from clairai.capture.capture_settings import CaptureSettings
from clairai.capture.consumers import EngineInfo
from clairai.engine.capture.capture_plan import CapturePlan
from clairai.engine.capture.row_copier import RowCopier
from clairai.engine.capture.worker_capture import WorkerCapture
from clairai.engine.score.score_tables import ScoreTables
from clairai.engine.step import ForwardInputs, NewRequest, RequestMark, StepBatch

WIDTH, NUM_REQUESTS, MAX_TOKENS = 8, 64, 512
PAUSE_S: Final = 0.002
PARTS: Final = ("begin", "place", "end")


class NoScores:
    """No rows are held for a score."""

    def column(self, probe: str) -> tuple[int, int] | None:
        del probe
        return None

    def make_wait(self, stream: int) -> None:
        del stream


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=3000)
    options = parser.parse_args()
    torch.set_num_threads(1)
    found = {num_points: measured(num_points, options.steps) for num_points in (1, 32)}
    sys.stdout.write("| points | begin us | place | end | together |\n|---|---|---|---|---|\n")
    for num_points, medians in found.items():
        columns = " | ".join(f"{medians[part]:.0f}" for part in PARTS)
        sys.stdout.write(f"| {num_points} | {columns} | {sum(medians.values()):.0f} |\n")
    sys.stdout.write(json.dumps({"bench": "capture_host", "points": found}) + "\n")


def measured(num_points: int, steps: int) -> dict[str, float]:
    """Medians in microseconds."""
    points = tuple(f"post_block.{layer}" for layer in range(num_points))
    with tempfile.TemporaryDirectory() as folder:
        setting = CaptureSettings.parse({"folder": str(Path(folder) / "s")})
        backend = open_backend(setting, EngineInfo("m", "w", "float32", WIDTH, points))
        sites = {point: site for site, point in enumerate(points)}
        capture = WorkerCapture(RowCopier(_tables(points), backend), backend, sites, NoScores())
        try:
            took = _steps(capture, points, steps)
        finally:
            capture.close()
    return {part: float(np.median(took[part]) * 1e6) for part in PARTS}


def _tables(points: tuple[str, ...]) -> ScoreTables:
    return ScoreTables(
        points,
        width=WIDTH,
        capacity=1,
        max_tokens=MAX_TOKENS,
        device="cpu",
        stash_rows=MAX_TOKENS,
        is_capturing=True,
    )


def _steps(capture: WorkerCapture, points: tuple[str, ...], steps: int) -> dict[str, list[float]]:
    order = CapturePlan(points, ((0, 1 << 30),), "raw", (("dtype", "float32"),), ("fs",))
    ids = [f"request-{index}" for index in range(NUM_REQUESTS)]
    marked = enumerate(ids, start=1)
    capture.begin([NewRequest(i, i, RequestMark(at), 0, None, order) for at, i in marked], [])
    inputs = ForwardInputs(
        torch.zeros(MAX_TOKENS, dtype=torch.int64), torch.zeros(MAX_TOKENS, dtype=torch.int32)
    )
    took: dict[str, list[float]] = {part: [] for part in PARTS}
    for step in range(steps):
        inputs.positions_T[:] = step
        ones_R = np.ones(NUM_REQUESTS, np.int32)
        batch = StepBatch(ids, ones_R, step * ones_R)
        calls: tuple[Any, ...] = (
            lambda: capture.begin([], []),
            lambda batch=batch: capture.place(batch),
            lambda: capture.end(lambda: inputs),
        )
        for part, call in zip(PARTS, calls, strict=True):
            began_s = time.perf_counter()
            call()
            took[part].append(time.perf_counter() - began_s)
        time.sleep(PAUSE_S)
    return took


if __name__ == "__main__":
    main()
