"""The host's own work for steering in each engine step.

What `WorkerSteering.place` does between the runner's layout of a batch and the forward pass, for 64
and 256 requests: none steered, all by one configuration, each by its own. "decode": the same
requests continue to decode. "mixed": in each step two requests end, two others begin with a prompt
of 32 tokens, and the rest decode; adding and removing steered ones is included. The copy to a GPU
is not, so this runs on any machine; a step in which all continue to decode copies nothing. Times
are CPU time of the thread, so other work on the machine does not count.
Run: python -m bench.steer_host
"""

from __future__ import annotations

import gc
import json
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator

import numpy as np
from numpy.typing import NDArray

from clairai.engine.steer.steer_tables import SteerTables
from clairai.engine.steer.steering_plan import PlanAction, PlanRow, SteeringPlan
from clairai.engine.steer.worker_steering import WorkerSteering
from clairai.engine.step import StepBatch
from clairai.fields.ranges import OPEN_END

WIDTH, NUM_SITES, MAX_TOKENS, PROMPT = 4096, 32, 8192, 32
NUM_STEPS, NUM_WARM = 3000, 300
REQUESTS = (64, 256)
POINTS = tuple(f"post_block.{layer}" for layer in range(NUM_SITES))

Choose = Callable[[int], SteeringPlan | None]


def main() -> None:
    alike, apart = _course(0), [_course(number) for number in range(max(REQUESTS) + 2)]
    chosen: dict[str, Choose] = {
        "nobody steered": lambda _number: None,
        "all by one configuration": lambda _number: alike,
        "each by its own": lambda number: apart[number % len(apart)],
    }
    found = [
        _measured(name, kind, num_requests, steps(num_requests, choose))
        for name, choose in chosen.items()
        for kind, steps in (("decode", _decode), ("mixed", _mixed))
        for num_requests in REQUESTS
    ]
    sys.stdout.write(json.dumps({"bench": "steer_host", "results": found}) + "\n")


def _course(number: int) -> SteeringPlan:
    """Generated tokens only, at one layer of 32, with a vector of its own."""
    values_D = np.full(WIDTH, number + 1, "<f4")
    rows = (PlanRow(POINTS[number % NUM_SITES], f"digest {number}", values_D.tobytes()),)
    return SteeringPlan((PlanAction("toy", "", "add", rows, 1.0, ((PROMPT, OPEN_END),)),))


def _measured(
    name: str, kind: str, num_requests: int, steps: Iterator[float]
) -> dict[str, str | int | float]:
    gc.collect()
    seconds = [next(steps) for _ in range(NUM_STEPS)][NUM_WARM:]
    p50, p99 = np.percentile(seconds, (50, 99)) * 1e6
    line = f"{name:25s} {kind:7s} {num_requests:4d} requests: p50 {p50:7.1f} us, p99 {p99:7.1f} us"
    sys.stdout.write(line + "\n")
    sized: dict[str, str | int | float] = {"steered": name, "steps": kind}
    times = {"p50_us": round(float(p50), 1), "p99_us": round(float(p99), 1)}
    return sized | {"requests": num_requests} | times


def _steering() -> WorkerSteering:
    tables = SteerTables(
        POINTS, width=WIDTH, max_tokens=MAX_TOKENS, gate_slots=8, rows=1024, programs=1024,
        vocabulary=8, device="cpu",
    )  # fmt: skip
    return WorkerSteering(tables, {point: point for point in POINTS})


def _decode(num_requests: int, choose: Choose) -> Iterator[float]:
    steering = _steering()
    req_ids = [f"request-{number}" for number in range(num_requests)]
    for number, req_id in enumerate(req_ids):
        _open(steering, req_id, choose(number))
    counts_R = np.ones(num_requests, np.int32)
    position = PROMPT
    while True:
        position += 1
        starts_R = np.full(num_requests, position, np.int32)
        yield _place(steering, list(req_ids), counts_R, starts_R)


def _mixed(num_requests: int, choose: Choose) -> Iterator[float]:
    steering = _steering()
    live: deque[tuple[str, int]] = deque()  # and the step in which it began
    number = step = 0
    while True:
        begin = time.thread_time()
        while len(live) > num_requests - 2:
            steering.remove(live.popleft()[0])
        for _ in range(2):
            live.append((f"request-{number}", step))
            _open(steering, live[-1][0], choose(number))
            number += 1
        spent = time.thread_time() - begin
        ages_R = np.array([step - began for _, began in live], np.int32)
        starts_R = np.where(ages_R > 0, PROMPT - 1 + ages_R, 0).astype(np.int32)
        counts_R = np.where(ages_R > 0, 1, PROMPT).astype(np.int32)
        req_ids = [req_id for req_id, _ in live]
        step += 1
        yield spent + _place(steering, req_ids, counts_R, starts_R)


def _open(steering: WorkerSteering, req_id: str, plan: SteeringPlan | None) -> None:
    if plan is not None:
        steering.add(req_id, plan)


def _place(
    steering: WorkerSteering,
    req_ids: list[str],
    counts_R: NDArray[np.int32],
    starts_R: NDArray[np.int32],
) -> float:
    batch = StepBatch(req_ids, counts_R, starts_R)  # the runner's own work, not ours
    begin = time.thread_time()
    steering.place(batch)
    return time.thread_time() - begin


if __name__ == "__main__":
    main()
