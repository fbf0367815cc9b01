"""What taps cost an engine that speculates: tokens a second over the same engine without taps.

For each method one engine with 16 probes at each layer, and a second set of its graphs without them
(bench/gpu_mute.py); they take turns. Two engines would differ by several percent for reasons of
their own: two of vLLM alone show by how much. A step in which requests have unequal numbers of
drafts runs piece by piece, and there with taps in both ways. Weights are dummies, and answers are
greedy, so the same drafts are accepted but where rounding decides otherwise: how many is written
beside the ratio. An n-gram finds what dummies repeat; an EAGLE head of dummies is hardly ever
right, and costs its time all the same.
Run: python -m bench.gpu_speculation --out FILE [--methods ngram eagle] [--batches 1 16 64 256]
     [--rounds 4] [--tokens 256] [--shape llama-3.1-8b] [--alone] [--lock FILE]
"""

from __future__ import annotations

import argparse
import itertools
import json
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Final, NamedTuple

import numpy as np

from bench import gpu_mute, turns
from bench.gpu_engines import SHAPES, Case, add_requests, start_engine
from bench.gpu_overhead import each_worker
from tests.engine import speculating
from tests.engine.process import EngineProcess

METHODS: Final = ("ngram", "eagle")
BATCHES: Final = (1, 16, 64, 256)
NUM_DRAFTS: Final = 3
NUM_NEW: Final = 256
PROMPT_LEN: Final = 16
ROOM: Final = 28_000  # tokens of an 8B model, and of its EAGLE head, in the KV cache given below
TAPPED: Final = Case("tapped", ("post_block.*",), 16)
ALONE: Final = (Case("alone"), Case("again"))
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
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--shape", default="llama-3.1-8b")
    parser.add_argument("--tokens", type=int, default=NUM_NEW)
    parser.add_argument("--alone", action="store_true", help="two engines of vLLM alone as well")
    parser.add_argument("--lock", type=Path, help="of benches that start at the same time")
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory() as name, ExitStack() as opened:
        wait_for_turn = opened.enter_context(turns.share(asked.lock))
        cases = (TAPPED, *(ALONE if asked.alone else ()))
        pool = opened.enter_context(ThreadPoolExecutor(len(cases) * len(asked.methods)))
        starting: dict[str, dict[str, Future[EngineProcess]]] = {
            method: {
                case.name: pool.submit(start, asked.shape, method, case, Path(name))
                for case in cases
            }
            for method in asked.methods
        }
        running = {
            method: {name: opened.enter_context(each.result()) for name, each in engines.items()}
            for method, engines in starting.items()
        }
        wait_for_turn()
        for method, batch in itertools.product(running, asked.batches):
            for found in compare(running[method], batch, asked.rounds, asked.tokens):
                write(asked.out, {"method": method, "batch": batch, **found})


def write(out: Path, told: Mapping[str, Any]) -> None:
    line = json.dumps(told) + "\n"
    with out.open("a") as file:
        file.write(line)
    sys.stdout.write(line)
    sys.stdout.flush()


def start(shape: str, method: str, case: Case, folder: Path) -> EngineProcess:
    runtime = folder / method
    runtime.mkdir(mode=0o700, exist_ok=True)
    engine = start_engine(
        shape,
        case,
        runtime,
        speculative_config=speculate(method, shape, runtime / case.name),
        compilation_config={"cudagraph_capture_sizes": list(SIZES)},
        gpu_memory_utilization=0.02,  # what is free is not this engine's alone
        kv_cache_memory_bytes=4 << 30,
        disable_log_stats=False,  # else vLLM does not count drafts
    )
    if case.points:
        engine.call(each_worker, gpu_mute.capture_silent)
    return engine


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
) -> Iterator[dict[str, Any]]:
    """With taps over without, in one engine; then one engine of vLLM alone over another."""
    tapped, num_new = engines["tapped"], fit(num_new, batch)

    def serve(is_on: bool) -> Speed:
        tapped.call(each_worker, gpu_mute.serve_with_taps, is_on)
        speed: Speed = tapped.call(measure, batch, num_new)
        return speed

    yield {"compared": "taps", **take_turns(lambda: serve(True), lambda: serve(False), rounds)}
    if "again" in engines:
        one, other = (engines[name] for name in ("again", "alone"))
        speeds = (
            lambda: one.call(measure, batch, num_new),
            lambda: other.call(measure, batch, num_new),
        )
        yield {"compared": "two starts", **take_turns(*speeds, rounds)}


def fit(num_new: int, batch: int) -> int:
    """So many that no request is preempted; two steps with drafts may be laid out ahead."""
    return min(num_new, ROOM // batch - PROMPT_LEN - 2 * (NUM_DRAFTS + 1))


def take_turns(one: Callable[[], Speed], other: Callable[[], Speed], rounds: int) -> dict[str, Any]:
    """Medians over turns that follow each other; which goes first alternates, the first warms."""
    found: list[tuple[Speed, Speed]] = []
    for turn in range(rounds + 1):
        if turn % 2:
            found.append((one(), other()))
        else:
            second = other()
            found.append((one(), second))
    speeds_N22 = np.array(found[1:])
    ratio_N = speeds_N22[:, 0, 0] / speeds_N22[:, 1, 0]
    (one_rate, one_accepted), (other_rate, other_accepted) = np.median(speeds_N22, axis=0)
    return {
        "tokens_s": round(float(one_rate), 1),
        "other_tokens_s": round(float(other_rate), 1),
        "ratio": round(float(np.median(ratio_N)), 4),
        "of each turn": ratio_N.round(4).tolist(),
        "accepted": round(float(one_accepted), 3),
        "other_accepted": round(float(other_accepted), 3),
    }


# --- run in the engine's process ---


def measure(llm: Any, batch: int, num_new: int) -> Speed:
    """From the first tokens of the whole batch to its last."""
    engine = llm.llm_engine
    add_requests(llm, batch, prompt_len=PROMPT_LEN, num_new=num_new)
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
