"""A compiled graph never runs without the taps it was asked for, whatever the cache holds."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import numpy as np
import pytest
from numpy.typing import NDArray

import clairai
from clairai.points import Point
from clairai.vector.safetensors_format import dumps
from tests.engine import models, planted, steering
from tests.engine.hooked import TOLERANCE, error_of, positions
from tests.engine.process import EngineFailed, EngineProcess
from tests.engine.steering import Ask
from tests.fidelity.steered import Change

pytestmark = [pytest.mark.engine, pytest.mark.timeout(900)]

PROMPTS: Final = models.random_prompts(4, (5, 20), 512)
PLACES: Final = ("pre_attn.0", "post_attn.0", "post_block.1", "post_block.2")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return models.tiny("llama", tmp_path_factory.mktemp("compiled") / "llama")


def start(
    model: Path, runtime: Path, cache: Path, points: list[str], **changes: Any
) -> EngineProcess:
    """The GPU's compile mode forced on the CPU: CPU runs of vLLM do not reuse their cache."""
    arguments: dict[str, Any] = {
        "model": str(model),
        "skip_tokenizer_init": True,
        "dtype": "float32",
        "max_model_len": 128,
        "max_num_seqs": 4,
        "max_num_batched_tokens": 64,
        "additional_config": clairai.config(points=points, capacity=8),
        "environment": {"VLLM_CACHE_ROOT": str(cache)},
        "plant": planted.gpu_compile_mode,
    }
    return EngineProcess(runtime=runtime, **(arguments | changes))


def test_pitfall_10_one_cache_serves_every_set_of_points_with_its_own_graph(
    model: Path, runtime: Path, tmp_path: Path
) -> None:
    """And the size of the ring, another in the last start, is not part of the cache's key."""
    scores: list[Any] = []
    cached: list[set[str]] = []
    for points, ring_mib in ((["post_block.1"], 8), (["all"], 8), (["post_block.1"], 16)):
        config = clairai.config(points=points, capacity=8, ring_mib=ring_mib)
        with start(model, runtime, tmp_path, [], additional_config=config) as engine:
            scores.append(engine.call(planted.score_at, "post_block.1", PROMPTS))
        found = (tmp_path / "torch_compile_cache").glob("*/*")
        cached.append({str(path.relative_to(tmp_path)) for path in found})
    assert scores[0] == scores[1] == scores[2]
    assert cached[0] < cached[1], "the graphs of other points were not cached by themselves"
    assert cached[1] == cached[2]


def test_a_graph_without_the_taps_is_refused_when_the_key_forgets_the_points(
    model: Path, runtime: Path, tmp_path: Path
) -> None:
    with start(model, runtime, tmp_path, ["post_block.1"], plant=planted.points_not_in_key):
        pass
    both = ["post_block.1", "post_block.2"]
    with pytest.raises(EngineFailed, match="1 of 2 taps did not run during warm-up"):
        start(model, runtime, tmp_path, both, plant=planted.points_not_in_key)


def test_a_tap_that_never_runs_stops_the_engine_from_serving(
    model: Path, runtime: Path, tmp_path: Path
) -> None:
    with pytest.raises(EngineFailed, match=r"1 of 2 taps did not run .*pre_attn.1"):
        start(
            model,
            runtime,
            tmp_path,
            ["post_attn.0", "pre_attn.1"],
            plant=planted.one_tap_missing,
            enforce_eager=True,
        )


@pytest.mark.parametrize(
    "plant",
    [pytest.param(planted.gpu_compile_mode, marks=pytest.mark.wide), planted.fused_norms],
)
def test_a_compiled_graph_steers_as_hugging_face_does_with_hooks(
    plant: Callable[[], None], model: Path, runtime: Path, tmp_path: Path
) -> None:
    """Eager mode is compared with the same elsewhere, so both agree."""
    config = clairai.config(points=["all"], capacity=8, steering=True)
    rows = {point: _row(seed).astype(np.float64) for seed, point in enumerate(PLACES)}
    named = {Point.parse(point): row.astype(np.float32) for point, row in rows.items()}
    prompt = tuple(PROMPTS[0])
    always, answered = positions(0), positions(len(prompt))
    cases: list[tuple[Ask, list[Change]]] = [
        (Ask(prompt, ({"vector": "v"},)), [Change("add", rows, always)]),
        (
            Ask(prompt, ({"vector": "v", "op": "ablate", "when": "generation"},)),
            [Change("ablate", rows, answered)],
        ),
        (Ask(prompt), []),
    ]
    environment = {"VLLM_CACHE_ROOT": str(tmp_path), "TRITON_INTERPRET": "1"}
    given: dict[str, Any] = {"additional_config": config, "environment": environment}
    with start(model, runtime, tmp_path, [], plant=plant, **given) as engine:
        is_ours = engine.call(planted.num_fused_norms) > 0
        assert is_ours == (plant is planted.fused_norms)
        engine.call(steering.put, [dumps(clairai.Vector("v", named))])
        answers = engine.call(steering.answer, [ask for ask, _ in cases])
    for answer, (ask, changes) in zip(answers, cases, strict=True):
        assert error_of(model, ask, answer, changes) <= TOLERANCE
    assert len({answer.token_ids for answer in answers}) == len(answers)


def _row(seed: int) -> NDArray[np.float32]:
    return np.random.default_rng(seed).standard_normal(64).astype(np.float32)
