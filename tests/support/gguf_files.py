"""A two-layer llama as a GGUF file of llama.cpp, and its weights as Hugging Face has them."""

# D = model width, R = rows of a projection

from __future__ import annotations

from pathlib import Path
from typing import Final

import gguf
import numpy as np
from numpy.typing import NDArray

Weights = NDArray[np.float32]

WIDTH: Final = 64
HEADS: Final = {"q": 4, "k": 2}
HEAD_WIDTH: Final = 16
LAYERS: Final = 2
FEED_FORWARD: Final = 96
SPECIAL: Final = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
LETTERS: Final = (*"Ġabcdefghijklmnopqrstuvwxyz0123456789", "Ċ")
MERGES: Final = ("h i", "Ġ t", "Ġt o")
TEMPLATE: Final = "{% for m in messages %}<|im_start|>{{ m['content'] }}<|im_end|>{% endfor %}"


def vocabulary() -> list[str]:
    """Every token of the tiny model, special ones first."""
    return [*SPECIAL, *LETTERS, *(merge.replace(" ", "") for merge in MERGES)]


def hugging_face_weights(seed: int = 0) -> dict[str, Weights]:
    """Random weights under their Hugging Face names; every row differs, so a wrong order shows."""
    shapes = {"model.embed_tokens": (len(vocabulary()), WIDTH), "model.norm": (WIDTH,)}
    for layer in range(LAYERS):
        shapes |= {f"model.layers.{layer}.{name}": shape for name, shape in _block_shapes().items()}
    random = np.random.default_rng(seed)
    return {
        f"{name}.weight": random.normal(size=shape).astype(np.float32)
        for name, shape in shapes.items()
    }


def llama_cpp_order(rows_RD: Weights, *, num_heads: int) -> Weights:
    """Rows as llama.cpp stores q and k, written out row by row from what a rotation pairs."""
    half = HEAD_WIDTH // 2
    order = [
        head * HEAD_WIDTH + pair + side * half
        for head in range(num_heads)
        for pair in range(half)
        for side in (0, 1)
    ]
    return rows_RD[order]


def write(path: Path, weights: dict[str, Weights], *, architecture: str = "llama") -> Path:
    """Write `weights` to `path` the way llama.cpp's converter does."""
    writer = gguf.GGUFWriter(path, architecture)
    _write_shape(writer)
    _write_vocabulary(writer)
    for name, values in weights.items():
        for letter, num_heads in HEADS.items():
            if f"{letter}_proj" in name:
                values = llama_cpp_order(values, num_heads=num_heads)
        writer.add_tensor(_llama_cpp_name(name), values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _block_shapes() -> dict[str, tuple[int, ...]]:
    queries, keys = HEADS["q"] * HEAD_WIDTH, HEADS["k"] * HEAD_WIDTH
    return {
        "input_layernorm": (WIDTH,),
        "self_attn.q_proj": (queries, WIDTH),
        "self_attn.k_proj": (keys, WIDTH),
        "self_attn.v_proj": (keys, WIDTH),
        "self_attn.o_proj": (WIDTH, queries),
        "post_attention_layernorm": (WIDTH,),
        "mlp.gate_proj": (FEED_FORWARD, WIDTH),
        "mlp.up_proj": (FEED_FORWARD, WIDTH),
        "mlp.down_proj": (WIDTH, FEED_FORWARD),
    }


def _llama_cpp_name(name: str) -> str:
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, LAYERS)
    return str(names.get_name(name, try_suffixes=(".weight",)))


def _write_shape(writer: gguf.GGUFWriter) -> None:
    writer.add_name("tiny")
    writer.add_block_count(LAYERS)
    writer.add_context_length(128)
    writer.add_embedding_length(WIDTH)
    writer.add_feed_forward_length(FEED_FORWARD)
    writer.add_head_count(HEADS["q"])
    writer.add_head_count_kv(HEADS["k"])
    writer.add_rope_freq_base(10000.0)
    writer.add_layer_norm_rms_eps(1e-5)


def _write_vocabulary(writer: gguf.GGUFWriter) -> None:
    tokens = vocabulary()
    num_plain = len(tokens) - len(SPECIAL)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list(tokens)
    writer.add_token_types(
        [gguf.TokenType.CONTROL] * len(SPECIAL) + [gguf.TokenType.NORMAL] * num_plain
    )
    writer.add_token_merges(list(MERGES))
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_unk_token_id(0)
    writer.add_pad_token_id(2)
    writer.add_chat_template(TEMPLATE)
