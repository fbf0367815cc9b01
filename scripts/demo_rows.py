"""Takes labelled documents; gives residual rows at chosen layers, each with its label."""

# T = labelled tokens, L = layers looked at, D = model width

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import numpy as np
import torch
from numpy.typing import NDArray
from transformers import AutoModel, AutoTokenizer

from scripts.demo_documents import Document

# Nothing in "The food was" tells what follows: a span's first tokens are not trained on.
NUM_UNSETTLED: Final = 4
REQUESTS: Final = (
    "Please go on.",
    "Write something for me.",
    "Tell me more about it.",
    "Continue from where you stopped.",
    "Give me your next message.",
)


@dataclass(frozen=True)
class Rows:
    """Residual rows of many documents, with what is known of each token."""

    hidden_LTD: NDArray[np.float32]
    labels_T: NDArray[np.bool_]
    settled_T: NDArray[np.bool_]
    folds_T: NDArray[np.int64]
    documents_T: NDArray[np.int64]


@dataclass(frozen=True)
class Token:
    """One labelled token: where it is, and whether its span has begun in earnest."""

    position: int
    label: bool
    is_settled: bool


class Reader:
    """The model and its tokenizer, from the converted folder."""

    def __init__(self, folder: Path, layers: Sequence[int]) -> None:
        self._tokenizer = AutoTokenizer.from_pretrained(folder)
        # without the output rows: no logits are needed, and they cost a fifth of the time
        self._model = AutoModel.from_pretrained(folder, dtype=torch.float32).eval()
        self._layers = tuple(layers)

    def rows(self, documents: Iterable[Document]) -> Rows:
        """Forward every document once and keep the rows of its labelled tokens."""
        hidden: list[NDArray[np.float32]] = []
        marks: list[tuple[bool, bool, int, int]] = []
        for index, document in enumerate(documents):
            ids, tokens = self._tokens(document, REQUESTS[index % len(REQUESTS)])
            hidden.append(self._hidden(ids)[:, [token.position for token in tokens]])
            fold = document.fold
            marks += [(token.label, token.is_settled, fold, index) for token in tokens]
        labels, settled, folds, indices = zip(*marks, strict=True)
        return Rows(
            np.concatenate(hidden, axis=1),
            np.array(labels),
            np.array(settled),
            np.array(folds),
            np.array(indices),
        )

    def _hidden(self, ids: list[int]) -> NDArray[np.float32]:
        with torch.inference_mode():
            states = self._model(torch.tensor([ids]), output_hidden_states=True).hidden_states
        # hidden_states[0] is the embedding, so block L's output is entry L + 1
        chosen = torch.stack([states[layer + 1][0] for layer in self._layers])
        return np.asarray(chosen.numpy(), np.float32)

    def _tokens(self, document: Document, request: str) -> tuple[list[int], list[Token]]:
        body = "".join(span.text for span in document.spans)
        framed = self._framed(body, document, request)
        encoded = self._tokenizer(framed, return_offsets_mapping=True, add_special_tokens=False)
        marks = _marks(document, start=framed.rindex(body), nchars=len(framed))
        tokens, age, last = [], 0, -1
        for position, (start, end) in enumerate(encoded["offset_mapping"]):
            span, label = marks[max(start, end - 1)]
            age = age + 1 if span == last else 0
            last = span
            # the first position of all is an attention sink with a norm a hundred times the rest
            if label is not None and position > 0:
                tokens.append(Token(position, label, age >= NUM_UNSETTLED))
        return list(encoded["input_ids"]), tokens

    def _framed(self, body: str, document: Document, request: str) -> str:
        if document.frame == "bare":
            return body
        turns = [{"role": "user", "content": body if document.frame == "request" else request}]
        if document.frame == "answer":
            turns.append({"role": "assistant", "content": body})
        return str(self._tokenizer.apply_chat_template(turns, tokenize=False))


def _marks(document: Document, *, start: int, nchars: int) -> list[tuple[int, bool | None]]:
    """For each character of the framed text: its span's number and label."""
    marks: list[tuple[int, bool | None]] = [(-1, None)] * start
    for index, span in enumerate(document.spans):
        marks += [(index, span.label)] * len(span.text)
    return marks + [(-1, None)] * (nchars - len(marks))
