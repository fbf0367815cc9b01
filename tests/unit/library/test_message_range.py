"""The positions of a chat message, or an error where they cannot be known."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

import clairai
from clairai.errors import RequestError

CHAT = [{"role": "user", "content": text} for text in ("ab", "c", "")]


class Letters:
    """A tokenizer with a token for each letter; `says` is its template."""

    def __init__(self, says: str) -> None:
        self._says = says

    def apply_chat_template(
        self,
        chat: Sequence[dict[str, str]],
        *,
        tokenize: bool,
        add_generation_prompt: bool,
        return_dict: bool,
        mark: str = "!",
    ) -> dict[str, Any]:
        assert tokenize
        assert return_dict
        if self._says == "counts":
            said = str(len(chat)) + "".join(one["content"] for one in chat)
        elif self._says == "nothing of empty ones":
            said = "".join(one["content"] for one in chat)
        else:
            said = "".join(f"<{one['content']}>" for one in chat)
        return {"input_ids": [ord(letter) for letter in said + mark * add_generation_prompt]}


@pytest.mark.parametrize(("index", "found"), [(0, (0, 4)), (1, (4, 7)), (2, (7, 9))])
def test_the_tokens_of_a_message_are_those_that_it_adds(index: int, found: tuple[int, int]) -> None:
    assert clairai.message_range(Letters("all"), CHAT, index) == found
    assert clairai.message_range(Letters("all"), CHAT, index, mark="??") == found


def test_a_template_that_changes_its_beginning_is_refused() -> None:
    with pytest.raises(RequestError, match="changes its beginning"):
        clairai.message_range(Letters("counts"), CHAT, 1)


def test_a_message_without_tokens_is_refused() -> None:
    with pytest.raises(RequestError, match="gives it no tokens"):
        clairai.message_range(Letters("nothing of empty ones"), CHAT, 2)


@pytest.mark.parametrize("index", [-1, 3, True, "0"])
def test_an_index_without_a_message_is_refused(index: Any) -> None:
    with pytest.raises(RequestError, match="the chat has 3 messages; give 0 to 2"):
        clairai.message_range(Letters("all"), CHAT, index)
