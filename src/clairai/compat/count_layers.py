"""Counts the layers of a model as Hugging Face's list of decoder layers has them.

Runs in: every process that reads vLLM's config.
"""

from __future__ import annotations

from typing import Any


def count_layers(model_config: Any) -> int:
    """`model_config` is vLLM's.

    LongCat's `num_hidden_layers` counts attentions, and each of its `num_layers` decoder layers has
    two (transformers, configuration_longcat_flash.py, 5.19:113).
    """
    config = model_config.hf_text_config
    counted: int = config.num_hidden_layers
    num_layers = getattr(config, "num_layers", None)
    return num_layers if isinstance(num_layers, int) and counted == 2 * num_layers else counted
