"""Decodes tokens to the texts that are shown for them.

It works on bytes, because a token may end inside a character: its text is then empty, and the
token that completes the character shows it.
"""

from __future__ import annotations

import codecs
from collections.abc import Iterable
from typing import Final

import msgspec

_UTF8: Final = codecs.getincrementaldecoder("utf-8")


class TokenBytes(msgspec.Struct, frozen=True):
    """The answer of GET /v1/clairai/tokens: base64 by token id; special tokens as written."""

    tokens: list[bytes]


class TokenTexts:
    """The texts of one model's tokens."""

    def __init__(self, tokens: list[bytes]) -> None:
        self._tokens = tokens

    def decode(self, token_ids: Iterable[int]) -> list[str]:
        """The texts of a whole sequence, such as a prompt."""
        return TokenTextDecoder(self).decode(list(token_ids), is_end=True)

    def token_bytes(self, token_id: int) -> bytes:
        if 0 <= token_id < len(self._tokens):
            return self._tokens[token_id]
        return b"<%d>" % token_id  # the model has more ids than its tokenizer has tokens


class TokenTextDecoder:
    """Decodes one sequence of tokens as it grows."""

    def __init__(self, texts: TokenTexts) -> None:
        self._texts = texts
        self._decoder = _UTF8(errors="replace")

    def decode(self, token_ids: list[int], *, is_end: bool = False) -> list[str]:
        """The texts of the next tokens."""
        texts = [self._decoder.decode(self._texts.token_bytes(token_id)) for token_id in token_ids]
        if is_end and texts:
            texts[-1] += self._decoder.decode(b"", final=True)
        return texts
