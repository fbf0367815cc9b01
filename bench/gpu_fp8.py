"""Why a model in fp8 takes another time with taps than without: kernels, times and outputs.

Taps leave vLLM's norms in a quantised model alone, so every kernel of vLLM's must be there with
them: as many multiplications, and as many quantisations of their inputs. Engines of vLLM alone (two
starts, because two starts differ) and one with 16 probes at each of 32 layers take turns on one
GPU. For each batch size: milliseconds per token, and the kernels of a decode step by name, how
often each ran and how long. Then a small real model in fp8, with taps and without: its greedy
tokens and their logprobs. Results are written to a folder as they come.
Run: python -m bench.gpu_fp8 --out FOLDER [--batches 1 16 64 256] [--rounds 3] [--only times]
     [--lock FILE]
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, Final

import numpy as np

from bench import gpu_kernels, turns
from bench.gpu_engines import Case, decode_times, engines
from tests.engine import models
from tests.engine.process import EngineProcess

SHAPE: Final = "llama-3.1-8b"
BATCHES: Final = (1, 16, 64, 256)
FIRST: Final = Case("vLLM alone, first")
SECOND: Final = Case("vLLM alone, second")
TAPPED: Final = Case("32 layers x 16 probes", ("post_block.*",), 16)
NUM_NEW: Final = 72
PARTS: Final = ("times", "outputs")
TEXTS: Final = (
    "It was a bright cold day in April, and the clocks were striking thirteen.",
    "def fibonacci(n):\n    if n < 2:\n        return n\n    return fibonacci(n - 1) + ",
    "Water boils at",
    "The three largest cities of Japan are",
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--batches", type=int, nargs="*", default=BATCHES)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--only", nargs="*", choices=PARTS, default=PARTS)
    parser.add_argument("--lock", type=Path, help="of benches that start at the same time")
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    began_s = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        if "times" in options.only:
            compare_times(options, Path(folder))
        if "outputs" in options.only:
            compare_outputs(options.out, Path(folder))
    sys.stdout.write(f"took {time.monotonic() - began_s:.0f} s\n")


def write(out: Path, name: str, found: Any) -> None:
    """Adds a line of JSON, or one for each item of a list."""
    lines = found if isinstance(found, list) else [found]
    text = "".join(f"{json.dumps(line)}\n" for line in lines)
    with (out / f"{name}.jsonl").open("a") as file:
        file.write(text)
    if not name.startswith("kernels"):
        sys.stdout.write(f"{name} {text}")
        sys.stdout.flush()


def compare_times(options: argparse.Namespace, folder: Path) -> None:
    cases = (FIRST, SECOND, TAPPED)
    changes: dict[str, Any] = {
        "quantization": "fp8",
        "compilation_config": {"cudagraph_capture_sizes": sorted(options.batches)},
        "gpu_memory_utilization": 0.02,  # what is free is not this engine's alone
        "kv_cache_memory_bytes": 3 << 30,
    }
    with (
        turns.share(options.lock) as wait_for_turn,
        engines(SHAPE, cases, folder, **changes) as running,
    ):
        wait_for_turn()
        write(options.out, "engines", {name: one.call(describe) for name, one in running.items()})
        for batch in options.batches:
            write(options.out, "times", time_engines(running, batch, options.rounds))
        for batch in options.batches:
            compare_kernels(running, batch, options.out)


def time_engines(
    running: Mapping[str, EngineProcess], batch: int, rounds: int
) -> dict[str, float | int]:
    """The median of milliseconds per token, of turns that follow each other; the first warms."""
    found: dict[str, list[float]] = {name: [] for name in running}
    for turn in range(rounds + 1):
        for name in [*running][:: 1 if turn % 2 else -1]:
            usual_s = float(np.median(running[name].call(decode_times, batch, NUM_NEW)))
            found[name] += [1e3 * usual_s] if turn else []
    ms = {name: round(float(np.median(times)), 4) for name, times in found.items()}
    return {"batch": batch, **ms, "ratio": round(ms[TAPPED.name] / ms[FIRST.name], 4)}


def compare_kernels(running: Mapping[str, EngineProcess], batch: int, out: Path) -> None:
    """With taps, and of another start without: what differs there is not the taps' doing."""
    steps = {name: one.call(gpu_kernels.profile_step, batch) for name, one in running.items()}
    for case, name in ((TAPPED, "taps"), (SECOND, "start")):
        differences = gpu_kernels.compare(steps[FIRST.name], steps[case.name])
        write(out, f"kernels-{name}-{batch}", [asdict(one) for one in differences])
        kinds = gpu_kernels.sum_by_kind(differences)
        write(out, "kinds", {"batch": batch, "other": name, **kinds})


def describe(llm: Any) -> dict[str, Any]:
    """What decides vLLM's kernels, and how much it can hold; runs in the engine's process."""
    config = llm.llm_engine.vllm_config
    compilation = config.compilation_config
    return {
        "quantization": type(config.quant_config).__name__,
        "custom_ops": list(compilation.custom_ops),
        "pass_config": str(compilation.pass_config),
        "cudagraph_mode": str(compilation.cudagraph_mode),
        "kv_cache_blocks": config.cache_config.num_gpu_blocks,
        "norms": llm.collective_rpc(gpu_kernels.count_norms)[0],
    }


# --- outputs of a real model ---

Answer = list[tuple[int, dict[int, float]]]  # each token, and the logprobs of the best five


def compare_outputs(out: Path, folder: Path) -> None:
    changes: dict[str, Any] = {
        "model": str(models.real()),
        "load_format": "auto",
        "skip_tokenizer_init": False,
        "quantization": "fp8",
        "max_num_seqs": 16,
        "max_model_len": 512,
        "kv_cache_memory_bytes": 1 << 30,
        "compilation_config": {"cudagraph_capture_sizes": [1, 2, 4]},
    }
    cases = (Case("outputs alone"), Case("outputs tapped", ("post_block.*",), 16))
    with engines(SHAPE, cases, folder, **changes) as running:
        alone, tapped = (running[case.name].call(answer) for case in cases)
        again = running[cases[0].name].call(answer)
    found = {"taps": differ(alone, tapped), "vLLM alone, asked again": differ(alone, again)}
    write(out, "outputs", found)


def answer(llm: Any) -> list[Answer]:
    """Each text alone, so that every step has one row; runs in the engine's process."""
    from vllm import SamplingParams

    params = SamplingParams(max_tokens=32, temperature=0.0, ignore_eos=True, logprobs=5)
    found = []
    for text in TEXTS:
        (output,) = llm.generate([text], params, use_tqdm=False)
        (one,) = output.outputs
        pairs = zip(one.token_ids, one.logprobs, strict=True)
        found.append(
            [(token, {at: lp.logprob for at, lp in best.items()}) for token, best in pairs]
        )
    return found


def differ(mine: Sequence[Answer], theirs: Sequence[Answer]) -> dict[str, float | int]:
    """How many tokens are other ones, and the worst logprob up to the first such of an answer."""
    others, worst = 0, 0.0
    for one, other in zip(mine, theirs, strict=True):
        is_same = True
        for (token, best), (their_token, their_best) in zip(one, other, strict=True):
            if is_same:
                both = best.keys() & their_best.keys()
                worst = max([worst, *(abs(best[at] - their_best[at]) for at in both)])
            is_same = is_same and token == their_token
            others += token != their_token
    return {"tokens": sum(map(len, mine)), "others": others, "worst_logprob": worst}


if __name__ == "__main__":
    main()
