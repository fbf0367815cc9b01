"""How long it takes to replace 512 probes, and a vector of all layers.

Real vLLM on a CPU, its engine core in a process of its own, as it serves. The usual shape is as
wide and as deep as an 8B model, and its layers are thin inside: a bank does not see that. Weights
are made up. Each way is timed from the call to its return: from then on every step has the new
numbers. Between two calls the bank is listed, so that nothing of the last one is still under way.
Run: python -m bench.banks [--shape banks-4096] [--rounds 15] [--stages] [--write]
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from statistics import median
from typing import Any, Final

import numpy as np

import clairai
from bench import weights_stages
from bench.weights_shape import hollow, layers_of
from scripts.numbers import stamp, table, write_section
from tests.engine.process import EngineProcess

NUM_PROBES: Final = 512
# The worker is in the core's process, as on one GPU; left alone, a CPU build gives it its own.
EXECUTOR: Final = "vllm.v1.executor.uniproc_executor.UniProcExecutor"
HEADING: Final = "Live banks"
Times = Mapping[str, tuple[float, float]]  # by way: median and fastest, in ms
Ways = dict[str, Callable[[], object]]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shape", default="banks-4096", help="of bench/shapes, or a folder")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--stages", action="store_true", help="what the sender waits for")
    parser.add_argument("--write", action="store_true", help="into docs/numbers.md")
    options = parser.parse_args()
    began_s = time.monotonic()
    with tempfile.TemporaryDirectory() as folder, _engine(options.shape, Path(folder)) as engine:
        layers = layers_of(Path(folder) / "model")
        found: Times = engine.call(measure, layers, options.rounds)
        if options.stages:
            sys.stdout.write(json.dumps(engine.call(stages, layers), indent=1) + "\n")
    rows = [[way, f"{middle:.1f}", f"{least:.1f}"] for way, (middle, least) in found.items()]
    made = table(["replaced", "ms, median", "ms, fastest"], rows)
    sys.stdout.write(made + "\n")
    if options.write:
        took = f"{time.monotonic() - began_s:.0f} s"
        command = f"python -m bench.banks --rounds {options.rounds}"
        write_section(HEADING, [stamp(command, took=took), *_said(), made])


def _engine(shape: str, folder: Path) -> EngineProcess:
    runtime = folder / "run"
    runtime.mkdir(mode=0o700)
    return EngineProcess(
        runtime=runtime,
        environment={"VLLM_ENABLE_V1_MULTIPROCESSING": "1"},
        model=str(hollow(shape, folder / "model")),
        load_format="dummy",
        skip_tokenizer_init=True,
        dtype="float32",
        enforce_eager=True,
        max_model_len=512,
        max_num_seqs=8,
        distributed_executor_backend=EXECUTOR,
        weight_transfer_config={"backend": "clairai_ipc"},
        additional_config=clairai.config(
            points=["post_block.*"], steering=True, capacity=NUM_PROBES
        ),
    )


def _said() -> list[str]:
    return [
        f"{NUM_PROBES} probes at one point, and a vector of all 32 layers, width 4096 (8.4 MB and "
        "0.5 MB): as wide and as deep as an 8B model, the layers thin inside, weights made up. "
        "vLLM's CPU build, the engine core and its worker in one process, as on a GPU. "
        "From the call to its return, on two cores that others used as well. The goal is 10 ms. A "
        "transfer and `redirect` are one question each, their numbers in shared memory; those of "
        "a transfer are summed on both sides."
    ]


def measure(llm: Any, layers: int, rounds: int) -> Times:
    """Runs in the process that has the LLM."""
    return {way: _times(llm, act, rounds) for way, act in _ways(llm, layers).items()}


def stages(llm: Any, layers: int) -> dict[str, dict[str, list[float]]]:
    """The banks are there: `measure` has put them."""
    return {way: weights_stages.of(act) for way, act in _ways(llm, layers).items()}


def _ways(llm: Any, layers: int) -> Ways:
    from clairai.library.engine_control import ask_engine
    from clairai.weights import Sender, bank
    from clairai.wire import control_messages

    width = ask_engine(llm, control_messages.Describe(), control_messages.Description).width
    rows_PD = np.random.default_rng(0).standard_normal((NUM_PROBES, width)).astype(np.float32)
    probes, vector = _bank(llm, rows_PD, layers)
    names = [probe.name for probe in probes]
    sender, held = Sender(llm), clairai.ProbeBank(llm)
    rows_LD = rows_PD[:layers]
    return {
        "a bank of 512, sent as one tensor": lambda: sender.send(bank(names, rows_PD)),
        "a bank of 512, sent probe by probe": lambda: sender.send(
            {f"probe::{name}": row for name, row in zip(names, rows_PD, strict=True)}
        ),
        "a bank of 512, by ProbeBank.redirect": lambda: held.redirect(names, rows_PD),
        "a bank of 512, by ProbeBank.replace": lambda: held.replace(*probes),
        "one probe of the 512, by ProbeBank.replace": lambda: held.replace(probes[7]),
        f"a vector of {layers} layers, sent": lambda: sender.send({"steer::v": rows_LD}),
        f"a vector of {layers} layers, by VectorBank.replace": lambda: clairai.VectorBank(
            llm
        ).replace(vector),
    }


def _bank(llm: Any, rows_PD: Any, layers: int) -> tuple[list[clairai.Probe], clairai.Vector]:
    """Put in place, unless they are."""
    point = clairai.Point("post_block", 0)
    probes = [clairai.Probe(f"p{at}", point, row) for at, row in enumerate(rows_PD)]
    points = [clairai.Point("post_block", layer) for layer in range(layers)]
    vector = clairai.Vector("v", dict(zip(points, rows_PD, strict=False)))
    if not clairai.ProbeBank(llm).list():
        clairai.ProbeBank(llm).add(*probes)
        clairai.VectorBank(llm).add(vector)
    return probes, vector


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
