"""What our norm costs more than vLLM's own, in a captured graph on a GPU.

Width 4096, bfloat16, a chain of 32 norms replayed as one graph; nobody steers, one vector at every
norm, or a gate before it. vLLM's own is what its compiler makes of the same arithmetic.
Run: python -m bench.gpu_norm
"""

from __future__ import annotations

import json
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any, Final

import numpy as np
import torch

from bench.gpu_mute import SilentNorm
from clairai.engine.score.norm_kernel import FusedNorm
from clairai.engine.steer.steer_tables import SteerTables
from clairai.engine.steer.steering_plan import PlanAction, PlanGate, PlanRow, SteeringPlan
from clairai.engine.steer.worker_steering import WorkerSteering
from clairai.engine.step import StepBatch
from clairai.fields.ranges import OPEN_END
from tests.support.random_plans import row

WIDTH, NUM_NORMS, NUM_REPLAYS = 4096, 32, 200
EPSILON: Final = 1e-5
SITES: Final = tuple(f"s{index}" for index in range(NUM_NORMS))
Chain = Callable[[torch.Tensor, torch.Tensor], None]


def main() -> None:
    found = {}
    for num_tokens in (1, 16, 64, 256):
        steering, tables = _steering()
        ways = {
            "vLLM's own": (_own(), None),
            "ours": (_ours(), None),
            "ours, nobody steers": (_steered(tables), None),
            "ours, one vector": (_steered(tables), "vector"),
            "ours, gated": (_steered(tables), "gate"),
        }
        for name, (chain, request) in ways.items():
            names = [request or "nobody"] * num_tokens
            counts = np.ones(num_tokens, np.int32)
            steering.place(StepBatch(_distinct(names), counts, np.full(num_tokens, 9, np.int32)))
            found[f"{name}, {num_tokens} rows"] = _microseconds(chain, num_tokens) / NUM_NORMS
    for name, microseconds in found.items():
        sys.stdout.write(f"| {name} | {microseconds:.2f} us a norm |\n")
    sys.stdout.write(json.dumps(found) + "\n")


def _distinct(names: list[str]) -> list[str]:
    return [f"{name}{index}" for index, name in enumerate(names)]


def _microseconds(chain: Chain, num_tokens: int) -> float:
    """Of one replay, the median of many."""
    x_TD = torch.randn(num_tokens, WIDTH, device="cuda").bfloat16()
    residual_TD = torch.randn(num_tokens, WIDTH, device="cuda").bfloat16()
    chain(x_TD, residual_TD)  # compiled before the capture
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        chain(x_TD, residual_TD)
    taken = []
    for _ in range(NUM_REPLAYS):
        torch.cuda.synchronize()
        begin_s = time.perf_counter()
        graph.replay()
        torch.cuda.synchronize()
        taken.append(time.perf_counter() - begin_s)
    return statistics.median(taken) * 1e6


def _weight() -> torch.Tensor:
    return torch.ones(WIDTH, device="cuda", dtype=torch.bfloat16)


def _own() -> Chain:
    norm, weight_D = SilentNorm(EPSILON, WIDTH, torch.bfloat16), _weight()

    def chain(x_TD: torch.Tensor, residual_TD: torch.Tensor) -> None:
        for _ in range(NUM_NORMS):
            x_TD, residual_TD = norm.norm(x_TD, residual_TD, weight_D)

    return chain


def _norms() -> list[FusedNorm]:
    stash_SRD = torch.zeros(NUM_NORMS, 512, WIDTH, device="cuda", dtype=torch.bfloat16)
    ran_S = torch.zeros(NUM_NORMS, dtype=torch.int32, device="cuda")
    return [FusedNorm(WIDTH, EPSILON, stash_SRD[i], ran_S[i]) for i in range(NUM_NORMS)]


def _ours() -> Chain:
    norms, weight_D = _norms(), _weight()

    def chain(x_TD: torch.Tensor, residual_TD: torch.Tensor) -> None:
        for norm in norms:
            x_TD, residual_TD = norm(x_TD, residual_TD, weight_D)

    return chain


def _steered(tables: SteerTables) -> Chain:
    norms, weight_D = _norms(), _weight()

    def chain(x_TD: torch.Tensor, residual_TD: torch.Tensor) -> None:
        for index, norm in enumerate(norms):
            x_TD, residual_TD = norm.steered(x_TD, residual_TD, weight_D, tables, index)

    return chain


def _steering() -> tuple[WorkerSteering, SteerTables]:
    tables = SteerTables(
        SITES, width=WIDTH, max_tokens=512, gate_slots=8, rows=128, programs=1024, vocabulary=64,
        device="cuda:0", dtype=torch.bfloat16,
    )  # fmt: skip
    tables.use_token_ids(torch.zeros(512, dtype=torch.int32, device="cuda"))
    steering = WorkerSteering(tables, {site: site for site in SITES})
    rows = tuple(_row(site, seed) for seed, site in enumerate(SITES))
    gate = PlanGate("toy", _row("s0", 99), 0.0, "none", -1e9)
    always: Any = ((0, OPEN_END),)
    for index in range(256):
        scale = 0.01 * (index + 1)
        steering.add(
            f"vector{index}", SteeringPlan((PlanAction("v", "", "add", rows, scale, always),))
        )
        gated = PlanAction("v", "", "add", rows[16:], scale, always, gate=0)
        steering.add(f"gate{index}", SteeringPlan((gated,), (gate,)))
    return steering, tables


def _row(site: str, seed: int) -> PlanRow:
    values_D = np.random.default_rng(seed).standard_normal(WIDTH, np.float32) / np.float32(64)
    return row(site, values_D)


if __name__ == "__main__":
    main()
