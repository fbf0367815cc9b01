"""The oracle finds by itself what people who know these architectures would name."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Final

import pytest

from tests.fidelity.oracle import HuggingFace

# Children of a decoder layer that are given the residual stream between attention and MLP.
MIDDLES: Final = {
    "llama": "post_attention_layernorm",
    "phi3": "post_attention_layernorm",
    "gemma2": "pre_feedforward_layernorm",
    "olmo2": "mlp",  # normalises afterwards: the MLP itself is given the stream
    "opt": "final_layer_norm",
    "gpt2": "ln_2",
    "smolvlm": "post_attention_layernorm",
}


@pytest.mark.parametrize(("architecture", "middle"), MIDDLES.items())
def test_the_middle_of_a_layer_is_found_by_what_its_children_are_given(
    architecture: str, middle: str, tiny: Callable[[str], Path]
) -> None:
    hooks = HuggingFace(str(tiny(architecture)))._hooks
    assert hooks._middles == [getattr(layer, middle) for layer in hooks._layers]
    assert len(hooks._layers) == 4


def test_the_stream_after_a_layer_is_the_stream_before_the_next(
    tiny: Callable[[str], Path],
) -> None:
    streams = HuggingFace(str(tiny("llama"))).streams([5, 6, 7])
    assert len(streams) == 12
    for layer in range(3):
        assert (streams[f"post_block.{layer}"] == streams[f"pre_attn.{layer + 1}"]).all()
        assert (streams[f"post_attn.{layer}"] != streams[f"pre_attn.{layer}"]).any()
