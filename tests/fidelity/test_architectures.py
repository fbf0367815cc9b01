"""Every tapped value equals Hugging Face's on every architecture shape that is served."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import pytest

import clairai
from tests.engine import models
from tests.engine.process import EngineFailed, EngineProcess
from tests.fidelity import scenarios

pytestmark = [pytest.mark.engine, pytest.mark.timeout(600)]

WIDTH: Final = 64
POINTS: Final = [
    f"{k}.{layer}" for layer in range(4) for k in ("pre_attn", "post_attn", "post_block")
]
# Fused residuals, extra norms, one-tensor blocks: the three shapes of block there are. The others
# are of these shapes.
MATRIX: Final = ("llama", "qwen3", "gemma3", "opt")
OTHERS: Final = ("gpt2", "qwen2", "mistral", "phi3", "gemma2", "starcoder2")
NO_IMAGES: Final = {"limit_mm_per_prompt": {"image": 0}}  # else vLLM wants a processor's files
CHANGES: Final[dict[str, dict[str, Any]]] = {"smolvlm": NO_IMAGES}
PROMPTS: Final = models.random_prompts(3, (1, 7, 50), 512)


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
        *(pytest.param(name, marks=pytest.mark.wide) for name in OTHERS),
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


@pytest.mark.parametrize("architecture", MATRIX)
def test_pitfall_05_compiled_and_eager_give_the_same_values(
    architecture: str, tiny: Callable[[str], Path], runtime: Path
) -> None:
    folder = tiny(architecture)
    with start(folder, runtime, enforce_eager=False) as engine:
        results = scenarios.compare(engine, folder, PROMPTS, POINTS, WIDTH, 6)
    for result in results:
        assert result.p999 <= 1e-5, result


@pytest.mark.parametrize("architecture", ["olmo2", "opt_post_norm"])
def test_a_block_that_normalises_afterwards_is_refused_with_the_reason(
    architecture: str, tiny: Callable[[str], Path], runtime: Path
) -> None:
    with pytest.raises(EngineFailed, match=r"post_block.0 cannot be tapped .*post-LN"):
        start(
            tiny(architecture), runtime, additional_config=clairai.config(points=["post_block.0"])
        )
