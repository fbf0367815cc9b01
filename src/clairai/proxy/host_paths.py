"""Keeps paths of the engine's machine out of what clients are answered."""

from __future__ import annotations

import re
from typing import Any, Final

import msgspec

# Two names or more, from the root or the home folder on; routes of the API are no paths.
_PATH: Final = re.compile(rb"(?<![\w.:/~-])(?:~|/(?!v1/))[\w.@+%-]*(?:/[\w.@+%-]+)+/?")
_HIDDEN: Final = b"(a path)"
_NULL: Final = msgspec.Raw(b"null")
_LIST: Final = msgspec.json.Decoder(dict[str, msgspec.Raw])
_CARDS: Final = msgspec.json.Decoder(list[dict[str, msgspec.Raw]])


def hide_paths(text: bytes) -> bytes:
    """The text of an error with every absolute path left out."""
    return _PATH.sub(_HIDDEN, text)


def hide_roots(body: bytes) -> bytes:
    """The answer of GET /v1/models without the folders that models were loaded from.

    Under `root` vLLM has the folder, or the name on a hub; OpenAI has the name of the model.
    """
    try:
        fields: dict[str, Any] = _LIST.decode(body)
        cards = _CARDS.decode(fields["data"])
    except (msgspec.MsgspecError, UnicodeDecodeError, KeyError):
        return hide_paths(body)  # not vLLM's answer
    shown = [{**card, "root": card.get("id", _NULL)} if "root" in card else card for card in cards]
    return msgspec.json.encode({**fields, "data": shown})
