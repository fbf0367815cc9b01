"""Errors that compute-sanitizer's tools find in our kernels.

Each kernel is launched at a few odd shapes, without an engine, in a process of its own for each
tool: memcheck finds reads and writes outside of an allocation, racecheck threads of a block that
race for shared memory. torch gives out its memory by itself then, so that every tensor has an end.
--plant launches kernels with such a fault in them instead: the tools must find those.
Run: python -m bench.gpu_sanitize [--plant] [--tools memcheck racecheck] [--parts score commit]
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch
import triton
import triton.language as tl

from clairai.engine.publish.ring_setup import OpenRing, open_ring
from clairai.engine.publish.step_rows import RowBuilder
from clairai.engine.score.score_kernel import Scorer
from clairai.engine.score.score_tables import ScoreTables, score_twin
from clairai.engine.step import ForwardInputs, RequestMark, StepBatch
from clairai.points import Point
from clairai.probe.bank import EngineBank
from clairai.probe.model import Probe
from clairai.settings import Settings
from tests.support.steered_engine import fleet, random_history

INSTALLED: Final = Path("/usr/local/cuda/bin/compute-sanitizer")
LIMIT_S: Final = 240.0
SUMMARY: Final = re.compile(r"(?:ERROR|RACECHECK) SUMMARY: (\d+)")
# (tokens, width, probes, the most tokens for which the width is cut in slices)
SHAPES: Final = ((1, 576, 1, 64), (17, 200, 33, 64), (33, 4096, 16, 64), (33, 576, 65, 16))
RACE: Final = """
extern "C" __global__ void race(int* out) {
    __shared__ volatile int last;  // else the compiler keeps it in a register
    last = threadIdx.x;
    out[threadIdx.x] = last;
}
"""


@triton.jit
def write_beyond(out_ptr, size):  # type: ignore[no-untyped-def]
    tl.store(out_ptr + size, 1.0)


def launch_score(device: torch.device, dtypes: tuple[torch.dtype, ...]) -> None:
    for dtype in dtypes:
        for num_tokens, width, capacity, most in SHAPES:
            weights = torch.randn(1, width, capacity, device=device)
            if dtype == torch.bfloat16:
                weights = torch.cat([weights.bfloat16(), (weights - weights.bfloat16()).bfloat16()])
            given = (
                torch.randn(num_tokens, width, device=device).to(dtype),
                weights,
                torch.randn(capacity, device=device),
                torch.arange(capacity, dtype=torch.int32, device=device) % 3,
            )
            ran = torch.zeros((), dtype=torch.int32, device=device)
            found, expected = torch.empty(2, num_tokens, capacity, device=device).unbind()
            Scorer(width, capacity, most, device)(*given, found, ran)
            score_twin(*given, expected, ran)
            torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-3)


def launch_commit() -> None:
    """Both homes; steps of one record and of several, with events and without."""
    point = Point("post_block", 0)
    probes = [Probe(f"p{index}", point, np.ones(64, np.float32)) for index in range(5)]
    tables = ScoreTables([str(point)], width=64, capacity=7, max_tokens=700, device="cuda:0")
    tables.load(EngineBank.empty([point], 7, 64, "toy").add(probes))
    inputs = ForwardInputs(
        torch.arange(700, device="cuda"), torch.arange(700, device="cuda", dtype=torch.int32)
    )
    for kind in ("host", "device"):
        home = open_ring(Settings(points=(str(point),), ring_mib=1, ring_home=kind), tables, 3, 9)
        home.publisher.prepare(inputs)
        builder = RowBuilder()
        for index in range(3):
            builder.add_request(f"r{index}", RequestMark(index + 1), prompt_len=40 * index)
        for counts in ([1, 1, 1], [5, 1, 690], [300, 1, 17]):
            batch = StepBatch(["r0", "r1", "r2"], np.array(counts, np.int32), np.zeros(3, np.int32))
            home.publisher.begin_step()
            home.publisher.publish(builder.build(batch), 1, inputs)
        _launch_as_in_a_graph(home, builder, inputs)
        home.publisher.flush()
        home.close()


def _launch_as_in_a_graph(home: OpenRing, builder: RowBuilder, inputs: ForwardInputs) -> None:
    """What a graph would replay, launched by itself: for a step of its own, and for none."""
    assert home.forwards is not None
    for counts in ([1, 1, 1], [5, 1, 690]):
        batch = StepBatch(["r0", "r1", "r2"], np.array(counts, np.int32), np.zeros(3, np.int32))
        home.publisher.begin_step()
        home.forwards.capture_publish(sum(counts))
        assert home.publisher.announce(builder.build(batch), 1)
        home.forwards.capture_publish(sum(counts))
        home.publisher.finish(lambda: inputs)


def launch_steer() -> None:
    for dtype, tolerance in ((torch.bfloat16, 2e-2), (torch.float32, 1e-5)):
        held = fleet(dtype, device="cuda:0")
        rng = np.random.default_rng(3)
        wrong = random_history(held, rng, num_steps=6, tolerance=tolerance)
        if wrong:
            raise ValueError(f"steered wrongly: {wrong[:3]}")


def plant_memcheck() -> None:
    out = torch.zeros(100, device="cuda")
    write_beyond[(1,)](out, len(out))
    torch.cuda.synchronize()


def plant_racecheck() -> None:
    """In CUDA's own language: Triton orders what it keeps in shared memory by itself."""
    race = torch.cuda._compile_kernel(RACE, "race")
    race(grid=(1, 1, 1), block=(128, 1, 1), args=(torch.zeros(128, dtype=torch.int32).cuda(),))
    torch.cuda.synchronize()


def launch_norm() -> None:
    """Norms that steer, and the scores of what they leave: rows that fill no tile, one too many.

    Taps that are no norms leave the same rows.
    """
    from clairai.engine.kernel_launch import CudaDriver
    from clairai.engine.score.fused_norm import FusedNormSite
    from clairai.engine.score.stash_kernel import StashScorer
    from tests.gpu.test_kernels import bank, tables
    from tests.support.random_plans import WIDTH as NARROW
    from tests.support.steered_engine import fixed_history, fleet

    width = 200
    held = tables(2, width, 3, "bfloat16", max_tokens=64, stash_rows=20)
    sites = [FusedNormSite(held, name, 1e-5) for name in held.sites]
    for name in held.sites:
        held.score_from_stash(name)
    held.load(bank(2, width, 3))
    scorer = StashScorer(held)
    driver = CudaDriver()
    scorer.prepare(driver)
    weight_D = torch.ones(width, device="cuda", dtype=torch.bfloat16)
    for num_tokens in (1, 17, 20, 21):
        x_TD = torch.randn(num_tokens, width, device="cuda").bfloat16()
        for site in sites:
            site.norm(x_TD, x_TD.clone(), weight_D)
        for name in held.sites:
            held.stash_site(name).read(x_TD)
        for way in (scorer.launch_for, scorer.launch_in_graph):
            way(min(num_tokens, 20)).run(driver, torch.cuda.current_stream().cuda_stream)
    steered = fleet(device="cuda:0")
    steered.tables.steer = _SteerByNorm(NARROW)
    any(map(any, fixed_history(steered, 0)))
    torch.cuda.synchronize()


class _SteerByNorm:
    """Steers pairs in the norm kernel, and others in the steer kernel."""

    def __init__(self, width: int) -> None:
        from clairai.engine.steer.steer_kernel import SteerLauncher

        self._alone, self._width = SteerLauncher(width), width

    def __call__(self, x_TD: Any, residual_TD: Any, tables: Any, site: int) -> None:
        from clairai.engine.score.norm_kernel import FusedNorm

        if residual_TD is None:
            self._alone(x_TD, residual_TD, tables, site)
            return
        stash_RD = torch.zeros(3, self._width, device="cuda", dtype=x_TD.dtype)
        ran = torch.zeros((), device="cuda", dtype=torch.int32)
        weight_D = torch.ones(self._width, device="cuda", dtype=x_TD.dtype)
        FusedNorm(self._width, 1e-5, stash_RD, ran).steered(
            x_TD, residual_TD, weight_D, tables, site
        )


PARTS: Final[dict[str, Callable[[], None]]] = {
    "score": lambda: launch_score(torch.device("cuda"), (torch.bfloat16, torch.float32)),
    "commit": launch_commit,
    "steer": launch_steer,
    "norm": launch_norm,
}
PLANTED: Final[dict[str, Callable[[], None]]] = {
    "memcheck": plant_memcheck,
    "racecheck": plant_racecheck,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tools", nargs="*", choices=[*PLANTED], default=[*PLANTED])
    parser.add_argument("--parts", nargs="*", choices=[*PARTS], default=[*PARTS])
    parser.add_argument("--plant", action="store_true", help="faults that must be found")
    parser.add_argument("--launch", choices=[*PARTS, *PLANTED], help="only that, in this process")
    options = parser.parse_args()
    if options.launch:
        (PARTS | PLANTED)[options.launch]()
        return
    program = INSTALLED if INSTALLED.exists() else shutil.which("compute-sanitizer")
    if program is None:
        sys.stdout.write("compute-sanitizer is not installed here: nothing was checked\n")
        return
    pairs = [(tool, part) for tool in options.tools for part in options.parts]
    if options.plant:
        pairs = [(tool, tool) for tool in options.tools]
    with ThreadPoolExecutor(len(pairs)) as pool:
        found = list(pool.map(lambda pair: check(str(program), *pair), pairs))
    for one in found:
        sys.stdout.write(f"| {one['tool']} | {one['part']} | {one['errors']} errors |\n")
        sys.stdout.write("" if one["is_good"] else f"{one['said']}\n")
    sys.stdout.write(json.dumps({"planted": options.plant, "found": found}) + "\n")
    is_found = all(one["errors"] not in (0, "?") for one in found)
    is_clean = all(one["is_good"] for one in found)
    raise SystemExit(0 if (is_found if options.plant else is_clean) else 1)


def check(program: str, tool: str, part: str) -> dict[str, Any]:
    """One kernel under one tool; what it found, or why it could not tell."""
    # cuda-bindings ask the driver for every function there ever was, and take no for an answer: no
    # fault of a kernel. A launch that fails ends the part by itself.
    command = [program, "--tool", tool, "--report-api-errors", "no", "--print-limit", "5"]
    command += [sys.executable, "-m"]
    command += ["bench.gpu_sanitize", "--launch", part]
    environment = os.environ | {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
    try:
        done = subprocess.run(
            command, env=environment, capture_output=True, text=True, check=False, timeout=LIMIT_S
        )
    except subprocess.TimeoutExpired:
        return {"tool": tool, "part": part, "errors": "?", "is_good": False, "said": "too slow"}
    said = done.stdout + done.stderr
    summary = SUMMARY.findall(said)
    errors = int(summary[-1]) if summary else "?"
    is_good = errors == 0 and done.returncode == 0
    first = max(said.find("========= "), 0)  # what was wrong first says most
    said = "" if is_good else f"{said[first : first + 3000]}\n...\n{said[-500:]}"
    return {"tool": tool, "part": part, "errors": errors, "is_good": is_good, "said": said}


if __name__ == "__main__":
    main()
