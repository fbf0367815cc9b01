"""A rank whose residual stream is not that of the others ends the engine, and is named."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

import numpy as np
import pytest

import clairai
from clairai.points import Point
from clairai.vector.safetensors_format import dumps
from tests.engine import models, steering
from tests.engine.process import EngineFailed, EngineProcess
from tests.engine.steering import Ask

pytestmark = [pytest.mark.engine, pytest.mark.timeout(900)]

WIDTH: Final = 64
PROMPT: Final = tuple(range(10, 30))


def _stop_steering_on_rank_1(worker: Any) -> int:
    """Plant a fault: this rank alone leaves its copy of the stream as it is."""
    if worker.rank != 1:
        return 0
    named = worker.vllm_config.compilation_config.static_forward_context
    sites = [watched for name, watched in named.items() if name.startswith("clairai.steer.")]
    for watched in sites:
        watched.site.apply = lambda *_: None
    return len(sites)


def _plant(llm: Any) -> list[int]:
    found: list[int] = llm.collective_rpc(_stop_steering_on_rank_1)
    return found


def _hide_a_tap(worker: Any) -> int:
    """Plant a fault: a tap of this rank alone runs, and nobody sees that it did."""
    from clairai.compat.tap_proof import WatchedSite

    if worker.rank != 1:
        return 0
    named = worker.vllm_config.compilation_config.static_forward_context
    name = next(name for name, found in named.items() if isinstance(found, WatchedSite))
    named[name] = named[name].site
    return 1


def hide_a_tap_on_rank_1(llm: Any) -> list[int]:
    found: list[int] = llm.collective_rpc(_hide_a_tap)
    return found


@contextmanager
def _two_ranks(runtime: Path, tmp_path: Path) -> Iterator[EngineProcess]:
    environment = {
        "VLLM_ENABLE_V1_MULTIPROCESSING": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "0|1",
        "VLLM_ALLOW_INSECURE_SERIALIZATION": "1",  # the test sends a function to the ranks
        "PYTHONUNBUFFERED": "1",  # and reads what they print
    }
    with EngineProcess(
        runtime=runtime,
        environment=environment,
        model=str(models.tiny("llama", tmp_path / "llama")),
        skip_tokenizer_init=True,
        dtype="float32",
        enforce_eager=True,
        max_model_len=128,
        tensor_parallel_size=2,
        additional_config=clairai.config(points=["post_block.1"], steering=True),
    ) as engine:
        yield engine


@pytest.mark.layouts
def test_a_tap_that_stops_on_a_rank_whose_answer_nobody_reads_ends_the_engine(
    runtime: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    with _two_ranks(runtime, tmp_path) as engine:
        assert engine.call(hide_a_tap_on_rank_1) == [0, 1]
        with pytest.raises(EngineFailed, match="EngineDeadError"):
            engine.call(steering.answer, [Ask(PROMPT, num_new=100)])
    said = capfd.readouterr()
    assert "rank 1 ends, and the engine with it" in said.out + said.err


def test_a_rank_that_does_not_steer_is_found_out(
    runtime: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    with _two_ranks(runtime, tmp_path) as engine:
        row_D = np.random.default_rng(1).standard_normal(WIDTH).astype(np.float32)
        vector = clairai.Vector("v", {Point.parse("post_block.1"): row_D})
        engine.call(steering.put, [dumps(vector)])
        assert engine.call(_plant) == [0, 1]
        (plain,) = engine.call(steering.answer, [Ask(PROMPT, num_new=4)])
        assert len(plain.token_ids) == 4  # both ranks agree as long as nothing is steered
        with pytest.raises(EngineFailed, match="EngineDeadError"):
            engine.call(steering.answer, [Ask(PROMPT, ({"vector": "v"},), num_new=100)])
    said = capfd.readouterr()
    assert "the residual stream of rank 1 is not that of rank 0" in said.out + said.err
