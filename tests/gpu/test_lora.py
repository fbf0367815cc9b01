"""On a GPU: adapters of LoRA under captured graphs, more of them than the GPU holds, and none.

The truth of an adapter is Hugging Face's model with the adapter merged into its weights.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Final, NamedTuple

import pytest

import clairai
from tests.engine import adapters, capturing, models, steering
from tests.engine.hooked import vector_file
from tests.engine.process import EngineProcess
from tests.engine.steering import Ask
from tests.fidelity import dtype_floor
from tests.fidelity.dtype_floor import RAW, Truth, Wanted
from tests.gpu import forced

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(580)]

DTYPE: Final = "float16"
POINTS: Final = ["pre_attn.0", "post_attn.1", "post_block.3"]
NAMES: Final = (None, "red", "green", "blue")
(PROMPT,) = models.random_prompts(6, (80,), forced.VOCABULARY)
WHOLE_BLOCKS: Final = 64
WANTED: Final = Wanted([PROMPT], POINTS, forced.WIDTH, ("post_attn.1",))


class Running(NamedTuple):
    engine: EngineProcess
    adapters: dict[str | None, Path | None]
    truths: dict[str | None, Truth]


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory, runtime: Path) -> Iterator[Running]:
    folder = tmp_path_factory.mktemp("adapters")
    base = forced.model(folder / "base")
    made: dict[str | None, Path | None] = {None: None}
    truths: dict[str | None, Truth] = {None: Truth(base, DTYPE)}
    for seed, name in enumerate(NAMES):
        if name is not None:
            adapter = made[name] = adapters.make(base, folder / name, seed)
            merged = adapters.merge(base, adapter, folder / f"{name}-merged")
            truths[name] = Truth(merged, DTYPE)
    with EngineProcess(
        runtime=runtime,
        model=str(base),
        skip_tokenizer_init=True,
        dtype=DTYPE,
        max_model_len=512,
        max_num_seqs=16,
        max_num_batched_tokens=128,
        block_size=32,
        gpu_memory_utilization=0.1,
        kv_cache_memory_bytes=256 << 20,
        enable_prefix_caching=True,
        enable_lora=True,
        max_loras=2,
        max_cpu_loras=3,
        max_lora_rank=8,
        compilation_config={"cudagraph_capture_sizes": [1, 2, 4, 8]},
        additional_config=clairai.config(
            points=POINTS,
            capacity=8,
            steering=True,
            capture={"folder": str(folder / "captures")},
        ),
    ) as engine:
        files = [vector_file(name, dict(rows)) for name, rows in WANTED.vectors.items()]
        engine.call(steering.put, files)
        yield Running(engine, made, truths)


def test_every_captured_value_is_that_of_the_model_with_the_requests_adapter(
    running: Running, report: Callable[..., None]
) -> None:
    wanted = [
        capturing.Ask(tuple(PROMPT), RAW, num_new=8, adapter=running.adapters[name])
        for name in NAMES
    ]
    found = running.engine.call(capturing.capture, wanted)
    for name, (kept,) in zip(NAMES, found, strict=True):
        distances = dtype_floor.measure_captures(kept, running.truths[name], PROMPT, POINTS)
        for point, distance in distances.items():
            report(test="LoRA", adapter=name, point=point, **distance.numbers)
            assert distance.is_near, (name, point, distance.numbers)


@pytest.mark.parametrize("is_steered", [False, True])
def test_a_prefix_cached_under_one_adapter_never_serves_another_steered_or_not(
    is_steered: bool, running: Running
) -> None:
    running.engine.call(steering.reset_cache)
    ((vector, rows),) = WANTED.vectors.items()
    steer, added = (({"vector": vector},), rows) if is_steered else ((), {})
    wanted = [
        Ask(tuple(PROMPT), steer, num_new=4, adapter=running.adapters[name]) for name in NAMES
    ]
    for num_cached in (0, WHOLE_BLOCKS):
        answers = running.engine.call(steering.answer, wanted)
        assert [answer.num_cached for answer in answers] == [num_cached] * len(NAMES)
        for name, ask, answer in zip(NAMES, wanted, answers, strict=True):
            distance = dtype_floor.measure_logprobs(ask, answer, running.truths[name], added)
            assert distance.is_near, (name, distance.numbers)
