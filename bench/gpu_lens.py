"""What clairai and vllm-lens each cost on one GPU, side by side.

Three engines of the same model beside each other on one GPU: vLLM alone, clairai with probes at one
layer, vllm-lens with the activations of that layer; each as its own documentation has it, in turn,
with the same prompts. What was asked for is in the caller's hands when the clock stops: scores for
every token here, activations for every token there. Time per output token is that of the longer
answers less that of the shorter ones.
Run: python -m bench.gpu_lens --lens FOLDER, where `pip install --target FOLDER vllm-lens==1.2.1
--no-deps` and the same for cloudpickle and zstandard have been.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import itertools
import json
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np

import clairai
from bench.gpu_engines import Case, engines
from tests.engine.process import EngineFailed, EngineProcess

LAYER, NUM_PROBES, PROMPT_LEN = 15, 16, 16
LENGTHS: Final = (8, 72)  # of the answers
PLUGIN: Final = "activations"  # entry_points.txt of vllm-lens 1.2.1
INSTALL: Final = (
    "vllm-lens is not in {}; on a machine that reaches PyPI run `pip install --target {} --no-deps "
    "vllm-lens==1.2.1 cloudpickle zstandard` with Python 3.12, and carry the folder here"
)


@dataclass(frozen=True)
class Arm:
    """One engine: how it is asked, and what its caller takes home."""

    case: Case
    ask: Callable[[], dict[str, Any] | None]
    take: Callable[[Any, Any], int]
    plant: Callable[[], None] | None = None


def ask_nothing() -> None:
    return None


def ask_scores() -> dict[str, Any]:
    return clairai.request(prompt_scores=True)


def ask_activations() -> dict[str, Any]:
    return {"output_residual_stream": [LAYER]}


def take_nothing(_llm: Any, _outputs: Any) -> int:
    return 0


def take_scores(llm: Any, outputs: Any) -> int:
    """How many rows came; the last token of an answer is never forwarded."""
    found = [answers[0].scores_NP for answers in clairai.scores(llm, outputs)]
    return sum(int(np.isfinite(scores_NP).all(axis=1).sum()) for scores_NP in found)


def take_activations(_llm: Any, outputs: Any) -> int:
    return sum(int(output.activations["residual_stream"].shape[1]) for output in outputs)


def add_to_path(folder: str) -> None:
    """Runs in the engine's process, before vLLM is loaded; its own processes inherit it."""
    sys.path.append(folder)


def arms(lens: Path) -> dict[str, Arm]:
    lens_case = Case("vllm-lens", environment={"VLLM_PLUGINS": PLUGIN})
    # A small ring: clairai.scores() reads all that it holds.
    tapped = Case("clairai", (f"post_block.{LAYER}",), NUM_PROBES, {"ring_mib": 8})
    found = (
        Arm(Case("vLLM alone"), ask_nothing, take_nothing),
        Arm(tapped, ask_scores, take_scores),
        Arm(
            lens_case, ask_activations, take_activations, functools.partial(add_to_path, str(lens))
        ),
    )
    return {arm.case.name: arm for arm in found}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--lens", type=Path, required=True, help="folder with vllm-lens in it")
    parser.add_argument("--shape", default="llama-3.1-8b")
    parser.add_argument("--batches", type=int, nargs="*", default=[1, 16, 64])
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    if not (options.lens / "vllm_lens").is_dir():
        raise SystemExit(INSTALL.format(options.lens, options.lens))
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(3) as pool:
        starting = {
            name: pool.submit(begin, options.shape, arm, Path(folder))
            for name, arm in arms(options.lens.resolve()).items()
        }
        with opened(starting) as running:
            found = measure(running, arms(options.lens), options)
    sys.stdout.write(json.dumps({"shape": options.shape, "layer": LAYER, "found": found}) + "\n")


Opened = tuple[contextlib.ExitStack, EngineProcess]


def begin(shape: str, arm: Arm, folder: Path) -> Opened:
    changes: dict[str, Any] = {"plant": arm.plant} if arm.plant is not None else {}
    with contextlib.ExitStack() as undo:
        running = undo.enter_context(engines(shape, [arm.case], folder, **changes))
        return undo.pop_all(), running[arm.case.name]


@contextlib.contextmanager
def opened(starting: Mapping[str, Future[Opened]]) -> Iterator[dict[str, EngineProcess]]:
    """The engines that started; one that did not is said, and the others go on."""
    with contextlib.ExitStack() as undo:
        running = {}
        for name, future in starting.items():
            try:
                closing, running[name] = future.result()
            except EngineFailed as error:
                sys.stdout.write(f"| {name} | did not start: {str(error).strip()[-300:]} |\n")
            else:
                undo.enter_context(closing)
        yield running


def measure(
    running: Mapping[str, EngineProcess], asked: Mapping[str, Arm], options: argparse.Namespace
) -> list[dict[str, Any]]:
    sys.stdout.write("| batch | engine | ms a token | over alone | tokens a second | of alone |\n")
    sys.stdout.write("| --- | --- | --- | --- | --- | --- |\n")
    return [
        row
        for batch in options.batches
        for row in compare(turns(running, asked, batch, options.rounds), batch)
    ]


def turns(
    running: Mapping[str, EngineProcess], asked: Mapping[str, Arm], batch: int, rounds: int
) -> dict[str, dict[int, float]]:
    """Seconds for each length of answer: the median of the rounds after one that warms."""
    taken: dict[str, dict[int, list[float]]] = {name: {n: [] for n in LENGTHS} for name in running}
    for _ in range(rounds + 1):
        for name, num_new in itertools.product(running, LENGTHS):
            seconds = seconds_of(running[name], asked[name], batch, num_new)
            taken[name][num_new].append(seconds)
    return {
        name: {num_new: float(np.median(seconds[1:])) for num_new, seconds in lengths.items()}
        for name, lengths in taken.items()
    }


def seconds_of(engine: EngineProcess, arm: Arm, batch: int, num_new: int) -> float:
    """An arm that fails is said, and counts as nothing; the others go on."""
    try:
        return float(engine.call(answer, arm.ask, arm.take, batch, num_new))
    except EngineFailed as error:
        sys.stdout.write(f"| {batch} | {arm.case.name} | failed: {str(error).strip()[-300:]} |\n")
        return float("nan")


def compare(seconds: Mapping[str, Mapping[int, float]], batch: int) -> list[dict[str, Any]]:
    short, long = LENGTHS
    rows: list[dict[str, Any]] = []
    for name, took in seconds.items():
        token_ms = (took[long] - took[short]) / (long - short) * 1e3
        speed = batch * long / took[long]
        row: dict[str, Any] = {
            "batch": batch,
            "engine": name,
            "token_ms": token_ms,
            "tokens_a_second": speed,
        }
        rows.append(row)
        first = rows[0]
        over, of = token_ms / first["token_ms"], speed / first["tokens_a_second"]
        row |= {"time_over": over, "speed_of": of, "first": first["engine"]}
        sys.stdout.write(
            f"| {batch} | {name} | {token_ms:.3f} | {over:.3f} | {speed:.0f} | {of:.3f} |\n"
        )
    sys.stdout.flush()
    return rows


def answer(
    llm: Any,
    ask: Callable[[], dict[str, Any] | None],
    take: Callable[[Any, Any], int],
    batch: int,
    num_new: int,
) -> float:
    """Seconds until the answers, and what was asked for with them, are here; in the engine."""
    from vllm import SamplingParams

    prompts = [
        {"prompt_token_ids": [100 + (index + i) % 1000 for i in range(PROMPT_LEN)]}
        for index in range(batch)
    ]
    params = SamplingParams(
        max_tokens=num_new, temperature=0.0, ignore_eos=True, detokenize=False, extra_args=ask()
    )
    begin_s = time.perf_counter()
    outputs = llm.generate(prompts, params, use_tqdm=False)
    num_rows = take(llm, outputs)
    seconds = time.perf_counter() - begin_s
    if num_rows not in (0, batch * (PROMPT_LEN + num_new - 1)):
        raise ValueError(f"{num_rows} rows of {batch * (PROMPT_LEN + num_new - 1)} came")
    return seconds


if __name__ == "__main__":
    main()
