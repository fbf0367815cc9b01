"""What taps cost an engine that speculates: tokens a second over vLLM alone with the same drafts.

For each method an engine of vLLM alone and one with 16 probes at each layer, side by side on one
GPU; they take turns. Weights are dummies, the same in all engines, and answers are greedy, so both
accept the same drafts but where rounding decides otherwise: how many is written beside the ratio.
An n-gram finds what dummies repeat; an EAGLE head of dummies is hardly ever right, and costs its
time all the same.
Run: python -m bench.gpu_speculation --out FILE [--methods ngram eagle] [--batches 1 16 64 256]
     [--rounds 3] [--shape llama-3.1-8b] [--lock FILE]
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Final, NamedTuple

import numpy as np

from bench import turns
from bench.gpu_engines import SHAPES, Case, add_requests, start_engine
from tests.engine import speculating
from tests.engine.process import EngineProcess

METHODS: Final = ("ngram", "eagle")
BATCHES: Final = (1, 16, 64, 256)
NUM_DRAFTS: Final = 3
NUM_NEW: Final = 96
CASES: Final = (Case("alone"), Case("tapped", ("post_block.*",), 16))
SIZES: Final = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024)  # of graphs: 256 requests have 1,024


class Speed(NamedTuple):
    """Of one turn; `accepted` is of the drafts."""

    tokens_s: float
    accepted: float


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--methods", nargs="*", choices=METHODS, default=METHODS)
    parser.add_argument("--batches", type=int, nargs="*", default=BATCHES)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--shape", default="llama-3.1-8b")
    parser.add_argument("--tokens", type=int, default=NUM_NEW)
    parser.add_argument("--lock", type=Path, help="of benches that start at the same time")
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory() as name, ExitStack() as opened:
        wait_for_turn = opened.enter_context(turns.share(asked.lock))
        pool = opened.enter_context(ThreadPoolExecutor(2 * len(asked.methods)))
        starting: dict[str, dict[str, Future[EngineProcess]]] = {
            method: {
                case.name: pool.submit(start, asked.shape, method, case, Path(name))
                for case in CASES
            }
            for method in asked.methods
        }
        running = {
            method: {name: opened.enter_context(each.result()) for name, each in engines.items()}
            for method, engines in starting.items()
        }
        wait_for_turn()
        for method, engines in running.items():
            for batch in asked.batches:
                told = {"method": method, **compare(engines, batch, asked.rounds, asked.tokens)}
                write(asked.out, told)


def write(out: Path, told: Mapping[str, Any]) -> None:
    line = json.dumps(told) + "\n"
    with out.open("a") as file:
        file.write(line)
    sys.stdout.write(line)
    sys.stdout.flush()


def start(shape: str, method: str, case: Case, folder: Path) -> EngineProcess:
    runtime = folder / method
    runtime.mkdir(mode=0o700, exist_ok=True)
    return start_engine(
        shape,
        case,
        runtime,
        speculative_config=speculate(method, shape, runtime / case.name),
        compilation_config={"cudagraph_capture_sizes": list(SIZES)},
        gpu_memory_utilization=0.02,  # what is free is not this engine's alone
        kv_cache_memory_bytes=4 << 30,
        disable_log_stats=False,  # else vLLM does not count drafts
    )


def speculate(method: str, shape: str, folder: Path) -> dict[str, Any]:
    if method == "ngram":
        given: dict[str, Any] = {"prompt_lookup_min": 1, "prompt_lookup_max": 3}
    else:
        given = {"model": str(write_head(shape, folder.with_suffix(".eagle")))}
    return {"method": method, "num_speculative_tokens": NUM_DRAFTS, **given}


def write_head(shape: str, folder: Path) -> Path:
    """The config of an EAGLE head for a model of this shape: one block."""
    config = json.loads((SHAPES / shape / "config.json").read_text())
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config | {"num_hidden_layers": 1}))
    return folder


def compare(
    engines: Mapping[str, EngineProcess], batch: int, rounds: int, num_new: int
) -> dict[str, Any]:
    """Medians over turns that follow each other; which goes first alternates, the first warms."""
    found: dict[str, list[Speed]] = {name: [] for name in engines}
    for turn in range(rounds + 1):
        for name in [*engines][:: 1 if turn % 2 else -1]:
            speed = engines[name].call(measure, batch, num_new)
            found[name] += [speed] if turn else []
    rates = {name: np.array([one.tokens_s for one in speeds]) for name, speeds in found.items()}
    accepted = {name: [one.accepted for one in speeds] for name, speeds in found.items()}
    return {
        "batch": batch,
        **{f"{name}_tokens_s": round(float(np.median(rate)), 1) for name, rate in rates.items()},
        **{f"{name}_accepted": round(float(np.median(each)), 3) for name, each in accepted.items()},
        "ratio": round(float(np.median(rates["tapped"] / rates["alone"])), 4),
    }


# --- run in the engine's process ---


def measure(llm: Any, batch: int, num_new: int) -> Speed:
    """From the first tokens of the whole batch to its last."""
    engine = llm.llm_engine
    add_requests(llm, batch, prompt_len=16, num_new=num_new)
    before, lengths = speculating.count_drafts(llm), dict[str, int]()
    begun: tuple[float, int] | None = None
    while engine.has_unfinished_requests():
        for output in engine.step():
            lengths[output.request_id] = len(output.outputs[0].token_ids)
        if begun is None and len(lengths) == batch:
            begun = time.perf_counter(), sum(lengths.values())
    assert begun is not None
    ended_s, drafts = time.perf_counter(), speculating.count_drafts(llm).minus(before)
    share = drafts.accepted / max(drafts.proposed, 1)
    return Speed((sum(lengths.values()) - begun[1]) / (ended_s - begun[0]), share)


if __name__ == "__main__":
    main()
