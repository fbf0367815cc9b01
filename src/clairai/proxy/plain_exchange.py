"""One plain request and its response on a connection of the proxy, framed without a parser.

A plain request (`RequestHead.is_plain`) has been judged byte by byte when its head is read, and its
body is as long as it says. h11 would read all of it again, and takes more time for that than the
proxy for the rest; it frames whatever is not plain. Runs in: the proxy, on the event loop.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import Any, Final, cast
from urllib.parse import unquote

from starlette.types import Message, Scope
from uvicorn.protocols.http.flow_control import HIGH_WATER_LIMIT, FlowControl
from uvicorn.protocols.http.h11_impl import STATUS_PHRASES, RequestResponseCycle

from clairai.proxy.request_head import RequestHead, check_fields
from clairai.proxy.responses import Exchange

_NO_BODY: Final = (204, 304)


def make_scope(head: RequestHead, *, connection: Scope, state: dict[str, Any]) -> Scope:
    """The scope as uvicorn makes it; `connection` is what all requests of one have in common."""
    raw_path, _, query = head.target.partition(b"?")
    path = raw_path.decode("ascii")
    return {
        **connection,
        "method": head.method.decode("ascii"),
        "path": unquote(path) if "%" in path else path,
        "raw_path": raw_path,
        "query_string": query,
        "headers": head.headers,
        "state": state.copy(),
    }


class PlainExchange(RequestResponseCycle, Exchange):
    """What uvicorn calls a cycle: `receive` and `send` of one request, and what runs the app."""

    def __init__(
        self,
        head: RequestHead,
        scope: Scope,
        *,
        transport: Any,
        flow: FlowControl,
        logger: logging.Logger,
        default_headers: list[tuple[bytes, bytes]],
        on_response: Callable[[], None],
    ) -> None:
        scope["extensions"] = {Exchange.EXTENSION: self}
        self.scope = cast(Any, scope)
        self.transport, self.flow, self.logger = cast(Any, transport), flow, logger
        self.default_headers = default_headers
        self.on_response = on_response
        self.message_event = asyncio.Event()
        self.disconnected = self.response_started = self.response_complete = False
        self.keep_alive, self._says_close = not head.wants_close, head.wants_close
        self.body = bytearray()
        self.num_missing = head.body_length  # bytes of the body that have not come
        self._head = b""  # of the response, until it is written
        self.response_head = b""
        self._on_leave: Callable[[], None] | None = None
        self._num_unsent: int | None = None  # of a response with a length; None: it has chunks
        self._has_body = True

    # From the connection

    def feed(self, data: bytes) -> bytes:
        """Take what is of this request's body; what is not is returned."""
        taken = data[: self.num_missing]
        self.num_missing -= len(taken)
        if not self.response_complete:
            self.body += taken
            if len(self.body) > HIGH_WATER_LIMIT:
                self.flow.pause_reading()
        self.message_event.set()
        return data[len(taken) :]

    def leave(self) -> None:
        """The connection has ended."""
        if not self.response_complete:
            self.disconnected = True
            if self._on_leave is not None:
                self._on_leave()
        self.message_event.set()

    # To the app

    @property
    def has_left(self) -> bool:
        return self.disconnected

    def watch(self, on_leave: Callable[[], None] | None) -> None:
        self._on_leave = on_leave

    def take_body(self) -> bytes | None:
        if self.num_missing or self.disconnected:
            return None
        body, self.body = bytes(self.body), bytearray()
        self.message_event.clear()
        self.flow.resume_reading()
        return body

    async def receive(self) -> Any:
        if not self.disconnected and not self.response_complete:
            self.flow.resume_reading()
            await self.message_event.wait()
            self.message_event.clear()
        if self.disconnected or self.response_complete:
            return {"type": "http.disconnect"}
        body, self.body = bytes(self.body), bytearray()
        return {"type": "http.request", "body": body, "more_body": self.num_missing > 0}

    async def send(self, message: Any) -> None:
        if self.flow.write_paused and not self.disconnected:
            await self.flow.drain()
        if self.disconnected:
            return
        self.transport.is_mid_request = self.num_missing > 0  # type: ignore[attr-defined]
        if not self.response_started:
            self._send_head(message)
        elif not self.response_complete:
            self._send_body(message)
        else:
            raise RuntimeError(f"{message['type']} after the end of the response")

    async def write(self, part: bytes) -> None:
        if self.flow.write_paused and not self.disconnected:
            await self.flow.drain()
        if part and not self.disconnected:
            self.write_now(part)

    @property
    def is_ready(self) -> bool:
        return not self.flow.write_paused and not self.disconnected

    def write_now(self, part: bytes) -> None:
        self._write(b"%x\r\n%b\r\n" % (len(part), part))

    def _send_head(self, message: Message) -> None:
        self.response_started = True
        status, headers = message["status"], [*self.default_headers, *message.get("headers", ())]
        if self.num_missing:  # answered before all was sent: this is the end
            self.keep_alive = False
            headers.append((b"connection", b"close"))
        names = [name.lower() for name, _ in headers]
        self._has_body = status not in _NO_BODY
        if b"content-length" in names:
            self._num_unsent = int(headers[names.index(b"content-length")][1])
        elif self._has_body:
            headers.append((b"Transfer-Encoding", b"chunked"))
        if self._says_close:
            headers = [pair for pair in headers if pair[0].lower() != b"connection"]
            headers.append((b"Connection", b"close"))
        lines = [b"%b: %b" % pair for pair in headers]
        check_fields(lines)
        first = b"HTTP/1.1 %d %b" % (status, STATUS_PHRASES[status])
        self._head = self.response_head = b"\r\n".join((first, *lines, b"", b""))
        asyncio.get_running_loop().call_soon(self._flush)

    @property
    def has_written(self) -> bool:
        """True if the client has, or gets, a part of the response."""
        return self.response_started and not self._head

    def _flush(self) -> None:
        if self._head and not self.transport.is_closing():
            self._write(b"")

    def _write(self, data: bytes) -> None:
        """The head waits until the end of the round for what follows it, to leave in one part."""
        if self._head:
            data, self._head = self._head + data, b""
        if data:
            self.transport.write(data)

    def _send_body(self, message: Message) -> None:
        body, is_end = message.get("body", b""), not message.get("more_body", False)
        if not self._has_body:
            body = b""
        elif self._num_unsent is not None:
            self._num_unsent -= len(body)
            if self._num_unsent < 0 or (is_end and self._num_unsent):
                raise RuntimeError("the body of a response is not as long as its head says")
        elif body and is_end:
            body = b"%x\r\n%b\r\n0\r\n\r\n" % (len(body), body)
        elif body:
            body = b"%x\r\n%b\r\n" % (len(body), body)
        elif is_end:
            body = b"0\r\n\r\n"
        self._write(body)
        if is_end:
            self.response_complete = True
            self.message_event.set()
            if not self.keep_alive:
                self.transport.close()
            self.on_response()
