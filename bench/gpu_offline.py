"""Time of `LLM.generate` with `clairai.scores` after it, over that of `LLM.generate` alone.

One engine with 16 probes at each of 32 layers and default settings takes turns: `generate` without
taps (bench.gpu_mute says how; two engines would differ by several percent for reasons of their
own), with taps, with `scores`, and with `scores` of which every value is read. Each turn is held
against the one without taps before it. Every row is checked for, and a long run at the end has
more rows than any ring. Weights are dummies: time is the same.
Run: python -m bench.gpu_offline [--batches 1 16 64 256] [--rounds 5] [--tokens 257] [--long 2048]
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any, Final

import numpy as np

import clairai
from bench import gpu_mute
from bench.gpu_engines import Case, engines
from bench.gpu_overhead import each_worker
from tests.engine.process import EngineProcess

SHAPE: Final = "llama-3.1-8b"
TAPPED: Final = Case("32 layers x 16 probes", ("post_block.*",), 16)
PROMPT_LEN: Final = 16
KV_NBYTES: Final = 12 << 30  # 256 requests of 350 tokens
WAYS: Final = ("generate", "scores", "values")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shape", default=SHAPE)
    parser.add_argument("--batches", type=int, nargs="*", default=[1, 16, 64, 256])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--tokens", type=int, default=257)
    parser.add_argument("--long", type=int, default=2048, help="requests of the long run")
    options = parser.parse_args()
    with (
        tempfile.TemporaryDirectory() as folder,
        engines(options.shape, [TAPPED], Path(folder), kv_cache_memory_bytes=KV_NBYTES) as running,
    ):
        engine = running[TAPPED.name]
        engine.call(each_worker, gpu_mute.capture_silent)
        found = [
            compare(engine, batch, options.tokens, options.rounds) for batch in options.batches
        ]
        found.append(run_long(engine, options.long))
    sys.stdout.write(json.dumps(found) + "\n")


def compare(engine: EngineProcess, batch: int, num_new: int, rounds: int) -> dict[str, Any]:
    """Milliseconds per token without taps, and the usual ratio of each way to that."""
    for way in ("alone", "values"):  # warms
        run_turn(engine, batch, num_new, way)
    alone_s: list[float] = []
    ratios: dict[str, list[float]] = {way: [] for way in WAYS}
    parts: list[tuple[float, float]] = []
    for _ in range(rounds):
        for way in WAYS:
            turn = run_turn(engine, batch, num_new, "alone")
            alone_s.append(turn["total_s"])
            turn = run_turn(engine, batch, num_new, way)
            ratios[way].append(turn["total_s"] / alone_s[-1])
            if way == "values":
                parts.append((turn["scores_s"], turn["values_s"]))
    row = {
        "batch": batch,
        "alone_ms_per_token": 1e3 * median(alone_s) / num_new,
        **{way: round(median(found), 4) for way, found in ratios.items()},
        "scores_ms": 1e3 * median(scores_s for scores_s, _ in parts),
        "values_ms": 1e3 * median(values_s for _, values_s in parts),
    }
    report(row)
    return row


def run_turn(engine: EngineProcess, batch: int, num_new: int, way: str) -> dict[str, float]:
    engine.call(each_worker, gpu_mute.serve_with_taps, way != "alone")
    turn: dict[str, float] = engine.call(take_turn, batch, num_new, way)
    return turn


def run_long(engine: EngineProcess, num_requests: int) -> dict[str, Any]:
    row = {"long": num_requests, **run_turn(engine, num_requests, 300, "values")}
    report(row)
    return row


def report(row: dict[str, Any]) -> None:
    cells = " | ".join(f"{key} {value:.4g}" for key, value in row.items())
    sys.stdout.write(f"| {cells} |\n")
    sys.stdout.flush()


def take_turn(llm: Any, batch: int, num_new: int, way: str) -> dict[str, float]:
    """One call of generate, and what follows it; runs in the engine's process."""
    from vllm import SamplingParams

    params = SamplingParams(max_tokens=num_new, temperature=0.0, ignore_eos=True, detokenize=False)
    prompts = [
        {"prompt_token_ids": [100 + (index + at) % 1000 for at in range(PROMPT_LEN)]}
        for index in range(batch)
    ]
    begin_s = time.perf_counter()
    outputs = llm.generate(prompts, params, use_tqdm=False)
    generated_s = time.perf_counter()
    found = clairai.scores(llm, outputs) if way in ("scores", "values") else []
    scored_s = time.perf_counter()
    num_rows = count_rows(found) if way == "values" else 0
    end_s = time.perf_counter()
    if way == "values" and num_rows != batch * (PROMPT_LEN + num_new - 1):
        raise SystemExit(f"{num_rows} rows for {batch} requests of {num_new} tokens")
    return {
        "total_s": end_s - begin_s,
        "scores_s": scored_s - generated_s,
        "values_s": end_s - scored_s,
        "rows": num_rows,
        "own_mib": anonymous_mib(),
    }


def count_rows(found: Sequence[Sequence[Any]]) -> int:
    """Read every value, and count the rows that have all of them."""
    num_rows = 0
    for (scores,) in found:
        scores_NP = scores.scores_NP
        num_rows += int(np.isfinite(scores_NP.sum(axis=1)).sum())
    return num_rows


def anonymous_mib() -> float:
    """Memory of this process that is not of files."""
    status = Path("/proc/self/status").read_text()
    (line,) = (line for line in status.splitlines() if line.startswith("RssAnon:"))
    return int(line.split()[1]) / 1024


if __name__ == "__main__":
    main()
