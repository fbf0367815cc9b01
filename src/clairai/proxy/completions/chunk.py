"""Takes a chunk of an OpenAI answer, or a whole one; gives what it holds, and adds scores to it.

Everything that is not ours to change keeps its bytes: only the fields named here are written anew.
"""

from __future__ import annotations

from typing import Any, Final, NamedTuple

import msgspec

_EMPTY: Final = msgspec.Raw(b"null")
_FIELDS: Final = msgspec.json.Decoder(dict[str, msgspec.Raw])
_CHOICES: Final = msgspec.json.Decoder(list[dict[str, msgspec.Raw]])
_TOKEN_ID_FIELDS: Final = ("token_ids", "prompt_token_ids")


class _Delta(msgspec.Struct):
    content: str | None = None


class ChoiceView(msgspec.Struct):
    """The parts of a choice that concern us; everything else is skipped unread."""

    index: int = 0
    token_ids: list[int] | None = None
    prompt_token_ids: list[int] | None = None
    finish_reason: str | None = None
    stop_reason: str | int | None = None
    delta: msgspec.Raw = _EMPTY
    text: str | None = None
    logprobs: msgspec.Raw = _EMPTY

    def shown(self) -> str:
        """The text that a client appends."""
        if self.text is not None:
            return self.text
        try:
            delta = msgspec.json.decode(self.delta, type=_Delta | None)
        except msgspec.ValidationError:  # content in parts: not text
            return ""
        return (delta.content or "") if delta is not None else ""


class RequestEcho(msgspec.Struct):
    """What the engine says of a request: what it does to it, and which weights answer it."""

    steering: list[Any] | None = None
    stop: list[Any] | None = None
    capture: dict[str, Any] | None = None
    weights: int | None = None

    @property
    def is_bound(self) -> bool:
        """Whether it does what an engine without clairai would leave out in silence."""
        return not (self.steering is None and self.stop is None and self.capture is None)


class ChunkView(msgspec.Struct):
    id: str | None = None
    model: str | None = None
    choices: list[ChoiceView] = []
    prompt_token_ids: list[int] | None = None
    usage: msgspec.Raw = _EMPTY
    error: msgspec.Raw = _EMPTY
    clairai: msgspec.Raw = _EMPTY  # what the engine says it does to this request

    @property
    def is_error(self) -> bool:
        return bytes(self.error) != b"null"

    @property
    def echo(self) -> msgspec.Raw | None:
        return None if bytes(self.clairai) == b"null" else self.clairai

    @property
    def prompt(self) -> list[int] | None:
        """Chat says it once for all choices, completions in each choice."""
        if self.prompt_token_ids is not None:
            return self.prompt_token_ids
        found = (choice.prompt_token_ids for choice in self.choices)
        return next((ids for ids in found if ids is not None), None)


_VIEW_DECODER: Final = msgspec.json.Decoder(ChunkView)
_ECHO_DECODER: Final = msgspec.json.Decoder(RequestEcho)


class Chunk(NamedTuple):
    """The chunk as it came, and what it says."""

    frame: bytes  # with its frame in a stream; the body of an answer that was not streamed
    data: bytes
    view: ChunkView

    @property
    def is_empty(self) -> bool:
        """Whether vLLM sent it only because token ids were asked for (0.32
        entrypoints/openai/chat_completion/serving.py:708): its parser had nothing to say yet.
        """
        return all(
            bytes(choice.delta) == b"{}"
            and choice.finish_reason is None
            and bytes(choice.logprobs) == b"null"
            for choice in self.view.choices
        ) and bool(self.view.choices)


def read_echo(echo: msgspec.Raw) -> RequestEcho:
    """Nothing, of an upstream that means something else by our field."""
    try:
        return _ECHO_DECODER.decode(echo)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return RequestEcho()


def read_chunk(frame: bytes, data: bytes) -> Chunk | None:
    """None for what is no chunk of ours to read."""
    try:
        return Chunk(frame, data, _VIEW_DECODER.decode(data))
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return None


def edit_chunk(
    chunk: Chunk, added: dict[int, dict[str, Any]], *, keeps_token_ids: bool
) -> bytes | None:
    """The chunk's JSON with `added` fields by choice index, without token ids unless kept.

    None if nothing had to change.
    """
    has_ids = not keeps_token_ids and b'token_ids"' in chunk.data
    if not added and not has_ids:
        return None
    fields: dict[str, Any] = _FIELDS.decode(chunk.data)
    choices: list[dict[str, Any]] = _CHOICES.decode(fields.get("choices", b"[]"))
    for choice, view in zip(choices, chunk.view.choices, strict=True):
        if not keeps_token_ids:
            _remove_token_ids(choice)
        choice.update(added.get(view.index, {}))
    if not keeps_token_ids:
        _remove_token_ids(fields)
    fields["choices"] = choices
    return msgspec.json.encode(fields)


def _remove_token_ids(fields: dict[str, Any]) -> None:
    """null, as vLLM writes it where nobody asked."""
    for name in _TOKEN_ID_FIELDS:
        if name in fields:
            fields[name] = None
