"""The host's own work per step inside a real GPU engine, with launch and copy.

What the wrapped methods of the model runner take beyond what they wrap, on the thread that every
step waits for, in decode steps of 64 and of 256 requests with 16 probes; the model does not matter.
bench.host_work has the same without a GPU, and without the launch.
Run: python -m bench.gpu_host [--shape qwen3-0.6b] [--batches 64 256]
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from pathlib import Path
from typing import Any, Final

import numpy as np

from bench import gpu_shares
from bench.gpu_engines import Case, decode_times, engines
from tests.engine.process import EngineProcess

NUM_NEW: Final = 256
CASES: Final = (
    Case("1 layer x 16", ("post_block.15",), 16),
    Case("16 probes, steering on", ("post_block.15",), 16, {"steering": True}),
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shape", default="qwen3-0.6b")
    parser.add_argument("--batches", type=int, nargs="*", default=[64, 256])
    options = parser.parse_args()
    sys.stdout.write("| engine | requests | steps | p50, us | p99, us | timers alone, p50 |\n")
    sys.stdout.write("| --- | --- | --- | --- | --- | --- |\n")
    with (
        tempfile.TemporaryDirectory() as folder,
        engines(options.shape, CASES, Path(folder)) as running,
    ):
        found = [row for case in CASES for row in measure(running[case.name], case, options)]
    sys.stdout.write(json.dumps({"bench": "gpu_host", "found": found}) + "\n")


def measure(engine: EngineProcess, case: Case, options: argparse.Namespace) -> list[dict[str, Any]]:
    engine.call(in_worker, gpu_shares.install)
    ours = {batch: _seconds(engine, batch) for batch in options.batches}
    engine.call(in_worker, gpu_shares.time_nothing)
    nothing = {batch: _seconds(engine, batch) for batch in options.batches}
    return [_report(case.name, batch, ours[batch], nothing[batch]) for batch in options.batches]


def _seconds(engine: EngineProcess, batch: int) -> list[float]:
    engine.call(decode_times, batch, 16)  # warms
    engine.call(in_worker, gpu_shares.take)
    engine.call(decode_times, batch, NUM_NEW)
    found: list[float] = engine.call(in_worker, gpu_shares.take)[batch]
    return found


def _report(name: str, batch: int, ours: list[float], nothing: list[float]) -> dict[str, Any]:
    """With the time that the timers take, and what that is."""
    p50, p99 = np.percentile(ours, (50, 99)) * 1e6
    timers = float(np.median(nothing)) * 1e6
    sys.stdout.write(f"| {name} | {batch} | {len(ours)} | {p50:.1f} | {p99:.1f} | {timers:.1f} |\n")
    sys.stdout.flush()
    found = {"p50_us": p50, "p99_us": p99, "timers_us": timers}
    row = {"engine": name, "requests": batch, "steps": len(ours)}
    return row | {key: round(float(value), 1) for key, value in found.items()}


def in_worker(llm: Any, function: Any) -> Any:
    return llm.collective_rpc(function)[0]


if __name__ == "__main__":
    main()
