"""Takes a model; gives the time per output token with taps over that of vLLM alone, in one run.

Two engines are loaded side by side and take turns, so that whatever else the machine does falls on
both. Run: python -m bench.overhead [--layers 1] [--probes 16] [--rounds 9]
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

import clairai
from tests.engine import models
from tests.engine.process import EngineProcess

NUM_NEW = 24


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--layers", type=int, default=1)
    parser.add_argument("--probes", type=int, default=16)
    parser.add_argument("--rounds", type=int, default=9)
    options = parser.parse_args()
    folder = models.real()
    points = [f"post_block.{layer}" for layer in _spread(options.layers, 30)]
    configs = [{}, clairai.config(points=points, capacity=options.probes)]
    # Twice, because which engine was started first makes more of a difference than the taps do.
    for first in (0, 1):
        with (
            tempfile.TemporaryDirectory() as runtime,
            _start(folder, runtime, configs[first]) as earlier,
            _start(folder, runtime, configs[1 - first]) as later,
        ):
            alone, tapped = (later, earlier) if first else (earlier, later)
            tapped.call(load, points, options.probes)
            sys.stdout.write(f"{'with taps' if first else 'vLLM alone'} started first\n")
            for batch in (1, 8):
                _report(batch, *_take_turns(alone, tapped, batch, options.rounds))


def _start(folder: Path, runtime: str, additional_config: dict[str, Any]) -> EngineProcess:
    return EngineProcess(
        runtime=Path(runtime),
        # One thread each, on one core: the idle engine's OpenMP threads would spin on the other's.
        environment={"VLLM_CPU_OMP_THREADS_BIND": "0"},
        model=str(folder),
        dtype="float32",
        enforce_eager=True,
        max_model_len=512,
        max_num_seqs=8,
        enable_prefix_caching=False,
        additional_config=additional_config,
    )


def _spread(num_wanted: int, num_layers: int) -> list[int]:
    return np.linspace(num_layers // 2, num_layers - 1, num_wanted).astype(int).tolist()


def _take_turns(
    alone: EngineProcess, tapped: EngineProcess, batch: int, rounds: int
) -> tuple[list[float], list[float]]:
    times: tuple[list[float], list[float]] = ([], [])
    for turn in range(rounds + 1):
        # Which one goes first alternates too; the first turn of each warms up and is dropped.
        for index in (0, 1) if turn % 2 else (1, 0):
            seconds = (alone, tapped)[index].call(time_per_token, batch)
            if turn:
                times[index].append(seconds)
    return times


def _report(batch: int, alone: list[float], tapped: list[float]) -> None:
    """The fastest turn of each: what slows a turn down is never the taps alone."""
    ratio = min(tapped) / min(alone)
    sys.stdout.write(
        f"batch {batch}: vLLM alone {min(alone) * 1e3:.2f} ms/token, "
        f"with taps {min(tapped) * 1e3:.2f} ms/token, ratio {ratio:.3f} "
        f"(fastest of {len(alone)} turns each; medians {statistics.median(alone) * 1e3:.2f} "
        f"and {statistics.median(tapped) * 1e3:.2f})\n"
    )


def load(llm: Any, points: list[str], num_probes: int) -> None:
    """Runs in the engine's process."""
    rng = np.random.default_rng(0)
    bank = clairai.ProbeBank(llm)
    for point in map(clairai.Point.parse, points):
        bank.add(
            *(
                clairai.Probe(f"{point}:{i}", point, rng.standard_normal(576).astype(np.float32))
                for i in range(num_probes)
            )
        )


def time_per_token(llm: Any, batch: int) -> float:
    """Runs in the engine's process: decode only, the prompt's own time is taken off."""
    from vllm import SamplingParams

    prompts = [{"prompt_token_ids": [100 + i, 7, 8, 9]} for i in range(batch)]
    seconds = []
    for num_new in (1, NUM_NEW + 1):
        params = SamplingParams(
            max_tokens=num_new, temperature=0.0, ignore_eos=True, detokenize=False
        )
        begin = time.perf_counter()
        llm.generate(prompts, params, use_tqdm=False)
        seconds.append(time.perf_counter() - begin)
    return (seconds[1] - seconds[0]) / NUM_NEW


if __name__ == "__main__":
    main()
