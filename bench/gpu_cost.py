"""Every table of costs on one GPU: all engines are started together, one is measured.

The tables are those of bench.gpu_overhead and bench.gpu_steering, which say how.
Run: python -m bench.gpu_cost [--rounds 6] [--batches 1 16 64 256]
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from pathlib import Path
from typing import Final

from bench import gpu_overhead, gpu_pauses, gpu_steering
from bench.gpu_engines import engines

SHAPE: Final = "llama-3.1-8b"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--batches", type=int, nargs="*", default=gpu_overhead.BATCHES)
    parser.set_defaults(loads=None)  # of bench.gpu_steering: all
    options = parser.parse_args()
    tapped, steered = gpu_overhead.CASES[SHAPE], gpu_steering.cases()[1:]
    with (
        tempfile.TemporaryDirectory() as folder,
        engines(SHAPE, [*tapped, *steered], Path(folder)) as running,
    ):
        found = [gpu_overhead.measure(running[case.name], case, options) for case in tapped]
        for case in steered:
            found += gpu_steering.measure(running[case.name], case, options)
        found.append(gpu_pauses.measure(running[gpu_pauses.CASE.name]))
    sys.stdout.write(json.dumps({"cases": found}) + "\n")


if __name__ == "__main__":
    main()
