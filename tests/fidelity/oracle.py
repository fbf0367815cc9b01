"""Hugging Face's residual stream at every point, for a model folder and token ids.

T = tokens, D = model width.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from tests.engine.models import auto_class

# Where each Hugging Face architecture keeps what we call pre_attn and post_attn: the input of these
# children of a decoder layer is the residual stream there.
NORMS = {
    "llama": ("input_layernorm", "post_attention_layernorm"),
    "qwen2": ("input_layernorm", "post_attention_layernorm"),
    "qwen3": ("input_layernorm", "post_attention_layernorm"),
    "mistral": ("input_layernorm", "post_attention_layernorm"),
    "phi3": ("input_layernorm", "post_attention_layernorm"),
    "starcoder2": ("input_layernorm", "post_attention_layernorm"),
    "gemma2": ("input_layernorm", "pre_feedforward_layernorm"),
    "gemma3_text": ("input_layernorm", "pre_feedforward_layernorm"),
    "opt": ("self_attn_layer_norm", "final_layer_norm"),
    "gpt2": ("ln_1", "ln_2"),
    "smolvlm": ("input_layernorm", "post_attention_layernorm"),
}


def hidden_states(
    folder: str, token_ids: list[int], dtype: str = "float32"
) -> dict[str, NDArray[np.float32]]:
    """Every point of every layer from one forward over the whole sequence."""
    import torch
    from transformers import AutoConfig

    # Eager attention: the faster ones leave out what some models ask for (soft caps).
    model: Any = (
        auto_class(AutoConfig.from_pretrained(folder))
        .from_pretrained(folder, dtype=getattr(torch, dtype), attn_implementation="eager")
        .eval()
    )
    pre_attn, post_attn = NORMS[model.config.model_type]
    found: dict[str, NDArray[np.float32]] = {}

    def keep(name: str) -> Any:
        def hook(_module: Any, inputs: Any, output: Any = None) -> None:
            value = inputs[0] if output is None else output
            tensor = value[0] if isinstance(value, tuple) else value
            found[name] = tensor.detach().reshape(-1, tensor.shape[-1]).float().numpy().copy()

        return hook

    for index, layer in enumerate(_layers(model)):
        getattr(layer, pre_attn).register_forward_pre_hook(keep(f"pre_attn.{index}"))
        getattr(layer, post_attn).register_forward_pre_hook(keep(f"post_attn.{index}"))
        layer.register_forward_hook(keep(f"post_block.{index}"))
    with torch.no_grad():
        model(torch.tensor([token_ids]))
    return found


def _layers(model: Any) -> Any:
    base = model.base_model
    for path in ("layers", "h", "decoder.layers", "text_model.layers"):
        module = base
        for part in path.split("."):
            module = getattr(module, part, None)
        if module is not None:
            return module
    raise LookupError(f"no decoder layers in {type(model).__name__}")


def relative_error(
    found_TD: NDArray[np.float32], truth_TD: NDArray[np.float32]
) -> NDArray[np.float64]:
    """Per value, relative to its own size or its row's root mean square, whichever is larger."""
    truth = truth_TD.astype(np.float64)
    typical = np.sqrt(np.square(truth).mean(axis=1, keepdims=True))
    error: NDArray[np.float64] = np.abs(found_TD - truth) / np.maximum(np.abs(truth), typical)
    return error
