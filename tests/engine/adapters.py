"""LoRA adapters in the files that PEFT writes, and the same models with them merged in.

The merged folder is for Hugging Face: what an adapter does to a model is written here from its
definition, `W + alpha / rank * B @ A`, and not by code of vLLM's.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

RANK: Final = 4
ALPHA: Final = 8.0
TARGETS: Final = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
PREFIX: Final = "base_model.model."

Tensors = dict[str, NDArray[np.float32]]


def make(model: Path, target: Path, seed: int, size: float = 0.3) -> Path:
    """An adapter of every linear layer in a model's blocks; `size` of the weights' own spread."""
    from safetensors.numpy import load_file, save_file

    rng = np.random.default_rng(seed)
    tensors: Tensors = {}
    for name, weight_OI in load_file(model / "model.safetensors").items():
        layer = name.removesuffix(".weight")
        if layer.rpartition(".")[2] not in TARGETS:
            continue
        outputs, inputs = weight_OI.shape
        spread = size * float(weight_OI.astype(np.float32).std()) / ALPHA * RANK
        down = rng.standard_normal((RANK, inputs)) / RANK**0.5
        up = rng.standard_normal((outputs, RANK)) * spread
        tensors[f"{PREFIX}{layer}.lora_A.weight"] = down.astype(np.float32)
        tensors[f"{PREFIX}{layer}.lora_B.weight"] = up.astype(np.float32)
    target.mkdir(parents=True)
    save_file(tensors, target / "adapter_model.safetensors")
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": str(model),
        "r": RANK,
        "lora_alpha": ALPHA,
        "lora_dropout": 0.0,
        "bias": "none",
        "target_modules": list(TARGETS),
    }
    (target / "adapter_config.json").write_text(json.dumps(config))
    return target


def merge(model: Path, adapter: Path, target: Path) -> Path:
    """The model as it is with the adapter."""
    from safetensors.numpy import load_file, save_file

    target.mkdir(parents=True)
    for file in model.glob("*.json"):
        shutil.copy(file, target)
    parts: dict[str, Any] = load_file(adapter / "adapter_model.safetensors")
    merged: Tensors = {}
    for name, weight in load_file(model / "model.safetensors").items():
        layer = PREFIX + name.removesuffix(".weight")
        merged[name] = weight.astype(np.float32)
        if f"{layer}.lora_A.weight" in parts:
            down, up = parts[f"{layer}.lora_A.weight"], parts[f"{layer}.lora_B.weight"]
            merged[name] = merged[name] + np.float32(ALPHA / RANK) * (up @ down)
    save_file(merged, target / "model.safetensors", metadata={"format": "pt"})
    return target


def forget_adapters(llm: Any) -> None:
    """Plant the bug that our keys of a block take the place of vLLM's own; in the engine."""
    del llm
    from vllm.v1.core import kv_cache_utils

    right = kv_cache_utils.generate_block_hash_extra_keys

    def forgetful(request: Any, *args: Any) -> Any:
        keys, index = right(request, *args)
        return tuple(key for key in keys or () if key[0] != "lora") or None, index

    forgetful.__wrapped__ = right  # type: ignore[attr-defined]
    kv_cache_utils.generate_block_hash_extra_keys = forgetful


def remember_adapters(llm: Any) -> None:
    del llm
    from vllm.v1.core import kv_cache_utils

    planted = kv_cache_utils.generate_block_hash_extra_keys
    kv_cache_utils.generate_block_hash_extra_keys = planted.__wrapped__
