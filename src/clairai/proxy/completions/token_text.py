"""Takes the bytes of every token of a model; gives texts to show, token by token.

Bytes and not texts, because a token may end inside a character: its text is then empty, and the
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

    def __init__(self, pieces: list[bytes]) -> None:
        self._pieces = pieces

    def all_of(self, token_ids: Iterable[int]) -> list[str]:
        """A whole sequence, such as a prompt."""
        pieces = TokenTextDecoder(self)
        return pieces.of(list(token_ids), is_end=True)

    def piece(self, token_id: int) -> bytes:
        if 0 <= token_id < len(self._pieces):
            return self._pieces[token_id]
        return b"<%d>" % token_id  # the model has more ids than its tokenizer has tokens


class TokenTextDecoder:
    """One sequence of tokens as it grows; holds the part of a character that is not whole."""

    def __init__(self, texts: TokenTexts) -> None:
        self._texts = texts
        self._decoder = _UTF8(errors="replace")

    def of(self, token_ids: list[int], *, is_end: bool = False) -> list[str]:
        """The texts of the next tokens."""
        made = [self._decoder.decode(self._texts.piece(token_id)) for token_id in token_ids]
        if is_end and made:
            made[-1] += self._decoder.decode(b"", final=True)
        return made
