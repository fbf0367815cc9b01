"""On a GPU: the offloading connector keys by vLLM's block hashes, which carry the steering plan."""

from __future__ import annotations

from pathlib import Path
from typing import Final

import numpy as np
import pytest

import clairai
from clairai.points import Point
from clairai.vector.safetensors_format import dumps
from tests.engine import steering
from tests.engine.hooked import error_of, positions
from tests.engine.process import EngineProcess
from tests.engine.steering import Ask
from tests.fidelity.steered import Change
from tests.gpu import forced

pytestmark = [pytest.mark.gpu, pytest.mark.engine, pytest.mark.timeout(600)]

PROMPT: Final = tuple(range(10, 210))
# Of a logprob, in float32: vLLM's own attention is coarser than that on a GPU, 6e-3 on an H200.
TOLERANCE: Final = 2e-2


def _row(seed: int) -> np.ndarray[tuple[int], np.dtype[np.float64]]:
    row = np.random.default_rng(seed).standard_normal(forced.WIDTH).astype(np.float32)
    return row.astype(np.float64)


ROWS: Final = {forced.MIDDLE: _row(1)}


def test_offloaded_kv_reaches_only_requests_that_are_steered_the_same(
    runtime: Path, tmp_path: Path
) -> None:
    model = forced.model(tmp_path / "llama")
    with EngineProcess(
        runtime=runtime,
        model=str(model),
        skip_tokenizer_init=True,
        dtype="float32",
        enforce_eager=True,
        max_model_len=512,
        gpu_memory_utilization=0.1,
        kv_cache_memory_bytes=1 << 30,
        enable_prefix_caching=True,
        kv_offloading_size=1.0,
        additional_config=clairai.config(points=["post_block.*"], steering=True),
    ) as engine:
        points = {Point.parse(point): row.astype(np.float32) for point, row in ROWS.items()}
        engine.call(steering.put, [dumps(clairai.Vector("v", points))])
        steered, plain = Ask(PROMPT, ({"vector": "v"},)), Ask(PROMPT)
        always = [Change("add", ROWS, positions(0))]
        found = []
        for ask, changes in ((steered, always), (plain, []), (steered, always), (plain, [])):
            engine.call(steering.reset_cache)  # the GPU's own; what was offloaded stays
            (answer,) = engine.call(steering.answer, [ask])
            found.append(answer.num_cached)
            assert error_of(model, ask, answer, changes) <= TOLERANCE
            other = [] if changes else always
            assert error_of(model, ask, answer, other) > 5 * TOLERANCE  # it would show
    assert found[:2] == [0, 0]
    assert min(found[2:]) > 0, "nothing came back from host memory"
