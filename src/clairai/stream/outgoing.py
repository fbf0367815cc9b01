"""Takes an answer in the making; gives it to the client, and stops work when the client goes."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Coroutine, Mapping
from contextlib import AsyncExitStack
from typing import Any, Final, TypeVar

from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Message, Receive, Scope, Send

EVENT_STREAM: Final = "text/event-stream"
Result = TypeVar("Result")


class ClientGone(Exception):
    """Nobody is left to answer."""


async def while_connected(request: Request, work: Coroutine[Any, Any, Result]) -> Result:
    """The result of `work`, which is cancelled if the client hangs up first."""
    working = asyncio.ensure_future(work)
    watching = asyncio.ensure_future(_until_gone(request.receive))
    try:
        await asyncio.wait({working, watching}, return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            raise ClientGone
        return working.result()
    finally:
        await _cancelled(working, watching)


class PartStream(Response):
    """Sends parts as they come; what `closing` holds is closed when the last one is sent, when the
    client is gone, or when it has taken nothing for `stall_s`.
    """

    def __init__(
        self,
        parts: AsyncGenerator[bytes, None],
        closing: AsyncExitStack,
        *,
        stall_s: float,
        status: int = 200,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(status_code=status, headers=headers)
        if headers is None or "content-length" not in headers:
            del self.headers["content-length"]
        self._parts = parts
        self._closing = closing
        self._stall_s = stall_s
        self._sending_since_s: float | None = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        del scope
        async with self._closing:
            pumping = asyncio.ensure_future(self._pump(send))
            ends = (_until_gone(receive), self._until_stalled())
            tasks = (pumping, *map(asyncio.ensure_future, ends))
            try:
                await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
                if pumping.done():
                    pumping.result()
            finally:
                await _cancelled(*tasks)
                await self._parts.aclose()

    async def _pump(self, send: Send) -> None:
        start: Message = {
            "type": "http.response.start",
            "status": self.status_code,
            "headers": self.raw_headers,
        }
        await send(start)
        async for part in self._parts:
            self._sending_since_s = time.monotonic()
            await send({"type": "http.response.body", "body": part, "more_body": True})
            self._sending_since_s = None
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _until_stalled(self) -> None:
        """Returns when one part has waited too long; a timer for each would cost more than it."""
        while True:
            await asyncio.sleep(self._stall_s / 4)
            since_s = self._sending_since_s
            if since_s is not None and time.monotonic() - since_s > self._stall_s:
                return


class EventStream(PartStream):
    """Events of a stream of tokens."""

    media_type = EVENT_STREAM

    def __init__(
        self,
        parts: AsyncGenerator[bytes, None],
        closing: AsyncExitStack,
        *,
        stall_s: float,
        status: int = 200,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(parts, closing, stall_s=stall_s, status=status, headers=headers)
        self.headers["Cache-Control"] = "no-cache"
        self.headers["X-Accel-Buffering"] = "no"  # nginx would collect tokens


async def _until_gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def _cancelled(*tasks: asyncio.Future[Any]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
