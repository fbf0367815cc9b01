"""Reads the bodies of requests: bounded in size, in time, in number and by client.

Runs in: the proxy, on the event loop.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from http import HTTPStatus

from starlette.requests import Request

from clairai.proxy.proxy_settings import ProxySettings
from clairai.proxy.responses import HttpRefusal, find_exchange


async def read_body(
    request: Request, *, limit: int, settings: ProxySettings, take: Callable[[int], None]
) -> bytes:
    """The whole body; HttpRefusal as soon as it is too large or too late, or if `take` refuses."""
    declared = declared_length(request)
    too_large = HttpRefusal(
        HTTPStatus.REQUEST_ENTITY_TOO_LARGE, f"the body may have {limit} bytes; send less"
    )
    if declared is not None and declared > limit:
        raise too_large
    exchange = find_exchange(request.scope)
    whole = None if exchange is None else exchange.take_body()
    if whole is not None:
        if len(whole) > limit:
            raise too_large
        take(len(whole))
        return whole
    body = bytearray()
    async for part in timed_parts(request, settings):
        if len(body) + len(part) > limit:
            raise too_large
        take(len(part))
        body += part
    return bytes(body)


async def timed_parts(request: Request, settings: ProxySettings) -> AsyncGenerator[bytes, None]:
    """The body in parts, as they come; HttpRefusal if they come too slowly."""
    parts, rate = request.stream(), settings.limits.body_rate
    loop = asyncio.get_running_loop()
    deadline_s = loop.time() + settings.timeouts.body
    while True:
        try:
            async with asyncio.timeout_at(deadline_s):
                part = await _next(parts)
        except TimeoutError:
            raise HttpRefusal(
                HTTPStatus.REQUEST_TIMEOUT, f"a body has to come at {rate} bytes a second"
            ) from None
        if part is None:
            return
        # What comes early gives no more time than a body has to begin with.
        latest_s = loop.time() + settings.timeouts.body
        deadline_s = min(deadline_s + len(part) / rate, latest_s)
        yield part


async def _next(parts: AsyncIterator[bytes]) -> bytes | None:
    return await anext(parts, None)


def declared_length(request: Request) -> int | None:
    """What Content-Length says; HttpRefusal for a number that no body has."""
    declared = request.headers.get("content-length")
    if declared is None:
        return None
    if not declared.isascii() or not declared.isdecimal() or len(declared) > 18:
        raise HttpRefusal(HTTPStatus.BAD_REQUEST, "Content-Length is no whole number")
    return int(declared)
