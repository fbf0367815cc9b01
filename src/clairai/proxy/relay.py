"""Passes requests on to upstream and its answers back, byte for byte."""

from __future__ import annotations

import secrets
from collections.abc import AsyncGenerator
from contextlib import AsyncExitStack
from http import HTTPStatus
from typing import Final

import aiohttp
from starlette.requests import Request
from starlette.responses import Response

from clairai.proxy.body_reader import timed_parts
from clairai.proxy.caller import Caller
from clairai.proxy.completions.error_frames import write_error_frame
from clairai.proxy.completions.merger import MAX_FRAME_BYTES
from clairai.proxy.completions.sse import DONE, FrameSplitter, FrameTooLong, frame_data
from clairai.proxy.error_reasons import explain, explain_frame
from clairai.proxy.host_paths import hide_paths
from clairai.proxy.proxy import Completion, Proxy
from clairai.proxy.responses import (
    EVENT_STREAM,
    EventStream,
    HttpRefusal,
    PartStream,
    PartWriter,
)
from clairai.proxy.upstream import Upstream, UpstreamGone, request_headers, response_headers
from clairai.proxy.upstream_connection import BufferedResponse, UpstreamResponse
from clairai.wire.capture_messages import OWNER_HEADER

_WEIGHTS: Final = "/v1/weights"
_DATA, _FRAME_END = b"data: {", b"\n\n"
_ERROR: Final = b'"error"'
# The first chunk of a chat, which vLLM sends when it has read the request.
_ROLE: Final = b'"delta":{"role":'


async def relay(proxy: Proxy, request: Request, body: bytes | None, path: str) -> Response:
    """Pass a request on; `path` is upstream's, and the query goes with it."""
    return await relay_completion(AsyncExitStack(), proxy, request, body, path)


async def relay_parts(proxy: Proxy, request: Request, path: str) -> Response:
    """Pass on a file of any size in parts, or the range of it that is asked for."""
    async with AsyncExitStack() as stack:
        asking = proxy.upstream.ask(
            request.method,
            with_query(path, request),
            headers=forwarded_headers(proxy, request, is_edited=False),
        )
        response = await stack.enter_async_context(asking)
        if response.status >= HTTPStatus.BAD_REQUEST:
            return await read_whole(proxy.upstream, response)
        headers = dict(response_headers(response.headers))
        length = response.headers.get("content-length")
        return PartStream(
            _download_parts(proxy, response),
            stack.pop_all(),
            stall_s=proxy.settings.timeouts.stalled,
            status=response.status,
            headers=headers if length is None else {**headers, "content-length": length},
        )


async def relay_upload(proxy: Proxy, request: Request, path: str) -> Response:
    """Pass on a body of any size as it comes; none of it is held here."""
    upload = _Upload(proxy, request)
    headers = forwarded_headers(proxy, request, is_edited=False)
    try:
        async with proxy.upstream.ask(
            request.method,
            path,
            headers=headers,
            body=upload.parts(),
            silence_s=proxy.settings.timeouts.weights,
        ) as response:
            return await read_whole(proxy.upstream, response)
    except UpstreamGone:
        if upload.refusal is not None:  # the client is too slow; upstream is well
            raise upload.refusal from None
        raise


class _Upload:
    """The parts of a body, and why there are no more of them."""

    def __init__(self, proxy: Proxy, request: Request) -> None:
        self._proxy = proxy
        self._request = request
        self.refusal: HttpRefusal | None = None

    async def parts(self) -> AsyncGenerator[bytes, None]:
        try:
            async for part in timed_parts(self._request, self._proxy.settings):
                if part:  # an empty one would end the body
                    yield part
        except HttpRefusal as refusal:
            self.refusal = refusal
            raise


async def _download_parts(proxy: Proxy, response: UpstreamResponse) -> AsyncGenerator[bytes, None]:
    try:
        while raw := await response.content.readany():
            yield raw
    except (aiohttp.ClientError, OSError) as error:
        proxy.upstream.num_errors += 1
        raise UpstreamGone(type(error).__name__) from error


async def relay_completion(
    closing: AsyncExitStack,
    proxy: Proxy,
    request: Request,
    body: bytes | None,
    path: str,
    completion: Completion | None = None,
) -> Response:
    """As `relay`; `closing` is closed when the answer has ended."""
    timeouts = proxy.settings.timeouts
    silence_s = timeouts.control if completion is None else timeouts.completion
    if path.startswith(_WEIGHTS):
        silence_s = timeouts.weights
    completion = completion or Completion(path)  # one that nobody observes
    async with closing as stack:
        headers = forwarded_headers(proxy, request, is_edited=False)
        response = await stack.enter_async_context(
            proxy.upstream.ask(
                request.method,
                with_query(path, request),
                headers=headers,
                body=body,
                silence_s=silence_s,
            )
        )
        if not is_event_stream(response):
            answer = await read_whole(proxy.upstream, response, dict(headers)["X-Request-Id"])
            completion.set_answered(answer.status_code)
            return answer
        stream = _RelayedStream(proxy, response, completion)
        return EventStream(
            stream.frames(),
            stack.pop_all(),
            stall_s=proxy.settings.timeouts.stalled,
            status=response.status,
            headers=dict(response_headers(response.headers)),
            on_start=stream.write_tokens_at_once,
        )


def with_query(path: str, request: Request) -> str:
    query = request.scope["query_string"].decode("latin-1")
    return f"{path}?{query}" if query else path


def forwarded_headers(proxy: Proxy, request: Request, *, is_edited: bool) -> list[tuple[str, str]]:
    """The client's headers, a request id that nobody can guess, and whose captures may be shown."""
    has_own_key = bool(proxy.settings.access_keys)
    kept = request_headers(request.headers.items(), has_own_key=has_own_key, is_edited=is_edited)
    caller: Caller = request.state.caller
    is_owner = caller.name is not None and not caller.is_admin
    owner = [(OWNER_HEADER, caller.name or "")] if is_owner else []
    return [*kept, ("X-Request-Id", secrets.token_hex(16)), *owner]


def is_event_stream(response: UpstreamResponse) -> bool:
    return response.content_type == EVENT_STREAM


async def read_whole(
    upstream: Upstream, response: UpstreamResponse, request_id: str | None = None
) -> Response:
    """A response that is not streamed; read to its end first, so that it is whole or an error.

    An error has a reason. `request_id` is vLLM's id of the request.
    """
    body = await upstream.read_body(response)
    if response.status >= HTTPStatus.BAD_REQUEST:
        body = explain(body, response.status, request_id)
    if response.status >= HTTPStatus.INTERNAL_SERVER_ERROR:
        body = hide_paths(body)  # it may quote an exception
    return Response(body, response.status, dict(response_headers(response.headers)))


class _RelayedStream:
    """Upstream's bytes in whole frames, so that an error can follow one."""

    def __init__(self, proxy: Proxy, response: UpstreamResponse, completion: Completion) -> None:
        self._proxy, self._response, self._completion = proxy, response, completion
        self._splitter = FrameSplitter(MAX_FRAME_BYTES)
        self._has_token = False
        self._num_frames = 0  # as far as they passed the task that reads the answer

    def write_tokens_at_once(self, writer: PartWriter) -> None:
        """Pass on frames as they arrive, without waking the task that reads the answer.

        The end, errors and parts of frames are left to that task, in order.
        """
        if not isinstance(self._response, BufferedResponse):
            return

        def take(part: bytes) -> bool:
            is_whole = part.startswith(_DATA) and part.endswith(_FRAME_END)
            if not is_whole or _is_unusual(part) or self._splitter.rest or not writer.is_ready:
                return False
            self._note_token(part)
            writer.write_now(part)
            return True

        self._response.set_sink(take)

    async def frames(self) -> AsyncGenerator[bytes, None]:
        completion, splitter = self._completion, self._splitter
        try:
            while raw := await self._response.content.readany():
                if frames := splitter.feed(raw):
                    self._num_frames += len(frames)
                    self._note_token(b"".join(frames))
                    self._note_end(frames[-1])
                    yield b"".join(map(explain_frame, frames))
            if splitter.rest:
                yield splitter.rest
            completion.set_answered(self._response.status)
        except (aiohttp.ClientError, FrameTooLong, OSError):
            self._proxy.upstream.num_errors += 1
            completion.set_failed(self._response.status)
            yield write_error_frame(
                completion.route, UpstreamGone.code, UpstreamGone.message, number=self._num_frames
            )

    def _note_token(self, frames: bytes) -> None:
        """Note the first of these that is not a chunk with a role, which comes before tokens."""
        if not self._has_token and frames.count(_ROLE) < frames.count(_FRAME_END):
            self._has_token = True
            self._completion.note_token()

    def _note_end(self, frame: bytes) -> None:
        """Note the last frame before it is sent: the client may leave when it has it."""
        if frame_data(frame) == DONE:
            self._completion.set_answered(self._response.status)


def _is_unusual(part: bytes) -> bool:
    """True if frames may hold more than chunks: an error that needs a reason, or the end."""
    return _ERROR in part or DONE in part
