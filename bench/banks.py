"""Takes the demo model; gives how long it takes to replace 512 probes, and a vector of all layers.

Real vLLM on a CPU, its engine core in a process of its own, as it serves. Each way is timed from
the call to its return: from then on every step has the new numbers. Between two calls the bank is
listed, so that nothing of the last one is still under way.
Run: python -m bench.banks [--rounds 15] [--write]
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from statistics import median
from typing import Any, Final

import numpy as np

import clairai
from scripts.numbers import stamp, table, write_section
from tests.engine import models
from tests.engine.process import EngineProcess

NUM_PROBES: Final = 512
# The worker is in the core's process, as on one GPU; left alone, a CPU build gives it its own.
EXECUTOR: Final = "vllm.v1.executor.uniproc_executor.UniProcExecutor"
HEADING: Final = "Live banks"
Times = Mapping[str, tuple[float, float]]  # by way: median and fastest, in ms


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--write", action="store_true", help="into docs/numbers.md")
    options = parser.parse_args()
    began_s = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        runtime = Path(folder) / "run"
        runtime.mkdir(mode=0o700)
        with EngineProcess(
            runtime=runtime,
            environment={"VLLM_ENABLE_V1_MULTIPROCESSING": "1"},
            model=str(models.real()),
            dtype="float32",
            enforce_eager=True,
            max_model_len=512,
            max_num_seqs=8,
            distributed_executor_backend=EXECUTOR,
            weight_transfer_config={"backend": "clairai_ipc"},
            additional_config=clairai.config(
                points=["post_block.*"], steering=True, capacity=NUM_PROBES
            ),
        ) as engine:
            found: Times = engine.call(measure, options.rounds)
    rows = [[way, f"{middle:.1f}", f"{least:.1f}"] for way, (middle, least) in found.items()]
    made = table(["replaced", "ms, median", "ms, fastest"], rows)
    sys.stdout.write(made + "\n")
    if options.write:
        took = f"{time.monotonic() - began_s:.0f} s"
        command = f"python -m bench.banks --rounds {options.rounds}"
        write_section(HEADING, [stamp(command, took=took), *_said(), made])


def _said() -> list[str]:
    return [
        f"{NUM_PROBES} probes at one point, and a vector of all 30 layers, of "
        "SmolLM2-135M-Instruct, width 576; vLLM's CPU build, the engine core and its worker in a "
        "process of their own, as on one GPU. From the call to its return, on two cores that "
        "others used as well. The goal is 10 ms. A hand-over asks the engine twice and goes "
        "through shared memory, checked on both sides; `redirect` is one message."
    ]


def measure(llm: Any, rounds: int) -> Times:
    """Runs in the process that has the LLM."""
    from clairai.weights import Sender, bank

    rng = np.random.default_rng(0)
    width = 576
    rows_PD = rng.standard_normal((NUM_PROBES, width)).astype(np.float32)
    point = clairai.Point("post_block", 0)
    names = [f"p{at}" for at in range(NUM_PROBES)]
    probes = [clairai.Probe(name, point, row) for name, row in zip(names, rows_PD, strict=True)]
    points = [clairai.Point("post_block", layer) for layer in range(30)]
    vector = clairai.Vector("v", dict(zip(points, rows_PD, strict=False)))
    clairai.ProbeBank(llm).add(*probes)
    clairai.VectorBank(llm).add(vector)
    order = [probe.name for probe in clairai.ProbeBank(llm).list()]
    sender = Sender(llm)
    rows_LD = rows_PD[: len(points)]
    ways: dict[str, Callable[[], object]] = {
        "a bank of 512, handed over as one tensor": lambda: sender.send(bank(order, rows_PD)),
        "a bank of 512, handed over probe by probe": lambda: sender.send(
            {f"probe::{name}": row for name, row in zip(order, rows_PD, strict=True)}
        ),
        "a bank of 512, by ProbeBank.redirect": lambda: clairai.ProbeBank(llm).redirect(
            order, rows_PD
        ),
        "a bank of 512, by ProbeBank.replace": lambda: clairai.ProbeBank(llm).replace(*probes),
        "one probe of the 512, by ProbeBank.replace": lambda: clairai.ProbeBank(llm).replace(
            probes[7]
        ),
        "a vector of 30 layers, handed over": lambda: sender.send({"steer::v": rows_LD}),
        "a vector of 30 layers, by VectorBank.replace": lambda: clairai.VectorBank(llm).replace(
            vector
        ),
    }
    return {way: _times(llm, act, rounds) for way, act in ways.items()}


def _times(llm: Any, act: Callable[[], object], rounds: int) -> tuple[float, float]:
    taken = []
    for _ in range(rounds + 1):
        clairai.ProbeBank(llm).list()
        began_s = time.perf_counter()
        act()
        taken.append((time.perf_counter() - began_s) * 1e3)
    return median(taken[1:]), min(taken[1:])


if __name__ == "__main__":
    main()
