"""`make models` finds planted bugs: what it calls verified is right."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.fidelity import scenarios, tiny_models
from tests.fidelity.run_models import describe_points
from tests.fidelity.verify_model import WRONG, verify

pytestmark = pytest.mark.timeout(900)


@pytest.mark.engine
@pytest.mark.parametrize(
    ("architecture", "plant"),
    [
        ("Qwen2ForCausalLM", scenarios.plant_hidden_alone),
        pytest.param("LlamaForCausalLM", scenarios.plant_one_layer_off, marks=pytest.mark.wide),
        pytest.param("GPT2LMHeadModel", scenarios.plant_one_layer_off, marks=pytest.mark.wide),
    ],
)
def test_a_wrong_tap_is_no_verified_model(
    architecture: str, plant: Callable[[], None], runtime: Path
) -> None:
    verdict = verify(architecture, runtime, plant)
    assert verdict.outcome == WRONG
    assert verdict.prompt_error is not None
    assert verdict.decode_error is not None
    assert min(verdict.prompt_error, verdict.decode_error) > 1e-2
    assert "prompt rows" in verdict.reason


def test_the_registry_of_the_installed_vllm_is_read() -> None:
    registry = tiny_models.registry()
    assert registry["LlamaForCausalLM"].kind == "text"
    assert registry["Starcoder2ForCausalLM"].kind == "transformers"
    assert registry["Gemma3ForConditionalGeneration"].kind == "multimodal"
    assert len(registry) > 200


def test_points_are_named_by_kind_with_layers_where_some_are_missing() -> None:
    kinds = ("pre_attn", "post_attn", "post_block")
    assert describe_points([f"{kind}.{n}" for n in (0, 1) for kind in kinds], 2) == "all"
    served = ["pre_attn.0", "pre_attn.1", "post_block.0"]
    assert describe_points(served, 2) == "pre_attn, post_block (1 of 2)"
