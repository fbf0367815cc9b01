"""Takes one GPU; gives the time per output token with taps over that without, by turns of 24 steps.

Within the same requests: a host that is slower for a second is so for both. The steps that follow a
change are left out, since one step is prepared while another runs. Steps in which requests come or
go are served with taps, which must hear of them, and belong to no turn. bench/gpu_mute.py says what
is the same with taps and without. Each way has two sets of graphs: what the two without taps differ
by is what cannot be told from nothing. Steps get longer as answers do, by more than what is to be
seen (64 requests of an 8B model: 1.7 us with each token); so times are taken relative to the line
through the steps without taps.
Run: python -m bench.gpu_blocks [--shape qwen3-0.6b] [--batches 1 16 64 256] [--steps 2400]
"""

from __future__ import annotations

import argparse
import itertools
import json
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from bench import gpu_mute
from bench.gpu_engines import Case, decode_times, engines
from bench.gpu_overhead import BATCHES, CASES, each_worker
from tests.engine.process import EngineProcess

BLOCK, SKIPPED = 24, 8  # steps of a turn, and how many of its first are left out
OF_NO_TURN: Final = -1  # so that the next one is the first of a turn
MOST_AT_ONCE: Final = 1200  # steps of one set of requests: of the model's longest
MOST_TOKENS: Final = 32_000  # of all requests together: what the KV cache holds
NUM_SETS: Final = 2  # of graphs, of each way
Stamp = tuple[float, int, int]  # when a step began, its number among those alike, how many requests


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shape", choices=[*CASES], default="llama-3.1-8b")
    parser.add_argument("--batches", type=int, nargs="*", default=BATCHES)
    parser.add_argument("--steps", type=int, default=2400)
    parser.add_argument("--cases", nargs="*", help="only those with these names")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        cases = [
            case for case in all_cases(options.shape, Path(folder)) if _is_wanted(case, options)
        ]
        with engines(options.shape, cases, Path(folder)) as running:
            found = [one for case in cases for one in measure(running[case.name], case, options)]
    sys.stdout.write(json.dumps({"shape": options.shape, "cases": found}) + "\n")


def all_cases(shape: str, folder: Path) -> list[Case]:
    if shape != "llama-3.1-8b":
        return [*CASES[shape]]
    kept = {"capture": {"folder": str(folder / "kept")}}
    return [
        *CASES[shape],
        Case("steering 32 layers, idle", ("post_block.*",), 1, {"steering": True}, probed=()),
        Case("captures 1 layer, idle", ("post_block.15",), 1, kept, probed=()),
    ]


def _is_wanted(case: Case, options: argparse.Namespace) -> bool:
    return not options.cases or case.name in options.cases


def measure(engine: EngineProcess, case: Case, options: argparse.Namespace) -> list[dict[str, Any]]:
    engine.call(each_worker, gpu_mute.capture_silent)
    for _ in range(NUM_SETS - 1):
        engine.call(each_worker, gpu_mute.capture_more, tuple(options.batches))
    engine.call(each_worker, alternate)
    return [_measure(engine, case.name, batch, options.steps) for batch in options.batches]


def _measure(engine: EngineProcess, name: str, batch: int, num_steps: int) -> dict[str, Any]:
    engine.call(decode_times, batch, 2 * BLOCK)  # warms
    engine.call(_taken)
    at_once = min(MOST_AT_ONCE, MOST_TOKENS // batch - 2 * 16)
    for first in range(0, num_steps, at_once):
        engine.call(decode_times, batch, min(at_once, num_steps - first))
    row = summary(steps_of(engine.call(_taken), batch))
    told = " | ".join(f"{key} {value:.4f}" for key, value in row.items())
    sys.stdout.write(f"| {name} | batch {batch} | {told} |\n")
    sys.stdout.flush()
    return {"case": name, "batch": batch, **row}


@dataclass(frozen=True)
class Steps:
    """Those in which all decode, and of which turn each is."""

    number_N: NDArray[np.int64]
    seconds_N: NDArray[np.float64]

    def is_of(self, is_on: bool, *sets: int) -> NDArray[np.bool_]:
        is_way_N: NDArray[np.bool_] = is_tapped(self.number_N) == is_on
        return is_way_N & np.isin(set_of(self.number_N), sets)


def steps_of(stamps: Sequence[Stamp], batch: int) -> Steps:
    found = [
        (number, next_s - began_s)
        for (began_s, number, size), (next_s, _, _) in itertools.pairwise(stamps)
        if size == batch and SKIPPED <= number % BLOCK < BLOCK - 1
    ]
    numbers, seconds = zip(*found, strict=True)
    return Steps(np.array(numbers), np.array(seconds))


def summary(steps: Steps) -> dict[str, float]:
    """Milliseconds and ratios; `alike` is between two sets of graphs without taps."""
    relative_N = steps.seconds_N / trend(steps)
    off, on = (relative_N[steps.is_of(is_on, *range(NUM_SETS))] for is_on in (False, True))
    p50, p99 = np.percentile(on, (50, 99)) / np.percentile(off, (50, 99))
    first, second = (np.median(relative_N[steps.is_of(False, one)]) for one in range(NUM_SETS))
    alone_ms = float(np.median(steps.seconds_N[steps.is_of(False, *range(NUM_SETS))])) * 1e3
    ratios = {"p50": float(p50), "p99": float(p99), "mean": float(on.mean() / off.mean())}
    return {"steps": len(on), "alone_ms": alone_ms, **ratios, "alike": float(second / first)}


def trend(steps: Steps) -> NDArray[np.float64]:
    """What a step without taps takes at each place: a line through the medians of their turns."""
    is_off_N = steps.is_of(False, *range(NUM_SETS))
    turn_N = steps.number_N // BLOCK
    turns = np.unique(turn_N[is_off_N])
    medians = [np.median(steps.seconds_N[is_off_N & (turn_N == turn)]) for turn in turns]
    line = np.polyfit(turns, medians, 1) if len(turns) > 1 else (0.0, medians[0])
    return np.asarray(np.polyval(line, turn_N), np.float64)


def is_tapped(number: Any) -> Any:
    """Of a step or of many; so is `set_of`."""
    return number // BLOCK % 2 == 1


def set_of(number: Any) -> Any:
    return number // (2 * BLOCK) % NUM_SETS


def alternate(worker: Any) -> None:
    """From now on steps are served with taps and without, by turns; runs in the worker."""
    inner = getattr(worker, "worker", worker)  # v1/worker/worker_base.py WorkerWrapperBase, 0.26
    original = inner.execute_model
    stamps: list[Stamp] = []
    inner.bench_stamps = stamps

    def execute_model(scheduled: Any, *given: Any, **named: Any) -> Any:
        counts, is_alike = scheduled.num_scheduled_tokens, _is_alike(scheduled)
        number = stamps[-1][1] + 1 if stamps and is_alike else OF_NO_TURN
        if number == OF_NO_TURN or number % BLOCK == 0:
            is_on = number == OF_NO_TURN or is_tapped(number)
            gpu_mute.serve_with_taps(worker, is_on, set_of(max(number, 0)))
        stamps.append((time.perf_counter(), number, len(counts) if is_alike else 0))
        return original(scheduled, *given, **named)

    inner.execute_model = execute_model


def _is_alike(scheduled: Any) -> bool:
    """A token for each request, and the same requests as before: SchedulerOutput, 0.26."""
    is_decode = scheduled.total_num_scheduled_tokens == len(scheduled.num_scheduled_tokens)
    return is_decode and not (scheduled.scheduled_new_reqs or scheduled.finished_req_ids)


def taken(worker: Any) -> list[Stamp]:
    """What was noted since the last time; then a turn begins anew."""
    stamps = getattr(worker, "worker", worker).bench_stamps
    found = list(stamps)
    stamps.clear()
    return found


def _taken(llm: Any) -> list[Stamp]:
    found: list[Stamp] = llm.collective_rpc(taken)[0]
    return found


if __name__ == "__main__":
    main()
