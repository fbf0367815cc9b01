"""Adds the `clairai` fields to a response as it is sent, or replaces a refusal by its reason.

Runs in: the API server. When the engine core refuses a request, vLLM (0.32) tells the client only
"Internal server error" (_raise_if_error, entrypoints/generate/base/serving.py:200): as the body of
a 500, or in a frame behind the first chunks of a streamed 200; a stream of /v1/responses breaks
off. The core remembers the reason, so it is asked.
"""

from __future__ import annotations

import contextlib
from http import HTTPStatus
from typing import Any, Final

import msgspec
from starlette.datastructures import MutableHeaders
from starlette.types import Message, Receive, Scope, Send

from clairai.fields.request_body import UNREADABLE
from clairai.server.engine_rpc import error_response
from clairai.server.response_fields import ResponseFields

_ERROR: Final = b'data: {"error"'  # create_error_response, as the frame of a stream
_FAILED: Final = (_ERROR, b"event: error")  # the latter in a stream of /v1/messages
# Sent before vLLM looks at the first token: the first chunks of a chat, one for each choice
# (entrypoints/openai/chat_completion/serving.py:550), the first events of a response
# (entrypoints/openai/responses/serving.py:1350) and of a message (anthropic/serving.py).
_BEFORE_FIRST_TOKEN: Final = (
    *(b'"delta":{"role":', b"event: response.created", b"event: response.in_progress"),
    b"event: message_start",
)
_STREAM: Final = b"text/event-stream"
_DONE: Final = b"data: [DONE]"


class _ChunkHeader(msgspec.Struct):
    """The fields that every chunk of a stream repeats."""

    id: str = ""
    object: str = ""
    created: int = 0
    model: str = ""


class ResponseWriter:
    """ASGI's `send` for one request.

    Sends nothing before the core has admitted the request. Only a stream that the core has no
    reason to refuse begins at once, as vLLM's own does: its head is then read by the client while
    the engine works on the prompt.
    """

    def __init__(
        self,
        scope: Scope,
        receive: Receive,
        send: Send,
        fields: ResponseFields,
        *,
        can_be_refused: bool = True,
    ) -> None:
        self._scope, self._receive, self._send = scope, receive, send
        self._fields = fields
        self._can_be_refused = can_be_refused
        self._header = _ChunkHeader()
        self._held: list[Message] = []  # the start, and bodies behind it
        self._is_open = False  # the held messages were sent
        self._is_over = False  # refused: drop whatever else comes

    async def __call__(self, message: Message) -> None:
        if self._is_over:
            return
        if self._is_open:
            if self._fields.has_capture or message.get("body", b"").startswith(_ERROR):
                message = await self._add_last(await self._explain(message))
            await self._send(message)
            return
        self._held.append(message)
        if message["type"] == "http.response.start":
            if not self._can_be_refused and self._is_stream and self._status == HTTPStatus.OK:
                self._is_open = True
                await self._send(message)
            return
        if self._must_wait(message):
            return
        if not self._has_failed(message) or not await self.is_refused():
            await self._open()

    async def is_refused(self) -> bool:
        """True if the core did not admit the request; the client then got the reason."""
        error = None if self._is_open or self._is_over else await self._fields.why_refused()
        if error is None:
            return self._is_over
        self._is_over = True
        await error_response(error)(self._scope, self._receive, self._send)
        return True

    def _must_wait(self, message: Message) -> bool:
        """True while it is not known yet whether the request was admitted."""
        if not message.get("more_body", False):
            return False
        if self._is_stream:
            return any(early in message["body"] for early in _BEFORE_FIRST_TOKEN)
        return self._status == HTTPStatus.INTERNAL_SERVER_ERROR

    def _has_failed(self, message: Message) -> bool:
        if self._is_stream:
            return bytes(message.get("body", b"")).startswith(_FAILED)
        return self._status == HTTPStatus.INTERNAL_SERVER_ERROR

    async def _open(self) -> None:
        self._is_open = True
        is_answered = self._status < 300 and not any(map(self._has_failed, self._held[1:]))
        fields = await self._fields.first() if is_answered else None
        if is_answered and not self._is_stream:
            last = await self._fields.last()
            fields = fields if last is None else {**(fields or {}), **last}
        if fields is not None:
            self._add_first(self._held[0], self._held[1], fields)
        for message in self._held:
            await self._send(await self._add_last(message) if is_answered else message)

    def _add_first(self, start: Message, first: Message, fields: dict[str, Any]) -> None:
        """Insert at the start of the first JSON object; every other byte stays."""
        body = bytes(first.get("body", b""))
        at = body.find(b"data: {") + len(b"data: ") if self._is_stream else 0
        if body[at : at + 1] != b"{":
            return
        self._read_header(body[at:])
        added = b'"clairai":' + msgspec.json.encode(fields) + b","
        first["body"] = body[: at + 1] + added + body[at + 1 :]
        headers = MutableHeaders(scope=start)
        if "content-length" in headers:
            headers["content-length"] = str(int(headers["content-length"]) + len(added))

    def _read_header(self, data: bytes) -> None:
        with contextlib.suppress(*UNREADABLE):  # a stream of another kind
            self._header = msgspec.json.decode(data.partition(b"\n")[0], type=_ChunkHeader)

    async def _add_last(self, message: Message) -> Message:
        """Insert a chunk without choices, as one with usage is, before the end of a stream."""
        if not self._fields.has_capture:
            return message
        body = bytes(message.get("body", b""))
        at = body.find(_DONE)
        if at < 0 or (at > 0 and body[at - 1 : at] != b"\n"):  # otherwise it is a token's text
            return message
        fields = await self._fields.last()
        if fields is None:
            return message
        chunk = {**msgspec.to_builtins(self._header), "choices": [], "clairai": fields}
        frame = b"data: " + msgspec.json.encode(chunk) + b"\n\n"
        return {**message, "body": body[:at] + frame + body[at:]}

    async def _explain(self, message: Message) -> Message:
        """Of several choices one can be refused when another's tokens were already sent."""
        if not bytes(message.get("body", b"")).startswith(_ERROR):
            return message
        error = await self._fields.why_refused()
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
