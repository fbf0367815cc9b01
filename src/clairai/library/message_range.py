"""Takes a chat and the tokens of its beginnings; gives where one message lies in the prompt.

A template may say anything anywhere. Where it only ever adds to what it said of the messages
before, a message's tokens are those it adds; where it does not, there is no honest answer.
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
        made = tokenizer.apply_chat_template(
            list(chat),
            tokenize=True,
            add_generation_prompt=is_whole,
            return_dict=True,
            **template,
        )
        return list(made["input_ids"])

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
    """`before` and `through`: tokens of the chat up to the message, without and with it."""
    first, end = len(before), len(through)
    is_prefix = list(through[:first]) == list(before) and list(prompt[:end]) == list(through)
    if not is_prefix:
        raise RequestError(
            f"message {index}: this chat's template says its beginning otherwise once more "
            "messages follow, so it cannot be told which tokens are the message's; give from and to"
        )
    if first >= end:
        raise RequestError(f"message {index}: the template makes no tokens of it")
    return first, end
