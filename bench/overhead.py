"""Time per output token with taps over that of vLLM alone, on the demo model.

One engine, taps taken off and put back between turns: two engines side by side differ by 10 % by
where their memory lies, more than what is to be measured. CPU only (eager: nothing is captured).
Run: python -m bench.overhead [--layers 1] [--probes 16] [--rounds 12]
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, Final

import numpy as np

import clairai
from tests.engine import models
from tests.engine.process import EngineProcess

NUM_NEW: Final = 24
WRAPPED: Final = ("execute_model", "_prepare_inputs")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--layers", type=int, default=1)
    parser.add_argument("--probes", type=int, default=16)
    parser.add_argument("--rounds", type=int, default=12)
    options = parser.parse_args()
    layers = np.linspace(15, 29, options.layers).astype(int).tolist()
    points = [f"post_block.{layer}" for layer in layers]
    with (
        tempfile.TemporaryDirectory() as runtime,
        EngineProcess(
            runtime=Path(runtime),
            model=str(models.real()),
            dtype="float32",
            enforce_eager=True,
            max_model_len=512,
            max_num_seqs=8,
            enable_prefix_caching=False,
            additional_config=clairai.config(points=points, capacity=options.probes),
        ) as engine,
    ):
        engine.call(load, points, options.probes)
        for batch in (1, 8):
            _report(batch, *_take_turns(engine, batch, options.rounds))


def _take_turns(engine: EngineProcess, batch: int, rounds: int) -> tuple[list[float], list[float]]:
    times: tuple[list[float], list[float]] = ([], [])
    for turn in range(rounds + 1):
        # Which goes first alternates; the first turn of each warms up and is dropped.
        for is_on in (False, True) if turn % 2 else (True, False):
            seconds = engine.call(time_per_token, batch, is_on)
            if turn:
                times[is_on].append(seconds)
    return times


def _report(batch: int, alone: list[float], tapped: list[float]) -> None:
    ratios = [with_taps / without for without, with_taps in zip(alone, tapped, strict=True)]
    sys.stdout.write(
        f"batch {batch}: vLLM alone {statistics.median(alone) * 1e3:.2f} ms/token, "
        f"with taps {statistics.median(tapped) * 1e3:.2f} ms/token, "
        f"ratio {statistics.median(ratios):.3f} (median of {len(ratios)} turns; "
        f"of the fastest turns {min(tapped) / min(alone):.3f})\n"
    )


def load(llm: Any, points: list[str], num_probes: int) -> None:
    """Runs in the engine's process, like all below."""
    rng = np.random.default_rng(0)
    bank = clairai.ProbeBank(llm)
    for point in map(clairai.Point.parse, points):
        bank.add(
            *(
                clairai.Probe(f"{point}:{i}", point, rng.standard_normal(576).astype(np.float32))
                for i in range(num_probes)
            )
        )


def time_per_token(llm: Any, batch: int, is_on: bool) -> float:
    """Decode only: the prompt's own time is taken off."""
    from vllm import SamplingParams

    if not is_on:
        llm.collective_rpc(take_off)
    prompts = [{"prompt_token_ids": [100 + i, 7, 8, 9]} for i in range(batch)]
    seconds = []
    for num_new in (1, NUM_NEW + 1):
        params = SamplingParams(
            max_tokens=num_new, temperature=0.0, ignore_eos=True, detokenize=False
        )
        begin = time.perf_counter()
        llm.generate(prompts, params, use_tqdm=False)
        seconds.append(time.perf_counter() - begin)
    if not is_on:
        llm.collective_rpc(put_back)
    return (seconds[1] - seconds[0]) / NUM_NEW


def take_off(worker: Any) -> None:
    """Give norms their own class and the runner its own methods back."""
    from clairai.compat.model_ops import Tapped

    runner = worker.model_runner
    norms = [module for module in runner.get_model().modules() if isinstance(module, Tapped)]
    worker.bench_kept = (
        [(norm, type(norm)) for norm in norms],
        {name: runner.__dict__.pop(name) for name in WRAPPED},
    )
    for norm in norms:
        norm.__class__ = type(norm).__bases__[1]


def put_back(worker: Any) -> None:
    norms, methods = worker.bench_kept
    for norm, kind in norms:
        norm.__class__ = kind
    worker.model_runner.__dict__.update(methods)


if __name__ == "__main__":
    main()
