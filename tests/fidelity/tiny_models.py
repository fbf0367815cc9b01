"""Tiny models of the architectures that vLLM serves, as Hugging Face makes them.

An architecture's class and its config are found through transformers; a config is made small by
the names of its fields. What no rule covers is in EXTRAS, and nowhere else.
"""

from __future__ import annotations

import ast
import importlib.util
import inspect
import json
import re
import resource
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields
from functools import cache
from pathlib import Path
from typing import Any, Final

VOCABULARY: Final = 512
WIDTH: Final = 64
MAX_BYTES: Final = 6 << 30
_DOUBLED, _PUBLISHED = "language_model.model.model.", "language_model.model."
_WRAPPED_TOWERS: Final = ("clip_vision_model", "siglip_vision_model", "siglip2_vision_model")
_TOWER: Final = re.compile(
    r"(vision_tower\.)((?:embeddings|encoder|pre_layrnorm|post_layernorm|head)\.)"
)
NUM_ORDINARY: Final = 480  # tokens that no config gives a meaning to

# Tables of vllm/model_executor/models/registry.py, 0.32.
KINDS: Final = {
    "_TEXT_GENERATION_MODELS": "text",
    "_TRANSFORMERS_SUPPORTED_MODELS": "transformers",
    "_MULTIMODAL_MODELS": "multimodal",
}


@dataclass(frozen=True)
class Entry:
    """What vLLM's registry says of an architecture."""

    kind: str
    module: str  # of vllm.model_executor.models, or by its full name


@cache
def registry() -> Mapping[str, Entry]:
    """Every architecture of the installed vLLM that generates text."""
    return read_registry(_vllm_models())


def read_registry(folder: Path) -> dict[str, Entry]:
    """The same of the `model_executor/models` of any release."""
    found: dict[str, Entry] = {}
    for statement in ast.parse((folder / "registry.py").read_text()).body:
        for name, table in _assigned(statement):
            held = ast.literal_eval(table) if name in KINDS else {}
            found |= {key: Entry(KINDS[name], module) for key, (module, _) in held.items()}
    return found


def _vllm_models() -> Path:
    spec = importlib.util.find_spec("vllm")
    assert spec is not None
    assert spec.origin is not None
    return Path(spec.origin).parent / "model_executor" / "models"


def _assigned(statement: ast.stmt) -> Iterator[tuple[str, ast.expr]]:
    if isinstance(statement, ast.Assign) and isinstance(statement.targets[0], ast.Name):
        yield statement.targets[0].id, statement.value


class NoTinyModel(Exception):
    """Hugging Face cannot make such a model; the text says why."""


@dataclass(frozen=True)
class TinyModel:
    """The class of Hugging Face that made it, and a model that its config's source names.

    Without a class there is a config alone: vLLM makes up the weights.
    """

    kind: str
    checkpoint: str


def make(architecture: str, folder: Path) -> TinyModel:
    """A small model with random weights, saved by Hugging Face itself."""
    import torch
    import transformers

    resource.setrlimit(resource.RLIMIT_DATA, (MAX_BYTES, MAX_BYTES))  # one is not small yet
    name = SAME_AS.get(architecture, architecture)
    kind = getattr(transformers, name, None)
    if kind is None or architecture in CONFIGS:
        return _make_config(architecture, folder)
    extras = EXTRAS.get(name, {})
    torch.manual_seed(11)
    try:
        config = shrink(kind.config_class, extras)
        model = kind(config).float()
    except Exception as error:
        raise NoTinyModel(f"{type(error).__name__}: {error}") from error
    for parameter in model.parameters():
        # Larger than Hugging Face's init: small weights make every layer nearly the identity.
        torch.nn.init.normal_(parameter, std=0.15 if parameter.dim() > 1 else 0.5)
    for part, parameter in model.named_parameters():
        if ZEROED.get(architecture, "nowhere") in part:
            torch.nn.init.zeros_(parameter)
    model.save_pretrained(folder)
    _use_published_names(folder)
    if name != architecture:
        _change_config(folder, architectures=[architecture])
    return TinyModel(name, _find_checkpoint(kind.config_class))


def _use_published_names(folder: Path) -> None:
    """Names of weights as published checkpoints have them.

    transformers 5.19 doubles a prefix of some models when it saves them, and leaves one out of
    others; it reads both.
    """
    from safetensors.torch import load_file, save_file

    config = json.loads((folder / "config.json").read_text())
    is_wrapped = (config.get("vision_config") or {}).get("model_type") in _WRAPPED_TOWERS
    for file in folder.glob("*.safetensors"):
        weights = load_file(file)
        renamed = {name.replace(_DOUBLED, _PUBLISHED): one for name, one in weights.items()}
        if is_wrapped:
            renamed = {_TOWER.sub(r"\1vision_model.\2", n): one for n, one in renamed.items()}
        if renamed.keys() != weights.keys():
            save_file(renamed, file, {"format": "pt"})


def _find_checkpoint(config: type[Any]) -> str:
    source = Path(inspect.getfile(config)).read_text()
    found = re.search(r'auto_docstring\(\s*checkpoint="([^"]+)"', source)
    return found[1] if found else ""


def _make_config(architecture: str, folder: Path) -> TinyModel:
    """A config for vLLM alone: Llama's or that of CONFIGS, with every size that vLLM asks for."""
    import transformers

    extras = EXTRAS.get(architecture, {})
    kind = getattr(transformers, CONFIGS.get(architecture, "LlamaConfig"))
    sizes = {} if architecture in CONFIGS else _sizes_asked(architecture)
    wanted = {name: value for name, value in {**sizes, **extras}.items() if value is not ...}
    config = shrink(kind, wanted)
    config.architectures = [architecture]
    config.save_pretrained(folder)
    _change_config(folder, **extras)
    return TinyModel("", "")


def _sizes_asked(architecture: str) -> dict[str, int]:
    """Sizes of a config whose names are in the source of vLLM's model."""
    import transformers

    entry = registry()[architecture]
    if entry.kind != "text" or "." in entry.module:
        raise NoTinyModel(f"transformers {transformers.__version__} has no {architecture}")
    source = (_vllm_models() / f"{entry.module}.py").read_text()
    asked = {*re.findall(r"config\.(\w+)", source), *re.findall(r'config, "(\w+)"', source)}
    return {name: size for name, size in TEXT.items() if name in asked}


def _change_config(folder: Path, **changes: Any) -> None:
    """In the file: Hugging Face's class may drop what one of vLLM's own reads."""
    file = folder / "config.json"
    held = json.loads(file.read_text()) | changes
    file.write_text(json.dumps({name: held[name] for name in held if held[name] is not ...}))


def shrink(kind: type[Any], extras: Mapping[str, Any], *, is_text: bool = True) -> Any:
    """A small config of that class; `extras` win, those of a config inside by their own name."""
    sizes = TEXT if is_text else OTHER
    given: dict[str, Any] = {}
    default = kind()
    tokens = _tokens()
    for field in fields(kind):
        held = vars(default).get(field.name)
        if isinstance(held, _config_class()):
            is_inner_text = is_text and bool(TEXT_PARTS.search(field.name))
            inner = extras.get(field.name, {})
            given[field.name] = shrink(type(held), inner, is_text=is_inner_text)
        elif field.name in extras:
            given[field.name] = extras[field.name]
        elif field.name in sizes and _is_size(held, field):
            given[field.name] = sizes[field.name]
        elif is_text and TOKEN.search(field.name) and isinstance(held, int) and held >= 3:
            given[field.name] = next(tokens)
    if "kv_lora_rank" in given:
        given["num_key_value_heads"] = given["num_attention_heads"]  # every head has its own
        given["rope_parameters"] = dict(YARN)
    if sections := _sections(default):
        given["rope_parameters"] = {**default.rope_parameters, "mrope_section": sections}
    rest = {name: value for name, value in extras.items() if name not in given}
    return kind(**given, **rest)


def _sections(config: Any) -> list[int]:
    """How the rotated half of a head is shared by time, height and width, where it is."""
    rope = getattr(config, "rope_parameters", None) or {}
    if "mrope_section" not in rope:
        return []
    half = int(TEXT["head_dim"] * rope.get("partial_rotary_factor", 1.0)) // 2
    return [half // 2, half // 4, half // 4]


def _tokens() -> Iterator[int]:
    return iter(range(NUM_ORDINARY, VOCABULARY))


def _is_size(held: object, field: Any) -> bool:
    """A window or a rank that is None is off, and stays so."""
    is_number = isinstance(held, int | float) and not isinstance(held, bool)
    return is_number or (held is None and field.name in EVEN_IF_NONE)


def _config_class() -> Any:
    from transformers import PreTrainedConfig

    return PreTrainedConfig


TEXT_PARTS: Final = re.compile(r"text|llm|language|thinker|decoder_config")
TOKEN: Final = re.compile(r"token_id$|token_index$|_id$")
EVEN_IF_NONE: Final = frozenset(("head_dim", "num_key_value_heads", "num_kv_heads"))

# What released models with MLA have. Of plain rotary embeddings in pairs vLLM's CPU kernel makes
# something else than Hugging Face does, where the rotated part is a slice of a query.
YARN: Final = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
    "original_max_position_embeddings": 64,
    "beta_fast": 32,
    "beta_slow": 1,
}

_NAMES: Final[Mapping[int, tuple[str, ...]]] = {
    512: ("vocab_size", "vocab_size_per_layer_input", "kv_lora_rank"),  # MLA's kernel asks for it
    WIDTH: (
        *("qk_rope_head_dim",),
        *("hidden_size", "d_model", "n_embd", "word_embed_proj_dim"),
        *("moe_intermediate_size", "shared_expert_intermediate_size", "shared_intermediate_size"),
        *("moe_shared_expert_intermediate_size", "expert_ffn_hidden_size", "share_expert_dim"),
        *("out_hidden_size", "projection_dim", "image_text_hidden_size", "projector_hidden_size"),
    ),
    128: (
        *("intermediate_size", "ffn_dim", "ffn_hidden_size", "intermediate_size_mlp"),
        *("dense_intermediate_size", "mamba_d_ssm"),
        *("linear_key_head_dim", "linear_value_head_dim"),  # the CPU kernels take no smaller heads
    ),
    256: (
        *("max_position_embeddings", "n_positions", "max_seq_len"),
        *("original_max_position_embeddings",),
    ),
    32: (
        *("head_dim", "swa_head_dim", "query_pre_attn_scalar", "rotary_dim", "sliding_window"),
        *("sliding_window_size", "qk_nope_head_dim", "v_head_dim"),
        *("q_lora_rank", "linear_head_dim"),
        *("mamba_d_head", "mamba_head_dim", "mamba_chunk_size", "chunk_size", "index_head_dim"),
        *("hidden_size_per_layer_input", "attention_chunk_size", "adapter_rank", "index_topk"),
        *("laurel_rank", "o_lora_rank", "indexer_head_dim"),
    ),
    16: ("mamba_d_state", "state_size", "ssm_state_size"),
    4: (
        *("num_hidden_layers", "n_layer", "n_layers", "num_layers"),
        *("num_experts", "n_routed_experts", "num_local_experts", "moe_num_experts"),
        *("mamba_n_heads", "mamba_num_heads", "num_heads", "n_mamba_heads", "time_step_rank"),
        *("mamba_dt_rank", "linear_num_value_heads"),
    ),
    2: (
        *("num_attention_heads", "n_head", "n_heads", "num_experts_per_tok", "moe_topk", "moe_k"),
        *("moe_top_k", "linear_num_key_heads", "linear_num_heads", "max_window_layers"),
        *("swa_num_attention_heads", "num_sliding_attention_heads", "index_n_heads"),
    ),
    1: (
        *("num_key_value_heads", "num_kv_heads", "swa_num_key_value_heads", "n_group"),
        *("topk_group", "n_shared_experts", "num_shared_experts", "moe_num_shared_experts"),
        *("first_k_dense_replace", "num_dense_layers", "mamba_n_groups", "n_groups"),
        *("mamba_ngroups", "o_groups"),
    ),
    0: ("num_mtp_layers", "num_nextn_predict_layers", "pad_token_id"),
}
# Names that are sizes in the part of a model that is not its language model.
_OTHER_NAMES: Final[Mapping[int, tuple[str, ...]]] = {
    WIDTH: (
        *("hidden_size", "d_model", "embed_dim", "out_hidden_size", "output_dim", "encoder_dim"),
        *("projection_dim", "vision_output_dim", "text_hidden_size", "projector_output_dim"),
        *("hidden_dim", "encoder_hidden_size", "embedding_size"),
    ),
    128: ("intermediate_size", "encoder_ffn_dim", "projection_intermediate_size"),
    2: (
        *("num_hidden_layers", "depth", "num_layers", "encoder_layers", "num_attention_heads"),
        *("num_heads", "encoder_attention_heads", "conf_num_hidden_layers"),
    ),
}
TEXT: Final = {name: size for size, names in _NAMES.items() for name in names}
OTHER: Final = {name: size for size, names in _OTHER_NAMES.items() for name in names}

# Architectures of the registry that are another by another name.
SAME_AS: Final = {
    "LLaMAForCausalLM": "LlamaForCausalLM",
    "InternLM3ForCausalLM": "LlamaForCausalLM",
    "IQuestCoderForCausalLM": "LlamaForCausalLM",
    "TeleChat3ForCausalLM": "LlamaForCausalLM",
    "ExaoneMoEForCausalLM": "ExaoneMoeForCausalLM",
    "PhiMoEForCausalLM": "PhimoeForCausalLM",
    "MiMoV2ForCausalLM": "MiMoV2FlashForCausalLM",
    "NemotronHPuzzleForCausalLM": "NemotronHForCausalLM",
    "LightOnOCRForConditionalGeneration": "LightOnOcrForConditionalGeneration",
    "Qwen2_5OmniModel": "Qwen2_5OmniForConditionalGeneration",
}

# Weights that must be zero, by a part of their names, because vLLM leaves them out: the embeddings
# of each layer of Gemma 3n, in its class for text alone, and the bias of Phi MoE's head.
ZEROED: Final = {
    "Gemma3nForCausalLM": "embed_tokens_per_layer",
    "PhiMoEForCausalLM": "lm_head.bias",
}

# Architectures that vLLM's CPU build runs in this type alone.
DTYPES: Final = dict.fromkeys(
    (
        *("Qwen3NextForCausalLM", "Qwen3_5ForCausalLM", "Qwen3_5MoeForCausalLM"),
        *("Qwen3_5ForConditionalGeneration", "Qwen3_5MoeForConditionalGeneration"),
        *("MiniCPMV4_6ForConditionalGeneration", "MiniCPMV4_7ForConditionalGeneration"),
    ),
    "bfloat16",
)

# Config classes of Hugging Face where it has no model, or none whose weights vLLM can load.
CONFIGS: Final = {
    "MistralLarge3ForCausalLM": "DeepseekV3Config",
    "SarvamMLAForCausalLM": "DeepseekV3Config",
    "BailingMoeV2_5ForCausalLM": "DeepseekV3Config",
    "PanguUltraMoEForCausalLM": "DeepseekV3Config",
    "DbrxForCausalLM": "DbrxConfig",
    "DeepseekV4ForCausalLM": "DeepseekV4Config",
    "Qwen3VLMoeForConditionalGeneration": "Qwen3VLMoeConfig",
    "LongcatFlashNgramForCausalLM": "LongcatFlashConfig",
    "Rnj1ForCausalLM": "Gemma3TextConfig",
    "MuseGlimmerForCausalLM": "MuseGlimmerTextConfig",
}


def _mrope(sections: list[int]) -> dict[str, Any]:
    return {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": sections}


def _rope(sections: list[int], **more: float) -> dict[str, Any]:
    return {"text_config": {"rope_parameters": _mrope(sections) | more}}


def _vision(**sizes: Any) -> dict[str, Any]:
    """Images of so many pixels as a processor of tiny_media.py makes."""
    return {"vision_config": {"image_size": 28, "patch_size": 14} | sizes}


_IDEFICS: Final = {**_vision(num_attention_heads=2), "scale_factor": 1}
_GRID: Final = {"image_grid_pinpoints": [[28, 56], [56, 28], [56, 56]]}
# The names under which checkpoints have what is `hidden_size` in Hugging Face's own config.
_LFM2: Final[Mapping[str, Any]] = {
    "layer_types": ["conv", "full_attention"] * 2,
    "block_dim": WIDTH,
    "conv_dim": WIDTH,
    "conv_dim_out": WIDTH,
    "block_auto_adjust_ff_dim": False,
}


_BAILING: Final[dict[str, Any]] = {
    "embedding_dropout": 0.0,
    "use_bias": False,
    "use_qkv_bias": False,
    "norm_topk_prob": True,
    "score_function": "sigmoid",
    "moe_router_enable_expert_bias": True,
}
_GEMMA3N: Final[Mapping[str, Any]] = {
    "layer_types": ["sliding_attention", "full_attention"] * 2,
    "num_kv_shared_layers": 2,
    "activation_sparsity_pattern": [0.95, 0.0, 0.95, 0.0],
}
_GEMMA4_VISION: Final[Mapping[str, Any]] = {
    "hidden_size": WIDTH,
    "intermediate_size": 128,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "head_dim": 32,
}
_CHATGLM: Final[Mapping[str, Any]] = {
    "num_layers": 4,
    "add_bias_linear": False,
    "add_qkv_bias": True,
    "apply_residual_connection_post_layernorm": False,
    "fp32_residual_connection": False,
    "hidden_dropout": 0.0,
    "kv_channels": 32,
    "layernorm_epsilon": 1e-5,
    "multi_query_attention": True,
    "multi_query_group_num": 1,
    "original_rope": True,
    "padded_vocab_size": VOCABULARY,
    "post_layer_norm": True,
    "rmsnorm": True,
    "seq_length": 256,
}
# As published; Hugging Face's own config has them as constants.
_LONGCAT: Final[Mapping[str, Any]] = {
    "head_dim": 64,  # of the rotated part
    "mla_scale_q_lora": True,
    "mla_scale_kv_lora": True,
    "zero_expert_num": 0,  # Hugging Face would save weights of theirs, which vLLM does not know
    "zero_expert_type": "identity",
    "rms_norm_eps": 1e-6,  # of its inner norms in Hugging Face's source, whatever the config says
}


# An Ellipsis leaves out what would be there: a size whose name is in the source, a default.
EXTRAS: Final[Mapping[str, Mapping[str, Any]]] = {
    "BailingMoeForCausalLM": _BAILING,
    "BailingMoeV2ForCausalLM": _BAILING,
    "BailingMoeV2_5ForCausalLM": {
        **_BAILING,
        "layer_group_size": 2,
        "num_experts": 4,
        "num_shared_experts": 1,
    },
    "BailingMoeV3ForCausalLM": {
        **_BAILING,
        "layer_group_size": 2,
        "short_conv_kernel_size": 4,
        "no_kda_lora": True,
    },
    "SarvamMoEForCausalLM": _BAILING,
    "SarvamMLAForCausalLM": _BAILING
    | {"num_experts": 4, "num_shared_experts": 1, "q_lora_rank": None},
    "ChatGLMModel": _CHATGLM,
    "ChatGLMForConditionalGeneration": _CHATGLM,
    "DeepseekForCausalLM": {
        "index_topk": ...,
        "kv_lora_rank": ...,
        "q_lora_rank": ...,
        "qk_nope_head_dim": ...,
        "qk_rope_head_dim": ...,
        "v_head_dim": ...,
        "norm_topk_prob": True,
        "n_group": ...,
        "topk_group": ...,
        "routed_scaling_factor": 1.0,
    },
    "ExaoneForCausalLM": {"activation_function": "silu", "layer_norm_epsilon": 1e-5},
    "MiniCPMForCausalLM": {
        "num_experts": 0,
        "dim_model_base": 32,
        "scale_emb": 12,
        "scale_depth": 1.4,
    },
    "SolarForCausalLM": {
        "bskcn_tv": [0.9, 0.8],
        "bskcn_1": [1],
        "bskcn_2": [2],
        "bskcn_3": [2],
        "bskcn_4": [3],
    },
    "TeleChat2ForCausalLM": {
        "n_layer": 4,
        "n_head": 2,
        "ffn_hidden_size": 128,
        "layer_norm_epsilon": 1e-5,
    },
    "TeleFLMForCausalLM": {"use_mup": True, "mup_scale_factor": 1.0, "output_mult": 2.0},
    "Step3TextForCausalLM": {
        "max_position_embedding": 256,
        "share_q_dim": 64,
        "norm_expert_weight": True,
        "moe_layers_enum": "1,3",
    },
    "Step3p5ForCausalLM": {
        "model_type": "step3p5",
        "att_impl_type": "GQA",
        "num_attention_groups": 1,
        "moe_layers_enum": "1,3",
        "moe_router_activation": "sigmoid",
        "layer_types": ["sliding_attention", "full_attention"] * 2,
        "use_head_wise_attn_gate": True,
        "rope_theta": 10000.0,
        "yarn_only_types": [],
    },
    # Its experts in vLLM's CPU build give other values than in Hugging Face.
    "LagunaForCausalLM": {"mlp_layer_types": ["dense"] * 4},
    "Plamo3ForCausalLM": {
        "layer_types": ["sliding_attention", "full_attention"] * 2,
        "interleaved_sliding_window": [32, None] * 2,
        "rope_local_theta": 10000,
    },
    "Param2MoEForCausalLM": _BAILING | {"rope_theta": 10000.0, "rope_scaling": None},
    "PanguEmbeddedForCausalLM": {
        "n_routed_experts": ...,
        "kv_lora_rank": ...,
        "q_lora_rank": ...,
        "routed_scaling_factor": 1.0,
    },
    "PanguProMoEV2ForCausalLM": {
        "kv_lora_rank": ...,
        "q_lora_rank": ...,
        "routed_scaling_factor": 1.0,
        "norm_topk_prob": True,
        "router_enable_expert_bias": False,
    },
    "PanguUltraMoEForCausalLM": {"sandwich_norm": True},
    "K2HorizonForCausalLM": {
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
        "norm_topk_prob": True,
        "attention_gate_func": "softplus",
        "layernorm_num_groups": 1,
        "moe_gate_bias": False,
        "mova_num_experts": 0,
        "mova_num_experts_per_tok": 0,
        "query_key_norm": True,
        "rope_head_dim": 32,
        "router_scaling_factor": 1.0,
        "router_score_func": "sigmoid",
    },
    "IQuestLoopCoderForCausalLM": {"max_window_layers": 4},
    "LongcatFlashForCausalLM": _LONGCAT,
    "LongcatFlashNgramForCausalLM": _LONGCAT,
    "Gemma3nForCausalLM": _GEMMA3N,
    "Gemma3nForConditionalGeneration": {
        "text_config": _GEMMA3N,
        "vision_config": {"architecture": "resnet10t", "model_args": {}},
        "audio_config": {"conf_num_attention_heads": 2, "conf_num_hidden_layers": 1},
    },
    "NemotronHForCausalLM": {"layers_block_type": ["mamba", "mlp", "attention", "mlp"]},
    "MistralForCausalLM": {"sliding_window": None},
    "AfmoeForCausalLM": {
        "score_func": "sigmoid",
        "route_norm": True,
        "n_group": 1,
        "topk_group": 1,
    },
    "Glm4MoeForCausalLM": {"head_dim": 32},
    "Glm4MoeLiteForCausalLM": {"first_k_dense_replace": 1},
    "HYV3ForCausalLM": {
        "expert_hidden_dim": 64,
        "route_norm": True,
        "first_k_dense_replace": 1,
        "qk_norm": True,
    },
    "MiniMaxM2ForCausalLM": {
        "rotary_dim": 32,
        "scoring_func": "sigmoid",
        "use_routing_bias": True,
    },
    "PhimoeForCausalLM": {"attention_bias": True, "lm_head_bias": True},
    "MiMoV2FlashForCausalLM": {
        "hybrid_layer_pattern": [0, 1, 1, 1],
        "moe_layer_freq": [0, 1, 1, 1],
        "add_swa_attention_sink_bias": True,
        "swa_v_head_dim": 32,
        "rope_theta": 5_000_000.0,
        "swa_rope_theta": 10_000.0,
        "partial_rotary_factor": 0.334,
        "layernorm_epsilon": 1e-5,
        "sliding_window_size": 32,
        "swa_head_dim": 32,
        "swa_num_attention_heads": 2,
        "swa_num_key_value_heads": 2,
    },
    "AXK1ForCausalLM": {"first_k_dense_replace": 0},
    "DeepseekV2ForCausalLM": {
        "topk_method": "greedy",
        "num_experts_per_tok": 2,
        "n_group": 1,
        "topk_group": 1,
    },
    "DeepseekV3ForCausalLM": {
        "topk_method": "noaux_tc",
        "scoring_func": "sigmoid",  # of published configs; Hugging Face has no other
        "n_group": 2,
        "topk_group": 1,
    },
    # As published; Hugging Face's class adds lists that vLLM's refuses.
    "DeepseekV4ForCausalLM": {
        "mlp_layer_types": ...,
        "layer_types": ...,
        "rope_parameters": ...,
        "compress_ratios": [0, 0, 4, 128],
        "num_hash_layers": 1,
        "scoring_func": "sqrtsoftplus",
        "topk_method": "noaux_tc",
        "norm_topk_prob": True,
        "expert_dtype": "bf16",
        "head_dim": 512,
        "index_head_dim": 128,
    },
    "DbrxForCausalLM": {
        "attn_config": {"rope_theta": 10000.0, "kv_n_heads": 1, "clip_qkv": 8.0},
        "ffn_config": {"ffn_hidden_size": 64, "moe_num_experts": 4, "moe_top_k": 2},
    },
    "FalconForCausalLM": {"ffn_hidden_size": 256},
    "GraniteMoeHybridForCausalLM": {"layer_types": ["linear_attention", "full_attention"] * 2},
    "Lfm2ForCausalLM": _LFM2,
    "Lfm2VlForConditionalGeneration": {"text_config": _LFM2},
    "AriaForConditionalGeneration": {
        **_vision(image_size=980, patch_size=70),
        "projector_patch_to_query_dict": {49: 8, 196: 16},
    },
    "Gemma3ForConditionalGeneration": {**_vision(image_size=56), "mm_tokens_per_image": 4},
    "Idefics3ForConditionalGeneration": _IDEFICS,
    "InternVLForConditionalGeneration": _vision(image_size=[28, 28], patch_size=[14, 14]),
    "LlavaForConditionalGeneration": _vision(),
    "LlavaNextForConditionalGeneration": {**_vision(), **_GRID},
    "LlavaNextVideoForConditionalGeneration": {**_vision(), **_GRID},
    "LlavaOnevisionForConditionalGeneration": {**_vision(), **_GRID},
    "Mistral3ForConditionalGeneration": {
        **_vision(image_size=84, head_dim=32),
        "spatial_merge_size": 2,
    },
    "PaliGemmaForConditionalGeneration": _vision(num_image_tokens=4),
    "SmolVLMForConditionalGeneration": _IDEFICS,
    "Lfm2MoeForCausalLM": {"layer_types": ["conv", "full_attention"] * 2},
    "Llama4ForCausalLM": {"num_experts_per_tok": 1},
    "Llama4ForConditionalGeneration": {
        "text_config": {"num_experts_per_tok": 1},
        **_vision(
            intermediate_size=256,
            vision_output_dim=WIDTH,
            projector_input_dim=WIDTH,
            projector_output_dim=WIDTH,
        ),
    },
    "Exaone4_5_ForConditionalGeneration": {"vision_config": {"num_key_value_heads": 2}},
    "Qwen3VLMoeForConditionalGeneration": {
        "text_config": {"norm_topk_prob": True, "moe_intermediate_size": 128}
    },
    "Zamba2ForCausalLM": {
        "layers_block_type": ["linear_attention", "hybrid"] * 2,
        "num_key_value_heads": 2,
    },
    "JambaForCausalLM": {"attn_layer_period": 2, "attn_layer_offset": 1},
    "Glm4vForConditionalGeneration": _rope([4, 2, 2], partial_rotary_factor=0.5),
    "GlmOcrForConditionalGeneration": _rope([4, 2, 2], partial_rotary_factor=0.5),
    "LightOnOcrForConditionalGeneration": {
        "vision_feature_layer": -1,
        "projector_hidden_act": "gelu",
        "multimodal_projector_bias": False,
    },
    "Gemma4ForConditionalGeneration": {"vision_config": _GEMMA4_VISION},
    "MuseGlimmerForConditionalGeneration": {"vision_config": {"output_dim": 256}},
    "CohereCompassForConditionalGeneration": {
        "text_config": {
            "rope_parameters": {"full_attention": _mrope([8, 4, 4])},
            "tie_word_embeddings": True,
        },
        "tie_word_embeddings": True,
    },
    "Ernie4_5_VLMoeForConditionalGeneration": {
        "text_config": {"rope_parameters": _mrope([6, 6, 4]), "moe_intermediate_size": [64, 64]}
    },
    "Emu3ForConditionalGeneration": {"vocabulary_map": {"<image>": 480}},
    "Glm4vMoeForConditionalGeneration": {
        "vision_config": {"image_size": 56},
        "text_config": {
            **_rope([4, 2, 2], partial_rotary_factor=0.5)["text_config"],
            "head_dim": 32,
            "use_qk_norm": False,
        },
    },
    "Qwen3VLForConditionalGeneration": {
        **_rope([8, 4, 4], mrope_interleaved=True),
        "vision_config": {"deepstack_visual_indexes": [0, 1]},
    },
    "Qwen2VLForConditionalGeneration": _rope([8, 4, 4]),
    "Qwen2_5_VLForConditionalGeneration": _rope([8, 4, 4]),
    "PaddleOCRVLForConditionalGeneration": _rope([8, 4, 4]),
    "Qwen2_5OmniForConditionalGeneration": {"enable_audio_output": False},
    "Step3p7ForConditionalGeneration": {"text_config": {"sliding_window": 32}},
    "HrmTextForCausalLM": {"H_cycles": 1, "L_cycles": 1, "head_dim": 32},
    "WhisperForConditionalGeneration": {
        "encoder_attention_heads": 2,
        "decoder_attention_heads": 2,
    },
}
