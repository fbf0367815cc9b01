"""Model folders for tests: the real model, its first layers, and tiny random models."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any, Final

import numpy as np


def real() -> Path:
    from clairai.demo.model import smollm2

    return smollm2()


def cut(folder: Path, num_layers: int, target: Path) -> Path:
    """The first layers of a real model, as a model of its own."""
    from safetensors import safe_open
    from safetensors.numpy import save_file

    target.mkdir(parents=True)
    for file in folder.iterdir():
        if file.suffix == ".json" and file.name != "clairai-seal.json":
            shutil.copy(file, target)
    config = json.loads((target / "config.json").read_text())
    (target / "config.json").write_text(json.dumps(config | {"num_hidden_layers": num_layers}))
    with safe_open(folder / "model.safetensors", "np") as source:
        kept = {
            name: source.get_tensor(name)
            for name in source.keys()  # noqa: SIM118  # not a dict
            if ".layers." not in name or int(name.split(".layers.")[1].split(".")[0]) < num_layers
        }
    save_file(kept, target / "model.safetensors", metadata={"format": "pt"})
    return target


SHAPE: Final = {
    "vocab_size": 512,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 4,
    "num_attention_heads": 2,  # of 32: the CPU kernels take no smaller heads
    "num_key_value_heads": 1,
    "max_position_embeddings": 256,
    "tie_word_embeddings": False,
}

OPT: Final = {
    "vocab_size": 512,
    "hidden_size": 64,
    "word_embed_proj_dim": 64,
    "ffn_dim": 128,
    "num_hidden_layers": 4,
    "num_attention_heads": 2,
    "max_position_embeddings": 256,
}
GPT_NEOX: Final = {name: SHAPE[name] for name in SHAPE if name != "num_key_value_heads"}
TIED: Final = SHAPE | {"tie_word_embeddings": True}


def tiny(architecture: str, target: Path, **changes: int) -> Path:
    """A small model of that architecture with random weights, saved by Hugging Face itself."""
    import torch
    import transformers

    torch.manual_seed(11)
    config_class, extra = ARCHITECTURES[architecture]
    config: Any = getattr(transformers, config_class)(**(extra | changes))
    model = auto_class(config).from_config(config).float()
    for parameter in model.parameters():
        # Larger than Hugging Face's init: small weights make every layer nearly the identity.
        torch.nn.init.normal_(parameter, std=0.15 if parameter.dim() > 1 else 0.5)
    if architecture == "gemma3n":  # vLLM's class for text alone leaves these embeddings out
        torch.nn.init.zeros_(model.model.embed_tokens_per_layer.weight)
    model.save_pretrained(target)
    return target


def auto_class(config: Any) -> Any:
    """Hugging Face's class for models of this config that generate text."""
    import transformers

    if hasattr(config, "vision_config"):
        return transformers.AutoModelForImageTextToText
    return transformers.AutoModelForCausalLM


VISION: Final = {
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "image_size": 28,
    "patch_size": 14,
}


ARCHITECTURES: Final[dict[str, tuple[str, dict[str, Any]]]] = {
    "llama": ("LlamaConfig", SHAPE),
    "qwen2": ("Qwen2Config", SHAPE),
    "qwen3": ("Qwen3Config", SHAPE | {"head_dim": 32}),
    "mistral": ("MistralConfig", SHAPE | {"sliding_window": None}),
    "phi3": ("Phi3Config", SHAPE | {"pad_token_id": 0, "original_max_position_embeddings": 256}),
    "gemma2": ("Gemma2Config", TIED | {"head_dim": 32, "query_pre_attn_scalar": 32}),
    "gemma3": (
        "Gemma3TextConfig",
        TIED | {"head_dim": 32, "query_pre_attn_scalar": 32, "sliding_window": 32},
    ),
    "olmo2": ("Olmo2Config", SHAPE),  # normalises after its sublayers
    "exaone4": ("Exaone4Config", SHAPE | {"sliding_window": 32, "sliding_window_pattern": 4}),
    "gpt_neox": ("GPTNeoXConfig", GPT_NEOX),  # attention and MLP in parallel
    "gpt_neox_sequential": ("GPTNeoXConfig", GPT_NEOX | {"use_parallel_residual": False}),
    "bloom": ("BloomConfig", {"vocab_size": 512, "hidden_size": 64, "n_layer": 4, "n_head": 2}),
    "falcon_sequential": (
        "FalconConfig",
        SHAPE | {"parallel_attn": False, "alibi": False, "bias": False},
    ),
    "cohere": ("CohereConfig", TIED),  # gives its norm one tensor twice
    "cohere2": ("Cohere2Config", TIED | {"sliding_window": 128}),
    "nanochat": ("NanoChatConfig", SHAPE),  # its final norm normalises the embedding, too
    "olmoe": ("OlmoeConfig", SHAPE | {"num_experts": 4, "num_experts_per_tok": 2}),
    "deepseek_v3": (  # gathers rows in the loop over its blocks, where ranks hold parts of them
        "DeepseekV3Config",
        SHAPE
        | {"num_key_value_heads": 2, "kv_lora_rank": 32, "q_lora_rank": 32, "v_head_dim": 32}
        | {"qk_nope_head_dim": 32, "qk_rope_head_dim": 32, "first_k_dense_replace": 2}
        | {"n_routed_experts": 4, "num_experts_per_tok": 2, "n_group": 1, "topk_group": 1}
        | {"moe_intermediate_size": 64},
    ),
    "gemma4": (  # two lists hold its blocks
        "Gemma4TextConfig",
        TIED
        | {"head_dim": 32, "global_head_dim": 32, "sliding_window": 32, "num_kv_shared_layers": 0}
        | {"hidden_size_per_layer_input": 0, "vocab_size_per_layer_input": 512},
    ),
    "gemma3n": (  # several streams, one of them active; others run parts of its blocks
        "Gemma3nTextConfig",
        TIED
        | {"head_dim": 32, "sliding_window": 32, "num_kv_shared_layers": 2, "laurel_rank": 16}
        | {"hidden_size_per_layer_input": 32, "vocab_size_per_layer_input": 512}
        | {"layer_types": ["sliding_attention", "full_attention"] * 2}
        | {"activation_sparsity_pattern": [0.0] * 4},
    ),
    "starcoder2": ("Starcoder2Config", TIED | {"sliding_window": None}),
    "opt": ("OPTConfig", OPT),
    "opt_post_norm": ("OPTConfig", OPT | {"do_layer_norm_before": False}),
    "gpt2": (
        "GPT2Config",
        {"vocab_size": 512, "n_embd": 64, "n_layer": 4, "n_head": 2, "n_positions": 256},
    ),
    "smolvlm": (  # text and images: vLLM makes a config of its own for the part that reads text
        "SmolVLMConfig",
        {
            "text_config": SHAPE | {"model_type": "llama", "pad_token_id": 0},
            "vision_config": VISION,
            "image_token_id": 500,
            "scale_factor": 2,
        },
    ),
}


def random_prompts(seed: int, lengths: tuple[int, ...], vocabulary: int) -> list[list[int]]:
    rng = np.random.default_rng(seed)
    return [rng.integers(3, vocabulary, length).tolist() for length in lengths]
