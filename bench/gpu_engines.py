"""Engines of one model's shape side by side on one GPU, and their times.

Two starts of the same vLLM differ by up to 4 % on one GPU, more than what is to be measured. So the
engines of all cases are loaded at once and take turns; a ratio is between turns that follow each
other. Weights are dummies: time does not depend on them.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

import clairai
from tests.engine.process import EngineProcess

SHAPES: Final = Path(__file__).parent / "shapes"
SKIPPED_STEPS: Final = 4  # of those with the whole batch


@dataclass(frozen=True)
class Case:
    """One engine: what is tapped, with how many probes at each point; nothing: vLLM alone."""

    name: str
    points: tuple[str, ...] = ()
    probes: int = 0
    settings: Mapping[str, Any] = field(default_factory=dict)
    environment: Mapping[str, str] = field(default_factory=dict)
    probed: tuple[str, ...] | None = None  # where the probes are; None: at all points

    @property
    def additional_config(self) -> dict[str, Any]:
        if not self.points:
            return {}
        capacity = self.probes
        return clairai.config(points=self.points, capacity=capacity, **self.settings)


@contextlib.contextmanager
def engines(
    shape: str, cases: Sequence[Case], runtime: Path, **changes: Any
) -> Iterator[dict[str, EngineProcess]]:
    """All cases' engines, started at the same time."""
    with ThreadPoolExecutor(len(cases)) as pool, contextlib.ExitStack() as opened:
        starting = {
            case.name: pool.submit(start_engine, shape, case, runtime, **changes) for case in cases
        }
        running = {}
        for case in cases:
            running[case.name] = opened.enter_context(starting[case.name].result())
        yield running


def start_engine(shape: str, case: Case, runtime: Path, **changes: Any) -> EngineProcess:
    """The engine of one case, its probes in the bank."""
    folder = runtime / case.name.replace(" ", "-")
    folder.mkdir(mode=0o700)
    arguments: dict[str, Any] = {
        "model": str(SHAPES / shape),
        "load_format": "dummy",
        "skip_tokenizer_init": True,
        "dtype": "bfloat16",
        "max_model_len": 4096,
        "max_num_seqs": 256,
        "max_num_batched_tokens": 8192,
        "enable_prefix_caching": False,
        "gpu_memory_utilization": 0.1,
        "kv_cache_memory_bytes": 4 << 30,
        "additional_config": case.additional_config,
    }
    environment = {
        "VLLM_ENABLE_V1_MULTIPROCESSING": "1",  # the engine core in a process of its own, as served
        "VLLM_ALLOW_INSECURE_SERIALIZATION": "1",  # this program sends functions to the worker
        "VLLM_CACHE_ROOT": str(folder / "cache"),
        **({} if case.points else {"VLLM_PLUGINS": ""}),
        **case.environment,
    }
    engine = EngineProcess(runtime=folder, environment=environment, **{**arguments, **changes})
    probed = case.points if case.probed is None else case.probed
    if probed:
        engine.call(load, probed, case.probes)
    return engine


def load(llm: Any, points: Sequence[str], num_probes: int) -> None:
    """Fill the bank; runs in the engine's process, like all below."""
    width = llm.llm_engine.model_config.get_hidden_size()
    rng = np.random.default_rng(0)
    bank = clairai.ProbeBank(llm)
    for point in map(clairai.Point.parse, _expanded(llm, points)):
        directions = rng.standard_normal((num_probes, width), dtype=np.float32) / width**0.5
        bank.add(
            *(
                clairai.Probe(f"{point}:{i}", point, direction, activation="sigmoid")
                for i, direction in enumerate(directions)
            )
        )


def _expanded(llm: Any, points: Sequence[str]) -> list[str]:
    from clairai.points import expand

    num_layers = llm.llm_engine.model_config.hf_text_config.num_hidden_layers
    return [str(point) for point in expand(list(points), num_layers)]


def decode_times(
    llm: Any,
    batch: int,
    num_new: int,
    steer: Sequence[Sequence[Mapping[str, Any]]] = ((),),
    capture: Mapping[str, Any] | None = None,
) -> NDArray[np.float64]:
    """Seconds between steps in which all of `batch` requests decode; each steered in turn."""
    add_requests(llm, batch, prompt_len=16, num_new=num_new, steer=steer, capture=capture)
    times, tokens = np.array(_run(llm)).T
    is_full = tokens == batch
    between = np.diff(times)[is_full[1:] & is_full[:-1]]
    return np.array(between[SKIPPED_STEPS:])


def prefill_seconds(llm: Any, batch: int, prompt_len: int) -> float:
    add_requests(llm, batch, prompt_len=prompt_len, num_new=1)
    begin = time.perf_counter()
    _run(llm)
    return time.perf_counter() - begin


def add_requests(
    llm: Any,
    batch: int,
    *,
    prompt_len: int,
    num_new: int,
    steer: Sequence[Sequence[Mapping[str, Any]]] = ((),),
    capture: Mapping[str, Any] | None = None,
) -> None:
    from vllm import SamplingParams

    engine = llm.llm_engine
    stamp = time.monotonic_ns()
    for index in range(batch):
        prompt = {"prompt_token_ids": [100 + (index + i) % 1000 for i in range(prompt_len)]}
        entries = list(steer[index % len(steer)])
        params = SamplingParams(
            max_tokens=num_new,
            temperature=0.0,
            ignore_eos=True,
            detokenize=False,
            extra_args=_fields(entries, capture),
        )
        engine.add_request(f"{stamp}-{index}", prompt, params)


def _fields(
    entries: Sequence[Mapping[str, Any]], capture: Mapping[str, Any] | None
) -> dict[str, Any] | None:
    """A request that asks for nothing says nothing."""
    if not entries and capture is None:
        return None
    return clairai.request(steer=entries, capture=capture)


def _run(llm: Any) -> list[tuple[float, int]]:
    """When each step's tokens came out, and of how many requests."""
    engine, found = llm.llm_engine, []
    while engine.has_unfinished_requests():
        if outputs := engine.step():
            found.append((time.perf_counter(), len(outputs)))
    return found
