"""What scoring costs the logits' product, beside which it runs on a GPU.

32 sites of a model 4096 wide in bfloat16; the product is that of a vocabulary of 128,256. Each in a
captured graph: the product alone, the scores alone, both at once.
Run: python -m bench.gpu_beside
"""

from __future__ import annotations

import json
import statistics
import sys
from collections.abc import Callable
from typing import Any, Final

import torch

from clairai.engine.kernel_launch import CudaDriver
from clairai.engine.score.stash_kernel import StashScorer
from tests.gpu.test_kernels import bank, tables

NUM_SITES, WIDTH, VOCABULARY, STASH_ROWS = 32, 4096, 128_256, 512
CASES: Final = ((1, 16), (16, 16), (64, 16), (256, 16), (64, 64), (256, 64))
NUM_IN_GRAPH, NUM_REPLAYS = 10, 9


def main() -> None:
    sys.stdout.write("| tokens | probes | product, us | scores alone, us | both: added, us |\n")
    sys.stdout.write("| --- | --- | --- | --- | --- |\n")
    output_VD = torch.randn(VOCABULARY, WIDTH, device="cuda", dtype=torch.bfloat16)
    found = [_measure(output_VD, *case) for case in CASES]
    sys.stdout.write(json.dumps({"bench": "gpu_beside", "found": found}) + "\n")


def _measure(output_VD: torch.Tensor, num_tokens: int, num_probes: int) -> dict[str, Any]:
    hidden_TD = torch.randn(num_tokens, WIDTH, device="cuda", dtype=torch.bfloat16)
    logits_TV = torch.empty(num_tokens, VOCABULARY, device="cuda", dtype=torch.bfloat16)
    driver, side = CudaDriver(), torch.cuda.Stream()
    scored = _scorer(driver, num_probes).launch_for(num_tokens)

    def product() -> None:
        torch.mm(hidden_TD, output_VD.t(), out=logits_TV)

    def alone() -> None:
        scored.run(driver, torch.cuda.current_stream().cuda_stream)

    def both() -> None:
        side.wait_stream(torch.cuda.current_stream())
        scored.run(driver, side.cuda_stream)
        product()
        torch.cuda.current_stream().wait_stream(side)

    taken = {name: _microseconds(work) for name, work in (("product", product), ("scores", alone))}
    taken["added"] = _microseconds(both) - taken["product"]
    row = " | ".join(f"{value:.1f}" for value in taken.values())
    sys.stdout.write(f"| {num_tokens} | {num_probes} | {row} |\n")
    sys.stdout.flush()
    return {"tokens": num_tokens, "probes": num_probes, **taken}


def _scorer(driver: CudaDriver, num_probes: int) -> StashScorer:
    held = tables(
        NUM_SITES, WIDTH, num_probes, "bfloat16", max_tokens=STASH_ROWS, stash_rows=STASH_ROWS
    )
    for name in held.sites:
        held.score_from_stash(name)
    held.load(bank(NUM_SITES, WIDTH, num_probes))
    scorer = StashScorer(held)
    scorer.prepare(driver)
    return scorer


def _microseconds(work: Callable[[], None]) -> float:
    """Of one time among many in a graph; the median of its replays."""
    work()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(NUM_IN_GRAPH):
            work()
    taken = []
    for _ in range(NUM_REPLAYS):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        taken.append(begin.elapsed_time(end) / NUM_IN_GRAPH * 1e3)
    return float(statistics.median(taken))


if __name__ == "__main__":
    main()
