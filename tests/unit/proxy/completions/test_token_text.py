"""The texts of tokens that end inside a character."""

from __future__ import annotations

from clairai.proxy.completions.token_text import TokenTextDecoder, TokenTexts


def test_texts_complete_a_character_at_its_last_token() -> None:
    texts = TokenTexts([b"<s>", b"\xf0\x9f", b"\x99\x82", b"a", b"\xc3"])
    pieces = TokenTextDecoder(texts)
    assert pieces.decode([0, 1]) == ["<s>", ""]
    assert pieces.decode([2, 3]) == ["🙂", "a"]
    assert pieces.decode([4, 3, 4], is_end=True) == ["", "\ufffda", "\ufffd"]
    assert texts.decode([3, 99]) == ["a", "<99>"]
    assert TokenTextDecoder(texts).decode([], is_end=True) == []
