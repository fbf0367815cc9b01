"""Labelled rows with a planted direction, and a tokenizer of words."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from clairai.train.fit import NUM_FOLDS, Labels

WIDTH = 6
PLANTED = 2


def labels(num_documents: int = 80, length: int = 20) -> Labels:
    """Labels of documents: every other has the concept, and folds alternate."""
    documents_T = np.repeat(np.arange(num_documents), length)
    every = np.ones(len(documents_T), np.bool_)
    return Labels(
        positive_T=documents_T % 2 == 1,
        labelled_T=every,
        settled_T=every,
        template_T=~every,
        folds_T=documents_T // 2 % NUM_FOLDS,
        documents_T=documents_T,
    )


def rows(known: Labels, *, strength: float, seed: int = 0) -> NDArray[np.float32]:
    """Rows with columns of very different scale; one of them depends on the label."""
    random = np.random.default_rng(seed)
    size_D = np.array([1e-2, 1.0, 1e2, 1.0, 10.0, 1e3], np.float32)
    rows_TD = random.normal(size=(len(known.positive_T), WIDTH)).astype(np.float32) + 3
    rows_TD[:, PLANTED] += strength * known.positive_T
    return rows_TD * size_D


@dataclass(frozen=True)
class WordTokenizer:
    """One token a word, with the space before it; a chat template like that of the demo's model."""

    is_fast: bool = True

    def __call__(
        self, text: str, *, return_offsets_mapping: bool, add_special_tokens: bool
    ) -> dict[str, Any]:
        assert return_offsets_mapping
        found = [match.span() for match in re.finditer(r"\s?<[^>]*>|\s?[^\s<]+|\s", text)]
        spans = [(0, 0)] * add_special_tokens + found  # a start token stands for no character
        ids = [sum(map(ord, text[start:end])) for start, end in spans]
        return {"input_ids": ids, "offset_mapping": spans}

    def apply_chat_template(
        self, messages: list[dict[str, str]], *, tokenize: bool, add_generation_prompt: bool
    ) -> str:
        assert not tokenize
        turns = [f"<{message['role']}>{message['content'].strip()}<end>" for message in messages]
        return "<system>be kind<end>" + "".join(turns) + "<assistant>" * add_generation_prompt
