"""Takes a chat request that names messages to capture; gives the positions they have in its prompt.

vLLM's own route POST /tokenize says what a chat's prompt is, with the server's template and
tokenizer (entrypoints/serve/tokenize/protocol.py, 0.26:46, 0.32:46); it is asked for the chat's
beginnings.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import msgspec
from starlette.types import ASGIApp, Message, Scope

from clairai.errors import RequestError
from clairai.fields.positions import MessagePosition as NamedMessage
from clairai.fields.positions import PositionPart, Positions, PositionSpan
from clairai.library import message_range as chats

TOKENIZE_PATH: Final = "/tokenize"
CHAT_PATH: Final = "/v1/chat/completions"
# Fields that the route takes as a chat does, and that change what the prompt is.
_KEPT: Final = (
    *("model", "chat_template", "chat_template_kwargs", "tools", "add_special_tokens"),
    "mm_processor_kwargs",
)
# Those that change it, and that the route does not take.
_UNKNOWN: Final = ("documents", "reasoning_effort")
_MESSAGES: Final = msgspec.json.Decoder(list[msgspec.Raw])
BodyFields = Mapping[str, msgspec.Raw]
Tokenize = Callable[[bytes], Awaitable[Sequence[int]]]


class _Tokens(msgspec.Struct):
    tokens: list[int]


class _ErrorBody(msgspec.Struct):
    message: str = ""


class _TokenizeError(msgspec.Struct):
    error: _ErrorBody


def names_messages(positions: Positions | None) -> bool:
    return any(isinstance(part, NamedMessage) for part in positions or ())


async def resolve_messages(
    positions: Positions, fields: BodyFields, tokenize: Tokenize
) -> Positions:
    """The same with a range for each message; RequestError where that cannot be told."""
    for name in _UNKNOWN:
        if bytes(fields.get(name, b"null")) != b"null":
            raise RequestError(
                f"where a message lies cannot be told of a chat with {name}; give from and to"
            )
    try:
        messages = _MESSAGES.decode(fields.get("messages", b"[]"))
    except msgspec.MsgspecError:
        raise RequestError("messages must be a list") from None
    chat = _Chat(fields, messages, tokenize)
    return tuple([await chat.part(part) for part in positions])


@dataclass(frozen=True)
class _Chat:
    fields: BodyFields
    messages: Sequence[msgspec.Raw]
    tokenize: Tokenize

    async def part(self, part: PositionPart) -> PositionPart:
        if not isinstance(part, NamedMessage):
            return part
        index = part.index
        chats.check_message_index(index, len(self.messages))
        before = await self._ids(index, is_whole=False) if index else []
        through = await self._ids(index + 1, is_whole=False)
        prompt = await self._ids(len(self.messages), is_whole=True)
        return PositionSpan(
            *chats.find_message_span(index, before=before, through=through, prompt=prompt)
        )

    async def _ids(self, num_messages: int, *, is_whole: bool) -> Sequence[int]:
        made: dict[str, Any] = {name: self.fields[name] for name in _KEPT if name in self.fields}
        made["messages"] = self.messages[:num_messages]
        if is_whole:
            ends = ("add_generation_prompt", "continue_final_message")
            made |= {name: self.fields[name] for name in ends if name in self.fields}
        else:
            made["add_generation_prompt"] = False
        return await self.tokenize(msgspec.json.encode(made))


def tokenize_through(app: ASGIApp, scope: Scope) -> Tokenize:
    """Ask the same server, as the same client."""

    async def tokenize(body: bytes) -> Sequence[int]:
        sent: list[Message] = []
        left = [{"type": "http.request", "body": body, "more_body": False}]
        done = asyncio.Event()

        async def given() -> Message:
            if left:
                return left.pop()
            await done.wait()  # vLLM listens here for the client to hang up
            return {"type": "http.disconnect"}

        async def send(message: Message) -> None:
            sent.append(message)

        try:
            await app(_scope(scope, len(body)), given, send)
        finally:
            done.set()
        return _tokens(sent)

    return tokenize


def _scope(scope: Scope, nbytes: int) -> Scope:
    path = scope.get("root_path", "") + TOKENIZE_PATH
    kept = (b"content-length", b"transfer-encoding", b"content-type", b"accept-encoding")
    headers = [pair for pair in scope["headers"] if pair[0].lower() not in kept]
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


def _tokens(sent: Sequence[Message]) -> Sequence[int]:
    status = next((one["status"] for one in sent if one["type"] == "http.response.start"), 500)
    body = b"".join(bytes(one.get("body", b"")) for one in sent[1:])
    try:
        if status < 300:
            return msgspec.json.decode(body, type=_Tokens).tokens
        why = msgspec.json.decode(body, type=_TokenizeError).error.message[:200]
    except msgspec.MsgspecError:
        why = f"status {status}"
    raise RequestError(f"where a message lies cannot be told, the template refuses: {why}")
