"""Takes vLLM's answer to a request as it is sent; gives it with what was applied, or says why not.

When the engine core refuses a request, vLLM (0.32) tells the client "Internal server error" and
nothing else (_raise_if_error, entrypoints/generate/base/serving.py:200): as the body of a 500, or,
in a stream, in a frame behind the first chunks of a 200; a stream of /v1/responses breaks off. The
core remembers why; it is asked.
"""

from __future__ import annotations

import contextlib
from collections.abc import Awaitable, Callable, Mapping
from typing import Any, Final

import msgspec
from starlette.datastructures import MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from clairai.errors import ClairaiError

RefusalOf = Callable[[], Awaitable[ClairaiError | None]]
ResponseFields = Callable[[], Awaitable[dict[str, Any] | None]]
Refuse = Callable[[ClairaiError], ASGIApp]

_ERROR: Final = b'data: {"error"'  # create_error_response, as the frame of a stream
_FAILED: Final = (_ERROR, b"event: error")  # the latter in a stream of /v1/messages
# What is said before the first token is looked at: the first chunks of a chat, one for each choice
# (entrypoints/openai/chat_completion/serving.py:550), the first events of a response
# (entrypoints/openai/responses/serving.py:1350) and of a message (anthropic/serving.py).
_EARLY: Final = (
    *(b'"delta":{"role":', b"event: response.created", b"event: response.in_progress"),
    b"event: message_start",
)
_STREAM: Final = b"text/event-stream"
_DONE: Final = b"data: [DONE]"
_SERVER_ERROR: Final = 500


class _Chunk(msgspec.Struct):
    """What every chunk of a stream says of itself."""

    id: str = ""
    object: str = ""
    created: int = 0
    model: str = ""


class ResponseWriter:
    """ASGI's `send` for one request; nothing goes out before it is known that it was admitted."""

    def __init__(
        self,
        scope: Scope,
        receive: Receive,
        send: Send,
        *,
        echo: ResponseFields,
        why: RefusalOf,
        result: ResponseFields | None = None,
    ) -> None:
        """`result` is what is known when the request has ended, and only then."""
        self._scope, self._receive, self._send = scope, receive, send
        self._echo, self._why, self._result = echo, why, result
        self._chunk = _Chunk()
        self._held: list[Message] = []  # the start, and bodies behind it
        self._is_open = False  # what was held has gone out
        self._is_over = False  # it was refused: whatever else comes is dropped

    async def __call__(self, message: Message, refuse: Refuse) -> None:
        if self._is_over:
            return
        if self._is_open:
            await self._send(await self._ended(await self._explained(message)))
            return
        self._held.append(message)
        if message["type"] == "http.response.start" or self._is_waiting(message):
            return
        if not self._has_failed(message) or not await self.is_refused(refuse):
            await self._open()

    async def is_refused(self, refuse: Refuse) -> bool:
        """Whether the core did not admit the request; then the client has been told, and why."""
        error = None if self._is_open or self._is_over else await self._why()
        if error is None:
            return self._is_over
        self._is_over = True
        await refuse(error)(self._scope, self._receive, self._send)
        return True

    def _is_waiting(self, message: Message) -> bool:
        """Whether more must come before it is known how the request fared."""
        if not message.get("more_body", False):
            return False
        if self._is_stream:
            return any(early in message["body"] for early in _EARLY)
        return self._status == _SERVER_ERROR

    def _has_failed(self, message: Message) -> bool:
        if self._is_stream:
            return bytes(message.get("body", b"")).startswith(_FAILED)
        return self._status == _SERVER_ERROR

    async def _open(self) -> None:
        self._is_open = True
        is_answered = self._status < 300 and not any(map(self._has_failed, self._held[1:]))
        echo = await self._echo() if is_answered else None
        if is_answered and self._result is not None and not self._is_stream:
            echo = _merge(echo, await self._result())
        if echo is not None:
            self._add_echo(self._held[0], self._held[1], echo)
        for message in self._held:
            await self._send(await self._ended(message) if is_answered else message)

    def _add_echo(self, start: Message, first: Message, echo: dict[str, Any]) -> None:
        """In front of the first object that is sent; every byte behind it stays."""
        body = bytes(first.get("body", b""))
        at = body.find(b"data: {") + len(b"data: ") if self._is_stream else 0
        if body[at : at + 1] != b"{":
            return
        self._read_chunk(body[at:])
        added = b'"clairai":' + msgspec.json.encode(echo) + b","
        first["body"] = body[: at + 1] + added + body[at + 1 :]
        headers = MutableHeaders(scope=start)
        if "content-length" in headers:
            headers["content-length"] = str(int(headers["content-length"]) + len(added))

    def _read_chunk(self, data: bytes) -> None:
        with contextlib.suppress(msgspec.MsgspecError):  # of another kind of stream
            self._chunk = msgspec.json.decode(data.partition(b"\n")[0], type=_Chunk)

    async def _ended(self, message: Message) -> Message:
        """A chunk more in front of the end of a stream: one without choices, as usage comes in."""
        if self._result is None:
            return message
        body = bytes(message.get("body", b""))
        at = body.find(_DONE)
        if at < 0 or (at > 0 and body[at - 1 : at] != b"\n"):  # else it is in a token's text
            return message
        result = await self._result()
        if result is None:
            return message
        told = {**msgspec.to_builtins(self._chunk), "choices": [], "clairai": result}
        frame = b"data: " + msgspec.json.encode(told) + b"\n\n"
        return {**message, "body": body[:at] + frame + body[at:]}

    async def _explained(self, message: Message) -> Message:
        """The stream has begun: of several choices one can be refused behind another's tokens."""
        if not bytes(message.get("body", b"")).startswith(_ERROR):
            return message
        error = await self._why()
        if error is None:
            return message
        about = {"type": "invalid_request_error", "param": None, "code": error.code}
        frame = msgspec.json.encode({"error": {"message": error.reason, **about}})
        return {**message, "body": b"data: " + frame + b"\n\n"}

    @property
    def _status(self) -> int:
        status: int = self._held[0]["status"]
        return status

    @property
    def _is_stream(self) -> bool:
        headers = dict(self._held[0].get("headers", ()))
        return bytes(headers.get(b"content-type", b"")).startswith(_STREAM)


def _merge(
    first: Mapping[str, Any] | None, second: Mapping[str, Any] | None
) -> dict[str, Any] | None:
    return None if first is None and second is None else {**(first or {}), **(second or {})}
