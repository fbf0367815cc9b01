"""The oracle finds by itself what people who know these architectures would name."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import numpy as np
import pytest
import torch

from tests.fidelity.oracle import HuggingFace, StreamHooks

# Hugging Face is loaded here, beside whatever else runs.
pytestmark = pytest.mark.timeout(900)

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


class Mixer(torch.nn.Module):  # type: ignore[misc]
    """Writes its result into memory that it is given, as vLLM's mixers of LFM2 and Mamba do."""

    def forward(self, rows_TD: torch.Tensor, result_TD: torch.Tensor) -> None:
        result_TD.copy_(rows_TD.flip(0))


class Norm(torch.nn.Module):  # type: ignore[misc]
    def forward(self, rows_TD: torch.Tensor, stream_TD: torch.Tensor) -> Any:
        return (rows_TD + stream_TD).tanh(), rows_TD + stream_TD


class Layer(torch.nn.Module):  # type: ignore[misc]
    def __init__(self) -> None:
        super().__init__()
        self.first, self.mixer, self.second = Norm(), Mixer(), Norm()

    def forward(self, rows_TD: torch.Tensor, stream_TD: torch.Tensor) -> Any:
        rows_TD, stream_TD = self.first(rows_TD, stream_TD)
        result_TD = torch.full_like(rows_TD, 7e30)  # as memory that nobody has written yet
        self.mixer(rows_TD, result_TD)
        return self.second(result_TD, stream_TD)


def test_memory_that_a_child_is_to_fill_is_not_taken_for_the_stream() -> None:
    layer = Layer()
    hooks = StreamHooks([layer], 4, num_parts=2)
    given = torch.arange(12.0).view(3, 4) / 12, torch.ones(3, 4)
    with hooks.learning():
        layer(*given)
    seen: dict[str, Any] = {}
    with hooks.reading(seen.__setitem__):
        layer(*given)
    stream_TD = given[0] + given[1]
    assert np.allclose(seen["post_attn.0"], stream_TD.tanh().flip(0) + stream_TD)
