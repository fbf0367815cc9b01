"""Takes one GPU; gives the host's own work per step inside a real engine: launch and copy included.

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
    sys.stdout.write("| engine | requests | steps | p50, us | p99, us |\n")
    sys.stdout.write("| --- | --- | --- | --- | --- |\n")
    with (
        tempfile.TemporaryDirectory() as folder,
        engines(options.shape, CASES, Path(folder)) as running,
    ):
        found = [row for case in CASES for row in measure(running[case.name], case, options)]
    sys.stdout.write(json.dumps({"bench": "gpu_host", "found": found}) + "\n")


def measure(engine: EngineProcess, case: Case, options: argparse.Namespace) -> list[dict[str, Any]]:
    engine.call(in_worker, gpu_shares.install)
    return [_measure(engine, case.name, batch) for batch in options.batches]


def _measure(engine: EngineProcess, name: str, batch: int) -> dict[str, Any]:
    engine.call(decode_times, batch, 16)  # warms
    engine.call(in_worker, gpu_shares.take)
    engine.call(decode_times, batch, NUM_NEW)
    seconds = engine.call(in_worker, gpu_shares.take)[batch]
    p50, p99 = np.percentile(seconds, (50, 99)) * 1e6
    sys.stdout.write(f"| {name} | {batch} | {len(seconds)} | {p50:.1f} | {p99:.1f} |\n")
    sys.stdout.flush()
    row = {"engine": name, "requests": batch, "steps": len(seconds)}
    return row | {"p50_us": round(p50, 1), "p99_us": round(p99, 1)}


def in_worker(llm: Any, function: Any) -> Any:
    return llm.collective_rpc(function)[0]


if __name__ == "__main__":
    main()
