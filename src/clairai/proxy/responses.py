"""What the proxy sends to its clients: refusals in OpenAI's shape, and streams.

Runs in: the proxy, on the event loop.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Callable, Coroutine, Mapping
from contextlib import AsyncExitStack
from http import HTTPStatus
from typing import Any, ClassVar, Final, Protocol, Self, TypeVar

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
    exchange = find_exchange(request.scope)
    if exchange is None:
        return await _while_connected_by_asgi(request, work)
    if exchange.has_left:
        work.close()
        raise ClientGone
    with _Leaving(exchange) as leaving:
        try:
            return await work
        except asyncio.CancelledError:
            if leaving.is_only_reason():
                raise ClientGone from None
            raise


async def _while_connected_by_asgi(request: Request, work: Coroutine[Any, Any, Result]) -> Result:
    """The same on any server: a task waits for the client to hang up."""
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


class Exchange(PartWriter, Protocol):
    """One request on the proxy's own server, whose body has come, and its connection.

    Under this name in the scope's extensions. ASGI alone would need a task that waits for the
    client to hang up.
    """

    EXTENSION: ClassVar[str] = "clairai.exchange"
    num_missing: int  # bytes of the body that have not come

    def take_body(self) -> bytes | None:
        """The whole body, once; None if a part of it has not come, or never will."""

    @property
    def has_left(self) -> bool:
        """True if the client has hung up."""

    def watch(self, on_leave: Callable[[], None] | None) -> None:
        """Call this, in place of what was given before, when the client hangs up."""


def find_exchange(scope: Scope) -> Exchange | None:
    """None if the server is another, or the request is not plain or has not come to its end."""
    exchange: Exchange | None = scope.get("extensions", {}).get(Exchange.EXTENSION)
    return None if exchange is None or exchange.num_missing else exchange


class _Leaving:
    """Cancels the task that answers a client when it hangs up; `cancel` is for other reasons."""

    def __init__(self, exchange: Exchange) -> None:
        self._exchange = exchange
        self._task: asyncio.Task[Any] | None = None
        self._is_cancelled = False

    def __enter__(self) -> Self:
        self._task = asyncio.current_task()
        self._exchange.watch(self.cancel)
        return self

    def __exit__(self, *_: object) -> None:
        self._exchange.watch(None)
        if self._is_cancelled and self._task is not None:
            self._task.uncancel()

    def cancel(self) -> None:
        if self._task is not None and not self._is_cancelled:
            self._is_cancelled = True
            self._task.cancel()

    def is_only_reason(self) -> bool:
        """True if nobody else has cancelled the task."""
        return self._is_cancelled and self._task is not None and self._task.cancelling() == 1


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
        exchange = find_exchange(scope)
        async with self._closing:
            try:
                if exchange is None:
                    await self._send_by_asgi(scope, receive, send)
                elif not exchange.has_left:
                    await self._send_to(exchange, send)
            finally:
                await self._parts.aclose()

    async def _send_to(self, exchange: Exchange, send: Send) -> None:
        with _Leaving(exchange) as leaving:
            watching = _StallTimer(self._is_stalled, self._stall_s / 4, leaving.cancel)
            try:
                await self._send_parts(send, None if self._has_length else exchange)
            except asyncio.CancelledError:
                if not leaving.is_only_reason():
                    raise
            finally:
                watching.stop()

    async def _send_by_asgi(self, scope: Scope, receive: Receive, send: Send) -> None:
        """The same on any server, with a task for each thing to wait for."""
        writer: PartWriter | None = scope.get("extensions", {}).get(PartWriter.EXTENSION)
        parts = self._send_parts(send, None if self._has_length else writer)
        ends = (_wait_for_disconnect(receive), self._wait_for_stall())
        sending, *waiting = map(asyncio.ensure_future, (parts, *ends))
        try:
            await asyncio.wait((sending, *waiting), return_when=asyncio.FIRST_COMPLETED)
            if sending.done():
                sending.result()
        finally:
            await _cancel(sending, *waiting)

    @property
    def _has_length(self) -> bool:
        """True if parts have to pass all layers, which count them."""
        return "content-length" in self.headers

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

    def _is_stalled(self) -> bool:
        """True if one part has waited too long; a timer for each part would cost too much."""
        since_s = self._sending_since_s
        return since_s is not None and time.monotonic() - since_s > self._stall_s

    async def _wait_for_stall(self) -> None:
        while True:
            await asyncio.sleep(self._stall_s / 4)
            if self._is_stalled():
                return


class _StallTimer:
    """Calls `act` when `is_stalled`, which it asks from time to time."""

    def __init__(
        self, is_stalled: Callable[[], bool], pause_s: float, act: Callable[[], None]
    ) -> None:
        self._is_stalled, self._pause_s, self._act = is_stalled, pause_s, act
        self._start()

    def _start(self) -> None:
        self._timer = asyncio.get_running_loop().call_later(self._pause_s, self._look)

    def _look(self) -> None:
        if self._is_stalled():
            self._act()
        else:
            self._start()

    def stop(self) -> None:
        self._timer.cancel()


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
