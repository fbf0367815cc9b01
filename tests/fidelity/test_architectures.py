"""Every tapped value equals Hugging Face's on every architecture shape that is served."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np
import pytest
from numpy.typing import NDArray

import clairai
from tests.engine import models, steering
from tests.engine.hooked import TOLERANCE, vector_file
from tests.engine.process import EngineFailed, EngineProcess
from tests.engine.steering import Answer, Ask
from tests.fidelity import scenarios
from tests.fidelity.oracle import HuggingFace

pytestmark = [pytest.mark.engine, pytest.mark.timeout(900)]

WIDTH: Final = 64
POINTS: Final = [
    f"{k}.{layer}" for layer in range(4) for k in ("pre_attn", "post_attn", "post_block")
]
# Fused residuals, extra norms, one-tensor blocks: the three shapes of block there are. The others
# are of these shapes.
MATRIX: Final = ("llama", "gemma3", "opt")
OTHERS: Final = ("gpt2", "qwen2", "mistral", "phi3", "gemma2", "starcoder2")
NO_IMAGES: Final = {"limit_mm_per_prompt": {"image": 0}}  # else vLLM wants a processor's files
CHANGES: Final[dict[str, dict[str, Any]]] = {"smolvlm": NO_IMAGES}
PROMPTS: Final = models.random_prompts(3, (1, 7, 50), 512)


def _wide(names: Sequence[str]) -> list[Any]:
    return [pytest.param(name, marks=pytest.mark.wide) for name in names]


def start(folder: Path, runtime: Path, **changes: Any) -> EngineProcess:
    arguments: dict[str, Any] = {
        "model": str(folder),
        "skip_tokenizer_init": True,
        "dtype": "float32",
        "enforce_eager": True,
        "max_model_len": 128,
        "max_num_seqs": 8,
        "max_num_batched_tokens": 32,
        "additional_config": clairai.config(points=["all"], capacity=2 * WIDTH),
    }
    return EngineProcess(runtime=runtime, **(arguments | changes))


@pytest.mark.parametrize(
    "architecture",
    [
        *(pytest.param(name, marks=pytest.mark.matrix) for name in MATRIX),
        pytest.param("qwen3", marks=[pytest.mark.matrix, pytest.mark.wide]),  # as llama
        *_wide(OTHERS),
        "smolvlm",
    ],
)
def test_every_value_equals_hugging_face(
    architecture: str, tiny: Callable[[str], Path], runtime: Path, report: Callable[..., None]
) -> None:
    folder = tiny(architecture)
    with start(folder, runtime, **CHANGES.get(architecture, {})) as engine:
        results = scenarios.compare(engine, folder, PROMPTS, POINTS, WIDTH, 6)
    report(test="fidelity", arch=architecture, p999=max(result.p999 for result in results))
    for result in results:
        assert result.num_decode_rows == 5 * len(PROMPTS)
        assert result.p999 <= 1e-5, result


def test_pitfall_03_a_tap_one_layer_off_is_caught(
    tiny: Callable[[str], Path], runtime: Path
) -> None:
    folder = tiny("llama")
    with start(folder, runtime, plant=scenarios.plant_one_layer_off) as engine:
        results = scenarios.compare(engine, folder, PROMPTS, ["post_block.1"], WIDTH, 6)
    assert results[0].p999 > 1e-2


def test_pitfall_02_a_tap_on_hidden_alone_is_caught(
    tiny: Callable[[str], Path], runtime: Path
) -> None:
    folder = tiny("llama")
    with start(folder, runtime, plant=scenarios.plant_hidden_alone) as engine:
        results = scenarios.compare(engine, folder, PROMPTS, ["post_block.1"], WIDTH, 6)
    assert results[0].p999 > 1e-2


# To compile a model takes a minute.
@pytest.mark.parametrize("architecture", ["llama", *_wide(("qwen3", "gemma3", "opt"))])
def test_pitfall_05_compiled_and_eager_give_the_same_values(
    architecture: str, tiny: Callable[[str], Path], runtime: Path
) -> None:
    folder = tiny(architecture)
    with start(folder, runtime, enforce_eager=False) as engine:
        results = scenarios.compare(engine, folder, PROMPTS, POINTS, WIDTH, 6)
    for result in results:
        assert result.p999 <= 1e-5, result


# Shapes that show the stream to no norm, or not at every point: tapped at the doors of blocks.
PARALLEL: Final = ("cohere", "cohere2", "gpt_neox")
WITHOUT_POST_ATTN: Final = (*PARALLEL, "opt_post_norm")
DOORS: Final = ("olmo2", "cohere", "gemma3n")
OTHER_DOORS: Final = (
    *("cohere2", "nanochat", "gpt_neox", "gpt_neox_sequential", "bloom", "falcon_sequential"),
    *("exaone4", "olmoe", "gemma4", "opt_post_norm"),
)


def error_of_logprobs(
    truth: HuggingFace, ask: Ask, answer: Answer, added: dict[str, NDArray[np.float64]]
) -> float:
    """The largest difference of a logprob from Hugging Face's, over all generated tokens."""
    logits_TV = truth.logits([*ask.prompt, *answer.token_ids], added)
    logprobs_TV = logits_TV - np.log(np.exp(logits_TV).sum(axis=1, keepdims=True))
    rows = logprobs_TV[len(ask.prompt) - 1 :]
    return max(
        abs(float(row_V[token]) - value)
        for row_V, step in zip(rows, answer.logprobs, strict=False)
        for token, value in step.items()
    )


# Of vLLM itself: its GELU of Bloom is exact, and Hugging Face's is not.
BOUNDS: Final = {"bloom": 1e-3}


@pytest.mark.parametrize("architecture", [*DOORS, *_wide(OTHER_DOORS)])
def test_values_and_steering_at_the_doors_of_blocks_equal_hugging_face(
    architecture: str, tiny: Callable[[str], Path], runtime: Path, report: Callable[..., None]
) -> None:
    folder = tiny(architecture)
    points = [
        point
        for point in POINTS
        if architecture not in WITHOUT_POST_ATTN or not point.startswith("post_attn")
    ]
    config = clairai.config(points=points, capacity=2 * WIDTH, steering=True)
    row_D = np.random.default_rng(5).standard_normal(WIDTH).astype(np.float32)
    steered = {point: {point: row_D.astype(np.float64)} for point in points[1:]}
    asks = [Ask(tuple(PROMPTS[-1]), ({"vector": name},), num_new=4) for name in steered]
    with start(folder, runtime, additional_config=config) as engine:
        results = scenarios.compare(engine, folder, PROMPTS, points, WIDTH, 6)
        engine.call(steering.put, [vector_file(*item) for item in steered.items()])
        answers = engine.call(steering.answer, asks)
    report(test="fidelity", arch=architecture, p999=max(result.p999 for result in results))
    bound = BOUNDS.get(architecture, 1e-5)
    assert {result.point: result.p999 for result in results if result.p999 > bound} == {}
    truth = HuggingFace(str(folder))
    errors = {
        point: error_of_logprobs(truth, ask, answer, rows)
        for (point, rows), ask, answer in zip(steered.items(), asks, answers, strict=True)
    }
    limit = TOLERANCE * bound / 1e-5
    assert {point: error for point, error in errors.items() if not error <= limit} == {}


@pytest.mark.parametrize("architecture", _wide(DOORS))
def test_pitfall_05_compiled_doors_give_the_same_values(
    architecture: str, tiny: Callable[[str], Path], runtime: Path
) -> None:
    folder = tiny(architecture)
    points = [point for point in POINTS if not point.startswith("post_attn")]
    config = clairai.config(points=points, capacity=2 * WIDTH, steering=True)
    with start(folder, runtime, enforce_eager=False, additional_config=config) as engine:
        results = scenarios.compare(engine, folder, PROMPTS, points, WIDTH, 6)
    assert {result.point: result.p999 for result in results if result.p999 > 1e-5} == {}


def test_a_point_that_a_parallel_block_does_not_have_is_refused_with_the_reason(
    tiny: Callable[[str], Path], runtime: Path
) -> None:
    with pytest.raises(EngineFailed, match=r"post_attn.0 cannot be tapped .*parallel block"):
        start(tiny("cohere"), runtime, additional_config=clairai.config(points=["post_attn.0"]))
