"""Time per output token with taps over that without, in the same engine on a GPU.

Beside it, for honesty's sake: engines of vLLM alone, whose differences among themselves show how
much two engines differ for reasons of their own.
Run: python -m bench.gpu_overhead [--shape llama-3.1-8b] [--rounds 8]
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from bench import gpu_mute
from bench.gpu_engines import Case, decode_times, engines, prefill_seconds
from tests.engine.process import EngineProcess

BATCHES: Final = (1, 16, 64, 256)
NUM_NEW: Final = 72
CASES: Final = {
    "llama-3.1-8b": (
        Case("1 layer x 16", ("post_block.15",), 16),
        Case("32 layers x 16", ("post_block.*",), 16),
        Case("32 layers x 64", ("post_block.*",), 64),
    ),
    "qwen3-0.6b": (Case("1 layer x 16", ("post_block.15",), 16),),
}
ALONE: Final = (Case("vLLM alone, first"), Case("vLLM alone, second"))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shape", choices=[*CASES], default="llama-3.1-8b")
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--batches", type=int, nargs="*", default=BATCHES)
    parser.add_argument("--alone", action="store_true", help="engines of vLLM alone as well")
    options = parser.parse_args()
    cases = [*CASES[options.shape], *(ALONE if options.alone else ())]
    with (
        tempfile.TemporaryDirectory() as folder,
        engines(options.shape, cases, Path(folder)) as running,
    ):
        found = [measure(running[case.name], case, options) for case in cases]
    sys.stdout.write(json.dumps({"shape": options.shape, "cases": found}) + "\n")


def measure(engine: EngineProcess, case: Case, options: argparse.Namespace) -> dict[str, Any]:
    """Decode at every batch size, then prefill."""
    if not case.points:
        return {"case": case.name, "decode": [_alone(engine, case, b) for b in options.batches]}
    engine.call(each_worker, gpu_mute.capture_silent)
    decode = [_decode(engine, case, batch, options.rounds) for batch in options.batches]
    seconds = _turns(engine, options.rounds, lambda _: engine.call(prefill_seconds, 8, 2048))
    prefill = float(np.median(seconds[False] / seconds[True]))
    sys.stdout.write(f"| {case.name} | prefill 8 x 2048 | throughput {prefill:.4f} |\n")
    sys.stdout.flush()
    return {"case": case.name, "decode": decode, "prefill": prefill}


def _decode(engine: EngineProcess, case: Case, batch: int, rounds: int) -> dict[str, Any]:
    found = decode_ratios(engine, rounds, lambda _: engine.call(decode_times, batch, NUM_NEW))
    return {"batch": batch, **found.told(case.name, f"batch {batch}")}


@dataclass(frozen=True)
class Ratios:
    """Time per output token, with over without: its median and its 99th percentile."""

    p50: float
    p99: float
    alone_ms: float
    tapped_ms: float

    def told(self, *what: str) -> dict[str, Any]:
        """Prints a line of a table; gives it as JSON has it."""
        sys.stdout.write(
            f"| {' | '.join(what)} | {self.alone_ms:.3f} -> {self.tapped_ms:.3f} ms | "
            f"p50 {self.p50:.4f} | p99 {self.p99:.4f} |\n"
        )
        sys.stdout.flush()
        return asdict(self)


def decode_ratios(
    engine: EngineProcess, rounds: int, times: Callable[[bool], NDArray[np.float64]]
) -> Ratios:
    """`times` gives seconds a step, for a turn with taps or without."""
    turns = _turns(engine, rounds, lambda is_on: np.percentile(times(is_on), (50, 99)))
    p50, p99 = np.median(turns[True] / turns[False], axis=0)
    alone, tapped = (np.median(turns[is_on][:, 0]) * 1e3 for is_on in (False, True))
    return Ratios(float(p50), float(p99), float(alone), float(tapped))


def _alone(engine: EngineProcess, case: Case, batch: int) -> dict[str, Any]:
    times = [np.median(engine.call(decode_times, batch, NUM_NEW)) for _ in range(4)]
    sys.stdout.write(f"| {case.name} | batch {batch} | {np.median(times) * 1e3:.3f} ms |\n")
    return {"batch": batch, "alone_ms": float(np.median(times) * 1e3)}


def _turns(
    engine: EngineProcess, rounds: int, measure: Callable[[bool], Any]
) -> dict[bool, NDArray[np.float64]]:
    """With taps and without, each in turn; which goes first alternates, the first round warms."""
    found: dict[bool, list[Any]] = {False: [], True: []}
    for turn in range(rounds + 1):
        for is_on in (False, True) if turn % 2 else (True, False):
            engine.call(each_worker, gpu_mute.serve_with_taps, is_on)
            measured = measure(is_on)
            if turn:
                found[is_on].append(measured)
    return {is_on: np.array(values) for is_on, values in found.items()}


def each_worker(llm: Any, function: Callable[..., None], *given: Any) -> None:
    llm.collective_rpc(function, args=given)


if __name__ == "__main__":
    main()
