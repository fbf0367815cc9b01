"""Time per output token under steering over that of vLLM without it, on a GPU.

In one engine, by turns: steered requests through the graphs that steer, plain requests through a
second set of graphs of the same model in which nothing of clairai is (bench/gpu_mute.py). The bank
has the one probe that gates name: what probes cost is in bench/gpu_overhead.py.
Run: python -m bench.gpu_steering [--rounds 8] [--batches 1 16 64 256]
"""

from __future__ import annotations

import argparse
import base64
import json
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np

import clairai
from bench import gpu_mute
from bench.gpu_engines import Case, decode_times, engines
from bench.gpu_overhead import BATCHES, NUM_NEW, decode_ratios, each_worker
from clairai.points import Point
from tests.engine.process import EngineProcess

ONE: Final = ("post_block.15",)
ALL: Final = ("post_block.*",)
NUM_LAYERS: Final = 32
WIDTH: Final = 4096
GATE: Final = {"probe": "post_block.3:0", "threshold": 0.5}
Entries = Sequence[Mapping[str, Any]]


@dataclass(frozen=True)
class Load:
    """What the requests of a batch ask for, each in turn."""

    name: str
    steer: Sequence[Entries]


def _distinct(vector: str, count: int = 256) -> tuple[Entries, ...]:
    return tuple([{"vector": vector, "scale": 0.01 * (1 + index)}] for index in range(count))


LOADS: Final = {
    "steering 1 layer": (
        Load("idle", ((),)),
        Load("one vector", ([{"vector": "one"}],)),
        Load("256 configurations", _distinct("one")),
    ),
    "steering 32 layers": (
        Load("idle", ((),)),
        Load("one vector, 1 layer", ([{"vector": "one"}],)),
        Load("one vector", ([{"vector": "all"}],)),
        Load("256 configurations", _distinct("all")),
        Load("gated by a probe at layer 3", ([{"vector": "late", "gate": GATE}],)),
    ),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--batches", type=int, nargs="*", default=BATCHES)
    parser.add_argument("--cases", nargs="*", default=[*LOADS])
    parser.add_argument("--loads", nargs="*", help="only those with these names")
    options = parser.parse_args()
    chosen = [case for case in cases() if case.name in options.cases]
    with (
        tempfile.TemporaryDirectory() as folder,
        engines("llama-3.1-8b", chosen, Path(folder)) as running,
    ):
        found = [one for case in chosen for one in measure(running[case.name], case, options)]
    sys.stdout.write(json.dumps({"cases": found}) + "\n")


def cases() -> list[Case]:
    return [
        Case("steering 1 layer", ONE, 1, {"steering": True}, probed=()),
        Case("steering 32 layers", ALL, 1, {"steering": True}, probed=("post_block.3",)),
    ]


def measure(engine: EngineProcess, case: Case, options: argparse.Namespace) -> list[dict[str, Any]]:
    engine.call(name_vectors, "1 layer" in case.name)
    engine.call(each_worker, gpu_mute.capture_silent)
    found = [
        _decode(engine, case, load, batch, options.rounds)
        for load in LOADS[case.name]
        if not options.loads or load.name in options.loads
        for batch in options.batches
    ]
    if "32 layers" in case.name:
        found.append(_inline(engine, options.rounds))
    return found


def _decode(
    engine: EngineProcess, case: Case, load: Load, batch: int, rounds: int
) -> dict[str, Any]:
    def times(is_on: bool) -> Any:
        return engine.call(decode_times, batch, NUM_NEW, load.steer if is_on else ((),))

    found = decode_ratios(engine, rounds, times)
    told = found.told(case.name, load.name, f"batch {batch}")
    return {"case": case.name, "load": load.name, "batch": batch, **told}


def _inline(engine: EngineProcess, rounds: int) -> dict[str, Any]:
    """How much later the first token of a lone request comes with its vector inside it."""
    engine.call(each_worker, gpu_mute.serve_with_taps, True)
    taken = {kind: [] for kind in ("plain", "inline")}  # type: dict[str, list[float]]
    for turn in range(rounds + 2):
        for kind in taken:
            seconds = engine.call(first_token_seconds, turn if kind == "inline" else None)
            if turn > 1:
                taken[kind].append(seconds)
    added_ms = float(np.median(taken["inline"]) - np.median(taken["plain"])) * 1e3
    sys.stdout.write(f"| steering 32 layers | inline vector | first token | +{added_ms:.2f} ms |\n")
    return {"load": "inline vector", "added_ms": added_ms}


def name_vectors(llm: Any, is_one: bool) -> None:
    """Runs in the engine's process, like the one below."""
    bank = clairai.VectorBank(llm)
    bank.add(_vector("one", (15,)))
    if not is_one:
        bank.add(_vector("all", range(NUM_LAYERS)), _vector("late", range(16, NUM_LAYERS)))


def first_token_seconds(llm: Any, seed: int | None) -> float:
    from vllm import SamplingParams

    rng = np.random.default_rng(seed)
    rows = {
        f"post_block.{layer}": base64.b64encode(
            (rng.standard_normal(WIDTH, dtype=np.float32) / np.float32(64)).tobytes()
        ).decode()
        for layer in range(NUM_LAYERS)
    }
    steer = [] if seed is None else [{"vector": {"dtype": "f32", "points": rows}}]
    begin = time.perf_counter()
    params = SamplingParams(
        max_tokens=1,
        temperature=0.0,
        detokenize=False,
        extra_args=clairai.request(steer=steer) if steer else None,
    )
    llm.generate([{"prompt_token_ids": [*range(100, 116)]}], params, use_tqdm=False)
    return time.perf_counter() - begin


def _vector(name: str, layers: Sequence[int]) -> clairai.Vector:
    rng = np.random.default_rng(len(layers))
    rows = {
        Point("post_block", layer): rng.standard_normal(WIDTH, dtype=np.float32) / np.float32(64)
        for layer in layers
    }
    return clairai.Vector(name, rows)


if __name__ == "__main__":
    main()
