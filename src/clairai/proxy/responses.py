"""What the proxy sends to its clients: refusals in OpenAI's shape, and streams.

Runs in: the proxy, on the event loop.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Callable, Coroutine, Mapping
from contextlib import AsyncExitStack
from http import HTTPStatus
from typing import Any, ClassVar, Final, Protocol, TypeVar

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Message, Receive, Scope, Send

from clairai.errors import ClairaiError

EVENT_STREAM: Final = "text/event-stream"
Result = TypeVar("Result")


class HttpRefusal(Exception):
    """Ends a request with this status and reason, which names no path, address or code of ours."""

    def __init__(
        self,
        status: HTTPStatus,
        message: str,
        *,
        code: str | None = None,
        param: str | None = None,
        headers: dict[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status, self.message, self.code, self.param = status, message, code, param
        self.headers = headers or {}

    @property
    def body(self) -> dict[str, Any]:
        """The error in the shape that OpenAI clients read."""
        kind = "invalid_request_error" if self.status < 500 else "server_error"
        error = {"message": self.message, "type": kind, "param": self.param, "code": self.code}
        return {"error": error}


def bad_request(error: ClairaiError, *, param: str | None = None) -> HttpRefusal:
    """Refuse a request for an error that is the client's."""
    return HttpRefusal(HTTPStatus.BAD_REQUEST, error.reason, code=error.code, param=param)


def error_response(refusal: HttpRefusal) -> Response:
    return Response(
        msgspec.json.encode(refusal.body),
        refusal.status,
        {**refusal.headers},
        media_type="application/json",
    )


class ClientGone(Exception):
    """The client has hung up."""


async def while_connected(request: Request, work: Coroutine[Any, Any, Result]) -> Result:
    """The result of `work`, which is cancelled if the client hangs up first."""
    working = asyncio.ensure_future(work)
    watching = asyncio.ensure_future(_wait_for_disconnect(request.receive))
    try:
        await asyncio.wait({working, watching}, return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            raise ClientGone
        return working.result()
    finally:
        await _cancel(working, watching)


class PartWriter(Protocol):
    """Writes parts of a body that has begun straight to the connection.

    Under this name in the scope's extensions: a part that passes every layer in between costs five
    times as much. The start and the end of the body still pass them.
    """

    EXTENSION: ClassVar[str] = "clairai.parts"

    async def write(self, part: bytes) -> None:
        """Return when the connection takes more; at once if the client has hung up."""

    @property
    def is_ready(self) -> bool:
        """True if the client is there and takes what is sent: `write_now` may be called."""

    def write_now(self, part: bytes) -> None:
        """As `write`, without waiting."""


class PartStream(Response):
    """Sends parts as they come.

    `closing` is closed when the last part is sent, when the client has hung up, or when it has
    taken nothing for `stall_s`. `on_start` gets the connection's writer, if it has one, when the
    head is sent: parts may also be written there while nothing else is being sent.
    """

    def __init__(
        self,
        parts: AsyncGenerator[bytes, None],
        closing: AsyncExitStack,
        *,
        stall_s: float,
        status: int = 200,
        headers: Mapping[str, str] | None = None,
        on_start: Callable[[PartWriter], None] | None = None,
    ) -> None:
        super().__init__(status_code=status, headers=headers)
        if headers is None or "content-length" not in headers:
            del self.headers["content-length"]
        self._parts = parts
        self._closing = closing
        self._stall_s = stall_s
        self._sending_since_s: float | None = None
        self._on_start = on_start

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async with self._closing:
            sending = asyncio.ensure_future(self._send_parts(send, self._find_writer(scope)))
            ends = (_wait_for_disconnect(receive), self._wait_for_stall())
            tasks = (sending, *map(asyncio.ensure_future, ends))
            try:
                await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
                if sending.done():
                    sending.result()
            finally:
                await _cancel(*tasks)
                await self._parts.aclose()

    def _find_writer(self, scope: Scope) -> PartWriter | None:
        """None if parts have to pass all layers: the server is another, or knows the length."""
        writer: PartWriter | None = scope.get("extensions", {}).get(PartWriter.EXTENSION)
        return None if "content-length" in self.headers else writer

    async def _send_parts(self, send: Send, writer: PartWriter | None) -> None:
        start: Message = {
            "type": "http.response.start",
            "status": self.status_code,
            "headers": self.raw_headers,
        }
        await send(start)
        if writer is not None and self._on_start is not None:
            self._on_start(writer)
        async for part in self._parts:
            self._sending_since_s = time.monotonic()
            if writer is None:
                await send({"type": "http.response.body", "body": part, "more_body": True})
            else:
                await writer.write(part)
            self._sending_since_s = None
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _wait_for_stall(self) -> None:
        """Return when one part has waited too long; a timer for each part would cost too much."""
        while True:
            await asyncio.sleep(self._stall_s / 4)
            since_s = self._sending_since_s
            if since_s is not None and time.monotonic() - since_s > self._stall_s:
                return


class EventStream(PartStream):
    """A stream of server-sent events."""

    media_type = EVENT_STREAM

    def __init__(
        self,
        parts: AsyncGenerator[bytes, None],
        closing: AsyncExitStack,
        *,
        stall_s: float,
        status: int = 200,
        headers: Mapping[str, str] | None = None,
        on_start: Callable[[PartWriter], None] | None = None,
    ) -> None:
        super().__init__(
            parts, closing, stall_s=stall_s, status=status, headers=headers, on_start=on_start
        )
        self.headers["Cache-Control"] = "no-cache"
        self.headers["X-Accel-Buffering"] = "no"  # nginx would hold tokens back


async def _wait_for_disconnect(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def _cancel(*tasks: asyncio.Future[Any]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
