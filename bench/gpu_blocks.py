"""Time per output token with taps over that without, in alternating blocks of 24 steps.

Within the same requests: a host that is slower for a second is so for both. The steps that follow a
change are left out, since one step is prepared while another runs. Steps in which requests come or
go are served with taps, which must hear of them, and belong to no turn. bench/gpu_mute.py says what
is the same with taps and without. Steps get longer as answers do, by more than what is to be
seen (64 requests of an 8B model: 1.7 us with each token); so times are taken relative to the line
through the steps without taps. And a host has its slow seconds, in which the steps of a small model
take half as long again; so each turn with taps is held against the two beside it. Each way has six
sets of graphs, since a set is faster or slower than another of the same graphs by where it lies:
`p50` is the mean of the sets' usual ratios, `error` the standard error of that mean.
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
from typing import Any, Final, NamedTuple

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
NUM_SETS: Final = 6  # of graphs, of each way
LEAST_STEPS: Final = 4 * NUM_SETS * BLOCK  # two turns of each set


class Stamp(NamedTuple):
    """When a step began."""

    began_s: float
    turn: int  # of all turns
    place: int  # among the steps of the same requests; or OF_NO_TURN
    num_requests: int  # that decode in it, if they all do

    @property
    def is_counted(self) -> bool:
        """The last of a turn ends when the next one has begun."""
        return self.place != OF_NO_TURN and SKIPPED <= self.place % BLOCK < BLOCK - 1


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shape", choices=[*CASES], default="llama-3.1-8b")
    parser.add_argument("--batches", type=int, nargs="*", default=BATCHES)
    parser.add_argument("--steps", type=int, default=2400)
    parser.add_argument("--cases", nargs="*", help="only those with these names")
    options = parser.parse_args()
    if options.steps < LEAST_STEPS:
        parser.error(f"--steps {options.steps}: every set of graphs has its turns in {LEAST_STEPS}")
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

    turn_N: NDArray[np.int64]
    place_N: NDArray[np.int64]
    seconds_N: NDArray[np.float64]

    def is_of(self, is_on: bool, *sets: int) -> NDArray[np.bool_]:
        is_way_N: NDArray[np.bool_] = is_tapped(self.turn_N) == is_on
        return is_way_N & np.isin(set_of(self.turn_N), sets)


def steps_of(stamps: Sequence[Stamp], batch: int) -> Steps:
    found = [
        (one.turn, one.place, after.began_s - one.began_s)
        for one, after in itertools.pairwise(stamps)
        if one.num_requests == batch and one.is_counted
    ]
    turns, places, seconds = zip(*found, strict=True)
    return Steps(np.array(turns), np.array(places), np.array(seconds))


def summary(steps: Steps) -> dict[str, float]:
    """Milliseconds and ratios."""
    relative_N = steps.seconds_N / trend(steps)
    is_off_N, is_on_N = (steps.is_of(is_on, *range(NUM_SETS)) for is_on in (False, True))
    off, on = relative_N[is_off_N], relative_N[is_on_N]
    ratio_G = by_set(steps, relative_N)
    return {
        "steps": len(on),
        "alone_ms": float(np.median(steps.seconds_N[is_off_N])) * 1e3,
        "p50": float(ratio_G.mean()),
        "error": float(ratio_G.std(ddof=1) / NUM_SETS**0.5),
        "p99": float(np.percentile(on, 99) / np.percentile(off, 99)),
        "mean": float(on.mean() / off.mean()),
    }


def by_set(steps: Steps, relative_N: NDArray[np.float64]) -> NDArray[np.float64]:
    """Of each set of graphs: the usual ratio of a turn with taps to those before and after it."""
    turns = np.unique(steps.turn_N)
    median = {turn: np.median(relative_N[steps.turn_N == turn]) for turn in turns}
    found: list[list[float]] = [[] for _ in range(NUM_SETS)]
    for turn in turns[is_tapped(turns)]:
        beside = [median[one] for one in (turn - 1, turn + 1) if one in median]
        found[set_of(turn)].append(median[turn] / np.mean(beside))
    return np.array([np.median(ratios) for ratios in found])


def trend(steps: Steps) -> NDArray[np.float64]:
    """What a step without taps takes at each place: a line through the medians of those there."""
    is_off_N = steps.is_of(False, *range(NUM_SETS))
    block_N = steps.place_N // BLOCK
    blocks = np.unique(block_N[is_off_N])
    medians = [np.median(steps.seconds_N[is_off_N & (block_N == block)]) for block in blocks]
    line = np.polyfit(blocks, medians, 1) if len(blocks) > 1 else (0.0, medians[0])
    return np.asarray(np.polyval(line, block_N), np.float64)


def is_tapped(turn: Any) -> Any:
    """Of a turn or of many; so is `set_of`."""
    return turn % 2 == 1


def set_of(turn: Any) -> Any:
    return turn // 2 % NUM_SETS


def alternate(worker: Any) -> None:
    """From now on steps are served with taps and without, by turns; runs in the worker."""
    inner = getattr(worker, "worker", worker)  # v1/worker/worker_base.py WorkerWrapperBase, 0.26
    original = inner.execute_model
    stamps: list[Stamp] = []
    inner.bench_stamps = stamps

    def execute_model(scheduled: Any, *given: Any, **named: Any) -> Any:
        turn, place = following(stamps[-1] if stamps else None, _is_alike(scheduled))
        if place == OF_NO_TURN or place % BLOCK == 0:
            is_on = place == OF_NO_TURN or is_tapped(turn)
            gpu_mute.serve_with_taps(worker, is_on, set_of(turn))
        num_requests = 0 if place == OF_NO_TURN else len(scheduled.num_scheduled_tokens)
        stamps.append(Stamp(time.perf_counter(), turn, place, num_requests))
        return original(scheduled, *given, **named)

    inner.execute_model = execute_model


def following(last: Stamp | None, is_alike: bool) -> tuple[int, int]:
    """The turn and the place of the step after this one.

    Turns go on from requests to requests: one that they cut short is taken again.
    """
    if last is None:
        return 0, OF_NO_TURN
    is_over = last.place != OF_NO_TURN and (last.place + 1) % BLOCK == 0
    return last.turn + is_over, last.place + 1 if is_alike else OF_NO_TURN


def _is_alike(scheduled: Any) -> bool:
    """A token for each request, and the same requests as before: SchedulerOutput, 0.26."""
    is_decode = scheduled.total_num_scheduled_tokens == len(scheduled.num_scheduled_tokens)
    return is_decode and not (scheduled.scheduled_new_reqs or scheduled.finished_req_ids)


def taken(worker: Any) -> list[Stamp]:
    """What was noted since the last time."""
    stamps = getattr(worker, "worker", worker).bench_stamps
    found = list(stamps)
    del stamps[:-1]  # the next turn goes on from there
    return found[1:]


def _taken(llm: Any) -> list[Stamp]:
    found: list[Stamp] = llm.collective_rpc(taken)[0]
    return found


if __name__ == "__main__":
    main()
