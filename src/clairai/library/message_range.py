"""Finds the token positions of one message of a chat.

Where a chat template only appends to the text of the messages before, the tokens of a message are
those it appends. Where it does not, the positions cannot be known, and that is an error.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from clairai.errors import RequestError


def message_range(
    tokenizer: Any, messages: Sequence[Mapping[str, Any]], index: int, **template: Any
) -> tuple[int, int]:
    """Positions [first, end) of one message, for `capture={"positions": {"from": .., "to": ..}}`.

    `tokenizer` is Hugging Face's, as `llm.get_tokenizer()` gives it; `template` goes to its
    `apply_chat_template`. The prompt is what `llm.chat(messages)` makes.
    """
    check_message_index(index, len(messages))

    def ids(chat: Sequence[Mapping[str, Any]], *, is_whole: bool) -> list[int]:
        encoded = tokenizer.apply_chat_template(
            list(chat),
            tokenize=True,
            add_generation_prompt=is_whole,
            return_dict=True,
            **template,
        )
        return list(encoded["input_ids"])

    before = ids(messages[:index], is_whole=False) if index else []
    through = ids(messages[: index + 1], is_whole=False)
    return find_message_span(
        index, before=before, through=through, prompt=ids(messages, is_whole=True)
    )


def check_message_index(index: object, num_messages: int) -> None:
    if type(index) is not int or not 0 <= index < num_messages:
        raise RequestError(
            f"message {index}: the chat has {num_messages} messages; give 0 to {num_messages - 1}"
            if num_messages
            else f"message {index}: this is no chat, and has no messages"
        )


def find_message_span(
    index: int, *, before: Sequence[int], through: Sequence[int], prompt: Sequence[int]
) -> tuple[int, int]:
    """`before` and `through`: tokens of the chat up to the message, exclusive and inclusive."""
    first, end = len(before), len(through)
    is_prefix = list(through[:first]) == list(before) and list(prompt[:end]) == list(through)
    if not is_prefix:
        raise RequestError(
            f"message {index}: this chat's template changes its beginning when more "
            "messages follow, so the tokens of the message cannot be known; give from and to"
        )
    if first >= end:
        raise RequestError(f"message {index}: the template gives it no tokens")
    return first, end
