"""The converted folder of a tiny GGUF file holds the same model, bit for bit."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file
from tokenizers import Tokenizer

from clairai.demo import convert, model
from clairai.errors import ModelError
from tests.support import gguf_files


def _different(folder: Path, expected: dict[str, gguf_files.Weights]) -> set[str]:
    found = load_file(folder / "model.safetensors")
    assert found.keys() == expected.keys()
    return {name for name in found if not np.array_equal(found[name], expected[name])}


def test_weights_round_trip_exactly(tmp_path: Path) -> None:
    weights = gguf_files.hugging_face_weights()
    gguf = gguf_files.write(tmp_path / "tiny.gguf", weights)
    assert _different(model.convert_once(gguf, cache=tmp_path), weights) == set()


def test_skipping_the_row_order_of_q_and_k_is_noticed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(convert, "undo_permutation", lambda rows_RD, num_heads: rows_RD)  # noqa: ARG005
    weights = gguf_files.hugging_face_weights()
    gguf = gguf_files.write(tmp_path / "tiny.gguf", weights)
    wrong = _different(model.convert_once(gguf, cache=tmp_path), weights)
    assert wrong == {name for name in weights if "q_proj" in name or "k_proj" in name}


def test_untied_output_rows_are_kept(tmp_path: Path) -> None:
    weights = gguf_files.hugging_face_weights()
    weights["lm_head.weight"] = weights["model.embed_tokens.weight"] + 1
    folder = model.convert_once(gguf_files.write(tmp_path / "tiny.gguf", weights), cache=tmp_path)
    assert _different(folder, weights) == set()
    assert json.loads((folder / "config.json").read_text())["tie_word_embeddings"] is False


def test_config_states_the_shape_and_the_special_tokens(tmp_path: Path) -> None:
    gguf = gguf_files.write(tmp_path / "tiny.gguf", gguf_files.hugging_face_weights())
    folder = model.convert_once(gguf, cache=tmp_path)
    config = json.loads((folder / "config.json").read_text())
    assert config["architectures"] == ["LlamaForCausalLM"]
    assert config["num_hidden_layers"] == gguf_files.LAYERS
    assert config["head_dim"] == gguf_files.HEAD_WIDTH
    assert config["num_key_value_heads"] == gguf_files.HEADS["k"]
    assert config["rms_norm_eps"] == 1e-5
    assert config["rope_parameters"]["rope_theta"] == 10000.0
    assert config["tie_word_embeddings"] is True
    assert json.loads((folder / "generation_config.json").read_text())["eos_token_id"] == 2


def test_tokenizer_splits_digits_and_keeps_special_tokens_whole(tmp_path: Path) -> None:
    gguf = gguf_files.write(tmp_path / "tiny.gguf", gguf_files.hugging_face_weights())
    folder = model.convert_once(gguf, cache=tmp_path)
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    text = "<|im_start|>hi to 42<|im_end|>"
    encoded = tokenizer.encode(text)
    assert encoded.tokens == ["<|im_start|>", "hi", "Ġto", "Ġ", "4", "2", "<|im_end|>"]
    assert tokenizer.decode(encoded.ids, skip_special_tokens=False) == text
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    assert settings["chat_template"] == gguf_files.TEMPLATE


def test_another_architecture_is_refused(tmp_path: Path) -> None:
    weights = gguf_files.hugging_face_weights()
    gguf = gguf_files.write(tmp_path / "tiny.gguf", weights, architecture="gpt2")
    with pytest.raises(ModelError, match="'gpt2'"):
        model.convert_once(gguf, cache=tmp_path)


def test_a_file_that_is_no_gguf_is_refused_and_leaves_nothing(tmp_path: Path) -> None:
    gguf = tmp_path / "tiny.gguf"
    gguf.write_bytes(b"not a model" * 100)
    with pytest.raises(ModelError, match="reinstall"):
        model.convert_once(gguf, cache=tmp_path / "cache")
    left = [path for path in (tmp_path / "cache").rglob("*") if path.is_file()]
    assert [path.suffix for path in left] == [".lock"]


def test_a_truncated_gguf_is_refused(tmp_path: Path) -> None:
    gguf = gguf_files.write(tmp_path / "tiny.gguf", gguf_files.hugging_face_weights())
    gguf.write_bytes(gguf.read_bytes()[:-1000])
    with pytest.raises(ModelError, match="reinstall"):
        model.convert_once(gguf, cache=tmp_path)
