"""Takes a model and a whole checkpoint's tensors; gives the same model with their numbers.

initialize_layerwise_reload  model_executor/model_loader/reload/layerwise.py 0.26, 0.32
UnquantizedEmbeddingMethod   model_executor/layers/vocab_parallel_embedding.py 0.32:88

vLLM's own way: each layer is loaded as at start-up, processed as at start-up (quantised, repacked),
and copied into the tensors that compiled and captured graphs already point at.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

import torch


def reload(model: Any, model_config: Any, weights: list[tuple[str, Any]]) -> None:
    """On return the copies are done; `weights` is empty, and nothing else holds its tensors."""
    from vllm.model_executor.model_loader.reload import (
        finalize_layerwise_reload,
        initialize_layerwise_reload,
    )

    device = next(model.parameters()).device
    initialize_layerwise_reload(model)
    try:
        model.load_weights(weights)
    finally:
        # Also after a failure: it puts the model together again, so that a retry can begin.
        finalize_layerwise_reload(model, model_config)
        weights.clear()
    if device.type == "cpu":
        _repack_tied(model)
    elif device.type == "cuda":
        torch.cuda.synchronize(device)


def _repack_tied(model: Any) -> None:
    """A CPU build multiplies by packed copies, and no file holds the tensor of a tied head.

    So vLLM finds nothing to load for it and leaves its copy as it was: old logits from new states.
    """
    layers = [layer for layer in model.modules() if hasattr(layer, "cpu_linear")]
    shared = Counter(parameter for layer in model.modules() for parameter in _own(layer))
    for layer in layers:
        if any(shared[parameter] > 1 for parameter in _own(layer)):
            layer.quant_method.process_weights_after_loading(layer)


def _own(layer: Any) -> list[int]:
    return [id(parameter) for parameter in layer.parameters(recurse=False)]
