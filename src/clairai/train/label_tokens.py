"""Tokenize a document, and give every token the label of the span of text it is in.

T = tokens of one document.
"""

from __future__ import annotations

import itertools
import uuid
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from clairai.errors import ConfigError, quote
from clairai.train.documents import Document, Turn

# Nothing in "The food was" tells what follows, so the first tokens of a span are not trained on.
NUM_UNSETTLED: Final = 4
UNLABELLED: Final = -1
TEMPLATE: Final = -1  # the span number of what the chat template adds


@dataclass(frozen=True, eq=False)
class LabelledTokens:
    """The tokens of one document and their labels."""

    ids: tuple[int, ...]
    labels_T: NDArray[np.int8]  # 1, 0, or UNLABELLED
    settled_T: NDArray[np.bool_]  # not among the first tokens of a span with the concept
    template_T: NDArray[np.bool_]  # added by the chat template


def tokenize(document: Document, tokenizer: Any) -> LabelledTokens:
    """Tokenize a document. The template counts as without the concept if the whole document is."""
    text, starts = _render(document, tokenizer)
    is_chat = document.turns[0].role is not None
    encoded = tokenizer(text, return_offsets_mapping=True, add_special_tokens=not is_chat)
    marks = _label_characters(document, starts, len(text))
    labels, settled, template = [], [], []
    age, last = 0, TEMPLATE  # `age` counts the tokens of the current span
    for start, end in encoded["offset_mapping"]:
        span, label = marks[max(start, end - 1)] if end > start else (TEMPLATE, None)
        age = age + 1 if span == last else 0
        last = span
        labels.append(UNLABELLED if label is None else int(label))
        settled.append(label is not True or age >= NUM_UNSETTLED)
        template.append(span == TEMPLATE)
    return LabelledTokens(
        tuple(encoded["input_ids"]),
        np.array(labels, np.int8),
        np.array(settled, np.bool_),
        np.array(template, np.bool_),
    )


def _render(document: Document, tokenizer: Any) -> tuple[str, list[int]]:
    """Return the text of the prompt, and where each turn begins in it."""
    turns = document.turns
    if turns[0].role is None:
        assert len(turns) == 1, "plain text is a document of its own"
        return turns[0].text, [0]
    text = _apply_template(tokenizer, turns, [turn.text for turn in turns])
    # Placeholders find where a message begins: a short text may occur in the template as well.
    names = [f"[turn {number} {uuid.uuid4()}]" for number in range(len(turns))]
    pattern = _apply_template(tokenizer, turns, names)
    starts = []
    for name, turn in zip(names, turns, strict=True):
        starts.append(pattern.find(name))
        pattern = pattern.replace(name, turn.text, 1)
    if pattern != text or min(starts) < 0:
        raise ConfigError(
            f"the model's chat template changes a message, of {quote(turns[-1].text)}; "
            "give the document as text"
        )
    return text, starts


def _apply_template(tokenizer: Any, turns: Sequence[Turn], texts: Sequence[str]) -> str:
    messages = [
        {"role": turn.role, "content": text} for turn, text in zip(turns, texts, strict=True)
    ]
    # As in serving: the model is asked to answer, unless the last turn is its own.
    is_asked = turns[-1].role != "assistant"
    text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=is_asked)
    return str(text)


def _label_characters(
    document: Document, starts: Sequence[int], num_characters: int
) -> list[tuple[int, bool | None]]:
    """Return the number of the span of each character, and the span's label."""
    outside = None if document.is_positive else False
    marks: list[tuple[int, bool | None]] = [(TEMPLATE, outside)] * num_characters
    number = 0
    for start, turn in zip(starts, document.turns, strict=True):
        # neighbours with the same label are one span
        for label, spans in itertools.groupby(turn.spans, key=lambda span: span.label):
            end = start + sum(len(span.text) for span in spans)
            marks[start:end] = [(number, label)] * (end - start)
            start, number = end, number + 1
    return marks


def check_tokenizer(tokenizer: Any) -> None:
    """Refuse a tokenizer without offsets: labels are given to tokens by their place in the text."""
    if not getattr(tokenizer, "is_fast", False):
        raise ConfigError(
            f"the tokenizer {type(tokenizer).__name__} does not tell where a token stands in the "
            "text; use a model with a tokenizer.json"
        )


def check_lengths(encoded: Sequence[LabelledTokens], max_len: int) -> None:
    """Refuse documents that do not fit: each is forwarded whole, and one token is sampled."""
    longest = max(range(len(encoded)), key=lambda index: len(encoded[index].ids))
    num_tokens = len(encoded[longest].ids)
    if num_tokens >= max_len:
        raise ConfigError(
            f"document {longest + 1} has {num_tokens} tokens, and {max_len - 1} fit; cut it, "
            "or raise max_model_len"
        )
