"""Reads a chunk of an OpenAI stream, or a whole response, and adds scores to it.

Only the fields named here are written again; everything else keeps its bytes. The frame of an
ordinary token is matched as bytes and spliced; anything else is decoded.
"""

from __future__ import annotations

import re
from typing import Any, Final, NamedTuple, Self

import msgspec

_EMPTY: Final = msgspec.Raw(b"null")
_FIELDS: Final = msgspec.json.Decoder(dict[str, msgspec.Raw])
_CHOICES: Final = msgspec.json.Decoder(list[dict[str, msgspec.Raw]])
_NUMBER: Final = rb"(?:0|[1-9]\d{0,17})"
# No \u: what it stands for may be no character at all, which a decoder has to judge.
_STRING: Final = rb'"(?:[^"\\\x00-\x1f]++|\\["\\/bfnrt])*+"'
# A token's frame as vLLM writes it (0.32 entrypoints/openai/, chat_completion/serving.py and
# completion/serving.py): one choice that goes on, its text and its token ids. Quotes inside of a
# JSON string are escaped, so no text can look like the fields behind it.
_TOKEN_FRAME: Final = re.compile(
    rb'data: \{(?:"(?:id|object|model|system_fingerprint)":(?:STRING|null),|"created":NUMBER,)*+'
    rb'"choices":\[\{"index":(NUMBER),'
    rb'(?:"delta":\{"(?:content|reasoning|reasoning_content)":STRING\}|"text":STRING),'
    rb'"logprobs":null,"finish_reason":null,(?:"stop_reason":null,)?+(?:"prompt_token_ids":null,)?+'
    rb'"token_ids":(\[NUMBER(?:,NUMBER)*+\])\}\]\}\n\n'.replace(b"NUMBER", _NUMBER).replace(
        b"STRING", _STRING
    )
)
_TOKEN_ID_FIELDS: Final = ("token_ids", "prompt_token_ids")


class _Delta(msgspec.Struct):
    content: str | None = None


class ChoiceView(msgspec.Struct):
    """The fields of a choice that the proxy reads."""

    index: int = 0
    token_ids: list[int] | None = None
    prompt_token_ids: list[int] | None = None
    finish_reason: str | None = None
    stop_reason: str | int | None = None
    delta: msgspec.Raw = _EMPTY
    text: str | None = None
    logprobs: msgspec.Raw = _EMPTY

    def new_text(self) -> str:
        """The text that a client appends."""
        if self.text is not None:
            return self.text
        try:
            delta = msgspec.json.decode(self.delta, type=_Delta | None)
        except msgspec.ValidationError:  # content in parts: not text
            return ""
        return (delta.content or "") if delta is not None else ""


class RequestEcho(msgspec.Struct):
    """The `clairai` field of a response: what the engine does to this request, and its weights."""

    steering: list[Any] | None = None
    stop: list[Any] | None = None
    capture: dict[str, Any] | None = None
    weights: int | None = None

    @property
    def is_bound(self) -> bool:
        """True if the engine confirms what an engine without clairai would silently leave out."""
        return not (self.steering is None and self.stop is None and self.capture is None)


class ChunkView(msgspec.Struct):
    id: str | None = None
    model: str | None = None
    choices: list[ChoiceView] = []
    prompt_token_ids: list[int] | None = None
    usage: msgspec.Raw = _EMPTY
    error: msgspec.Raw = _EMPTY
    clairai: msgspec.Raw = _EMPTY  # see RequestEcho

    @property
    def is_error(self) -> bool:
        return bytes(self.error) != b"null"

    @property
    def echo(self) -> msgspec.Raw | None:
        return None if bytes(self.clairai) == b"null" else self.clairai

    @property
    def prompt(self) -> list[int] | None:
        """The prompt's token ids: a chat has them once, a completion in each choice."""
        if self.prompt_token_ids is not None:
            return self.prompt_token_ids
        found = (choice.prompt_token_ids for choice in self.choices)
        return next((ids for ids in found if ids is not None), None)


_VIEW_DECODER: Final = msgspec.json.Decoder(ChunkView)
_ECHO_DECODER: Final = msgspec.json.Decoder(RequestEcho)


class Chunk(NamedTuple):
    """A chunk as it came, and decoded."""

    frame: bytes  # of the stream; the body of a response that is not streamed
    data: bytes
    view: ChunkView

    @property
    def is_empty(self) -> bool:
        """True if vLLM sent it only for its token ids, as its parser had no text yet (0.32
        entrypoints/openai/chat_completion/serving.py:708).
        """
        return all(
            bytes(choice.delta) == b"{}"
            and choice.finish_reason is None
            and bytes(choice.logprobs) == b"null"
            for choice in self.view.choices
        ) and bool(self.view.choices)


class TokenFrame(NamedTuple):
    """The frame of one choice that goes on, with the text and the ids of new tokens."""

    frame: bytes
    choice: int
    token_ids: list[int]
    begin: int  # of the ids in the frame
    end: int

    @classmethod
    def match(cls, frame: bytes) -> Self | None:
        """None if it is anything else, or may be: then it has to be decoded."""
        found = _TOKEN_FRAME.fullmatch(frame)
        if found is None or not _is_text(frame):
            return None
        begin, end = found.span(2)
        ids = [int(one) for one in frame[begin + 1 : end - 1].split(b",")]
        return cls(frame, int(found[1]), ids, begin, end)

    def with_scores(self, scores: bytes | None, *, keeps_token_ids: bool) -> bytes:
        """The frame with these `probe_scores`; as `edit_chunk` writes it."""
        frame, begin, end = self.frame, self.begin, self.end
        if scores is None and keeps_token_ids:
            return frame
        ids = frame[begin:end] if keeps_token_ids else b"null"
        added = b"" if scores is None else b',"probe_scores":' + scores
        return frame[:begin] + ids + added + frame[end:]


def _is_text(raw: bytes) -> bool:
    """True if it is UTF-8: parts that stay encoded are decoded nowhere else."""
    if raw.isascii():
        return True
    try:
        raw.decode()
    except UnicodeDecodeError:
        return False
    return True


def read_echo(echo: msgspec.Raw) -> RequestEcho:
    """Decode it; empty if upstream uses this field for something else."""
    try:
        return _ECHO_DECODER.decode(echo)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return RequestEcho()


def read_chunk(frame: bytes, data: bytes) -> Chunk | None:
    """None if the data is not a chunk."""
    try:
        return Chunk(frame, data, _VIEW_DECODER.decode(data)) if _is_text(data) else None
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return None


def edit_chunk(
    chunk: Chunk, added: dict[int, dict[str, Any]], *, keeps_token_ids: bool
) -> bytes | None:
    """The chunk's JSON with fields `added` by choice index; None if nothing changes.

    Token ids become null unless they are kept.
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
    """Set them to null, as vLLM does if the client did not ask for them."""
    for name in _TOKEN_ID_FIELDS:
        if name in fields:
            fields[name] = None
