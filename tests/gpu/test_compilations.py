"""On a GPU: nothing is compiled in front of a user, whatever a request asks for."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Final

import pytest

import clairai
from bench.gpu_engines import SHAPES
from tests.engine import planted
from tests.engine.process import EngineProcess
from tests.gpu import compilations

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(580)]

Compiled = dict[str, list[str]]  # names of kernels, by the kind of request
ENGINES: Final[dict[str, dict[str, Any]]] = {
    "V1": {"environment": {"VLLM_USE_V2_MODEL_RUNNER": "0"}},
    "V2": {"environment": {"VLLM_USE_V2_MODEL_RUNNER": "1"}},
    "V2, host publishes": {
        "environment": {"VLLM_USE_V2_MODEL_RUNNER": "1"},
        "plant": planted.large_model,
    },
    "V2, vLLM's norms": {
        "environment": {"VLLM_USE_V2_MODEL_RUNNER": "1"},
        "fused": False,
    },
    # Warmed up with more tokens than one kernel of the scorer takes: later steps need the other.
    "V2, long steps": {
        "environment": {"VLLM_USE_V2_MODEL_RUNNER": "1"},
        "max_num_batched_tokens": 16384,
    },
}


def compiled_in(name: str, runtime: Path, captures: Path) -> Compiled:
    options: dict[str, Any] = {"max_num_batched_tokens": 1024, **ENGINES[name]}
    config = clairai.config(
        points=[*compilations.POINTS, "post_block.27"],
        capacity=32,
        steering=True,
        capture={"folder": str(captures / name)},
        fused=options.pop("fused", True),
    )
    engine = EngineProcess(
        runtime=runtime,
        model=str(SHAPES / "qwen3-0.6b"),
        load_format="dummy",
        skip_tokenizer_init=True,
        dtype="bfloat16",
        max_model_len=4096,
        gpu_memory_utilization=0.1,
        kv_cache_memory_bytes=4 << 30,
        additional_config=config,
        **options,
    )
    with engine:
        found: Compiled = engine.call(compilations.compiled_by_traffic)
        return found


@pytest.fixture(scope="module")
def compiled(runtime: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Compiled]:
    captures = tmp_path_factory.mktemp("captures")
    with ThreadPoolExecutor(len(ENGINES)) as pool:
        running = {name: pool.submit(compiled_in, name, runtime, captures) for name in ENGINES}
        return {name: each.result() for name, each in running.items()}


@pytest.mark.parametrize("engine", [*ENGINES])
def test_no_kernel_is_compiled_once_the_engine_is_ready(
    engine: str, compiled: dict[str, Compiled], report: Callable[..., None]
) -> None:
    report(test="compilations", engine=engine, compiled=compiled[engine])
    assert {kind: names for kind, names in compiled[engine].items() if names} == {}
