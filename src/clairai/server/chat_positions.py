"""Finds the token positions of chat messages that a request names for capture.

Runs in: the API server. vLLM's own route POST /tokenize applies the server's template and tokenizer
(entrypoints/serve/tokenize/protocol.py, 0.26:46, 0.32:46); it is asked for the first messages of
the chat, and for all of them.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import msgspec
from starlette.types import ASGIApp, Message, Scope

from clairai.errors import RequestError, printable
from clairai.fields.positions import MessagePosition, PositionPart, Positions, PositionSpan
from clairai.library.message_range import check_message_index, find_message_span

TOKENIZE_PATH: Final = "/tokenize"
CHAT_PATH: Final = "/v1/chat/completions"
# Fields that change the prompt and that /tokenize takes as a chat does.
_TEMPLATE_FIELDS: Final = (
    *("model", "chat_template", "chat_template_kwargs", "tools", "add_special_tokens"),
    "mm_processor_kwargs",
)
# Fields that change the end of the prompt.
_END_FIELDS: Final = ("add_generation_prompt", "continue_final_message")
# Fields that change the prompt and that /tokenize does not take.
_UNSUPPORTED: Final = ("documents", "reasoning_effort")
_MESSAGES: Final = msgspec.json.Decoder(list[msgspec.Raw])
Tokenize = Callable[[bytes], Awaitable[Sequence[int]]]


class _Tokens(msgspec.Struct):
    tokens: list[int]


class _ErrorBody(msgspec.Struct):
    message: str = ""


class _TokenizeError(msgspec.Struct):
    error: _ErrorBody


def names_messages(positions: Positions | None) -> bool:
    return any(isinstance(part, MessagePosition) for part in positions or ())


async def resolve_messages(
    positions: Positions, fields: Mapping[str, msgspec.Raw], tokenize: Tokenize
) -> Positions:
    """The positions with a range for each message; RequestError if it cannot be found."""
    for name in _UNSUPPORTED:
        if bytes(fields.get(name, b"null")) != b"null":
            raise RequestError(
                f"where a message lies cannot be told of a chat with {name}; give from and to"
            )
    try:
        messages = _MESSAGES.decode(fields.get("messages", b"[]"))
    except msgspec.MsgspecError:
        raise RequestError("messages must be a list") from None
    chat = _Chat(fields, messages, tokenize)
    return tuple([await chat.resolve(part) for part in positions])


@dataclass(frozen=True)
class _Chat:
    fields: Mapping[str, msgspec.Raw]
    messages: Sequence[msgspec.Raw]
    tokenize: Tokenize

    async def resolve(self, part: PositionPart) -> PositionPart:
        if not isinstance(part, MessagePosition):
            return part
        index = part.index
        check_message_index(index, len(self.messages))
        before = await self._tokenize_start(index) if index else []
        through = await self._tokenize_start(index + 1)
        ends = {name: self.fields[name] for name in _END_FIELDS if name in self.fields}
        prompt = await self._tokenize(self.messages, ends)
        span = find_message_span(index, before=before, through=through, prompt=prompt)
        return PositionSpan(*span)

    async def _tokenize_start(self, num_messages: int) -> Sequence[int]:
        return await self._tokenize(self.messages[:num_messages], {"add_generation_prompt": False})

    async def _tokenize(
        self, messages: Sequence[msgspec.Raw], ends: Mapping[str, Any]
    ) -> Sequence[int]:
        kept = {name: self.fields[name] for name in _TEMPLATE_FIELDS if name in self.fields}
        return await self.tokenize(msgspec.json.encode({**kept, "messages": messages, **ends}))


def tokenize_through(app: ASGIApp, scope: Scope) -> Tokenize:
    """Ask the same server as the same client."""

    async def tokenize(body: bytes) -> Sequence[int]:
        sent: list[Message] = []
        unread = [{"type": "http.request", "body": body, "more_body": False}]
        done = asyncio.Event()

        async def receive() -> Message:
            if unread:
                return unread.pop()
            await done.wait()  # vLLM waits here for the client to hang up
            return {"type": "http.disconnect"}

        async def send(message: Message) -> None:
            sent.append(message)

        try:
            await app(_tokenize_scope(scope, len(body)), receive, send)
        finally:
            done.set()
        return _read_tokens(sent)

    return tokenize


def _tokenize_scope(scope: Scope, nbytes: int) -> Scope:
    path = scope.get("root_path", "") + TOKENIZE_PATH
    dropped = (b"content-length", b"transfer-encoding", b"content-type", b"accept-encoding")
    headers = [pair for pair in scope["headers"] if pair[0].lower() not in dropped]
    headers += [
        (b"content-length", str(nbytes).encode()),
        (b"content-type", b"application/json"),
    ]
    return {
        **scope,
        "path": path,
        "raw_path": path.encode(),
        "query_string": b"",
        "headers": headers,
        "state": dict(scope.get("state", {})),
    }


def _read_tokens(sent: Sequence[Message]) -> Sequence[int]:
    status = next((one["status"] for one in sent if one["type"] == "http.response.start"), 500)
    body = b"".join(bytes(one.get("body", b"")) for one in sent[1:])
    try:
        if status < 300:
            return msgspec.json.decode(body, type=_Tokens).tokens
        why = msgspec.json.decode(body, type=_TokenizeError).error.message
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        why = f"status {status}"
    raise RequestError(
        f"where a message lies cannot be told, the template refuses: {printable(why)}"
    )
