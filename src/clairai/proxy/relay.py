"""Takes a request that is none of ours to change; gives upstream's own answer, byte for byte."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import AsyncExitStack
from http import HTTPStatus

import aiohttp
from starlette.requests import Request
from starlette.responses import Response

from clairai.proxy.completions.merger import MAX_FRAME_BYTES
from clairai.proxy.completions.sse import DONE, FrameSplitter, FrameTooLong, frame_data
from clairai.proxy.proxy import Completion, Proxy
from clairai.proxy.responses import EVENT_STREAM, EventStream, PartStream
from clairai.proxy.upstream import Upstream, UpstreamGone, request_headers, response_headers


async def relay(proxy: Proxy, request: Request, body: bytes | None, path: str) -> Response:
    """`path` is upstream's; the query goes with it."""
    return await relay_within(AsyncExitStack(), proxy, request, body, path)


async def relay_parts(proxy: Proxy, request: Request, path: str) -> Response:
    """A file, of any size: passed on in parts, with the range that was asked for."""
    async with AsyncExitStack() as stack:
        opened = proxy.upstream.ask(
            request.method,
            with_query(path, request),
            headers=headers_of(proxy, request, is_edited=False),
        )
        response = await stack.enter_async_context(opened)
        if response.status >= HTTPStatus.BAD_REQUEST:
            return await whole(proxy.upstream, response)
        headers = dict(response_headers(response.headers))
        length = response.headers.get("content-length")
        return PartStream(
            _parts(proxy, response),
            stack.pop_all(),
            stall_s=proxy.settings.timeouts.stalled,
            status=response.status,
            headers=headers if length is None else {**headers, "content-length": length},
        )


async def relay_upload(proxy: Proxy, request: Request, path: str) -> Response:
    """A body of any size: passed on as it comes, and none of it is held here."""
    headers = headers_of(proxy, request, is_edited=False)
    asking = proxy.upstream.ask(request.method, path, headers=headers, body=_pieces(request))
    async with asking as response:
        return await whole(proxy.upstream, response)


async def _pieces(request: Request) -> AsyncGenerator[bytes, None]:
    async for piece in request.stream():
        if piece:  # an empty one would end the body
            yield piece


async def _parts(proxy: Proxy, response: aiohttp.ClientResponse) -> AsyncGenerator[bytes, None]:
    try:
        while raw := await response.content.readany():
            yield raw
    except (aiohttp.ClientError, OSError) as error:
        proxy.upstream.errors += 1
        raise UpstreamGone(type(error).__name__) from error


async def relay_within(
    held: AsyncExitStack,
    proxy: Proxy,
    request: Request,
    body: bytes | None,
    path: str,
    completion: Completion | None = None,
) -> Response:
    """The same; what is held is let go when the answer has ended."""
    completion = completion or Completion(path)  # one whose end nobody is told
    async with held as stack:
        response = await stack.enter_async_context(
            proxy.upstream.ask(
                request.method,
                with_query(path, request),
                headers=headers_of(proxy, request, is_edited=False),
                body=body,
            )
        )
        if not is_event_stream(response):
            answer = await whole(proxy.upstream, response)
            completion.answered(answer.status_code)
            return answer
        return EventStream(
            _passed_on(proxy, response, completion),
            stack.pop_all(),
            stall_s=proxy.settings.timeouts.stalled,
            status=response.status,
            headers=dict(response_headers(response.headers)),
        )


def with_query(path: str, request: Request) -> str:
    query = request.url.query
    return f"{path}?{query}" if query else path


def headers_of(proxy: Proxy, request: Request, *, is_edited: bool) -> list[tuple[str, str]]:
    has_own_key = proxy.settings.api_key is not None
    return request_headers(request.headers.items(), has_own_key=has_own_key, is_edited=is_edited)


def is_event_stream(response: aiohttp.ClientResponse) -> bool:
    return response.content_type == EVENT_STREAM


async def whole(upstream: Upstream, response: aiohttp.ClientResponse) -> Response:
    """An answer that is not streamed; read to its end first, so that it is whole or an error."""
    body = await upstream.whole(response)
    return Response(body, response.status, dict(response_headers(response.headers)))


async def _passed_on(
    proxy: Proxy, response: aiohttp.ClientResponse, completion: Completion
) -> AsyncGenerator[bytes, None]:
    """Only whole frames, so that an error can follow one; together they are what came."""
    splitter = FrameSplitter(MAX_FRAME_BYTES)
    try:
        while raw := await response.content.readany():
            completion.note_token()
            if frames := splitter.feed(raw):
                _note_end(completion, response, frames)
                yield b"".join(frames)
        if splitter.rest:
            yield splitter.rest
        completion.answered(response.status)
    except (aiohttp.ClientError, FrameTooLong, OSError):
        proxy.upstream.errors += 1
        completion.failed(response.status)
        yield UpstreamGone.frame()


def _note_end(
    completion: Completion, response: aiohttp.ClientResponse, frames: list[bytes]
) -> None:
    """Before it is sent: a client may leave as it has the end, and was served."""
    if frame_data(frames[-1]) == DONE:
        completion.answered(response.status)
