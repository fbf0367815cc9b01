"""Takes a completion request; gives the answer, scored if it asks for that, else upstream's own."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator
from contextlib import AsyncExitStack, aclosing
from http import HTTPStatus
from typing import Final, TypeVar

import aiohttp
from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from clairai.errors import RequestError
from clairai.proxy.completions.chunk import Chunk, read_chunk
from clairai.proxy.completions.completion_request import ScoredRequest, read_request
from clairai.proxy.completions.merger import Merger, StreamWriter, merge_frames
from clairai.proxy.completions.named_runs import NamedRun
from clairai.proxy.completions.request_scores import RequestScores
from clairai.proxy.completions.stream_writers import (
    NamedEvent,
    NamedEventWriter,
    OpenAIStreamWriter,
    make_event,
)
from clairai.proxy.proxy import Completion, Proxy
from clairai.proxy.relay import headers_of, is_event_stream, relay_within, whole, with_query
from clairai.proxy.request_guard import check_json_shape
from clairai.proxy.responses import EventStream, HttpRefusal, bad_request
from clairai.proxy.upstream import NotSteered, UpstreamGone, response_headers

# A body that takes longer to look through than a chunk may be late is looked through elsewhere.
_LARGE_BYTES: Final = 1 << 16
Item = TypeVar("Item")


async def complete(proxy: Proxy, http: HttpRequest, body: bytes, path: str) -> Response:
    """`path` is the same here and upstream."""
    async with AsyncExitStack() as stack:
        completion = stack.enter_context(proxy.completion(path))
        request = await _read(proxy, body)
        stack.enter_context(proxy.busy())
        if request is None:
            return await relay_within(stack.pop_all(), proxy, http, body, path, completion)
        await _check(proxy, request)
        sheet = completion.sheet = stack.enter_context(proxy.scoring(request))
        opened = proxy.upstream.ask(
            "POST",
            with_query(path, http),
            headers=headers_of(proxy, http, is_edited=True),
            body=request.body(sheet.stream),
        )
        if request.asked.is_named:
            proxy.runs.make_room()
        voices = _ScoredAnswer(proxy, request, completion, sheet)
        await voices.prepare()
        response = await stack.enter_async_context(opened)
        if response.status != HTTPStatus.OK:
            completion.failed(response.status)
            return await whole(proxy.upstream, response)
        if request.asked.is_named:
            return voices.named(response, stack)
        if is_event_stream(response):
            return voices.streamed(response, stack)
        return await voices.whole(response)


async def _read(proxy: Proxy, body: bytes) -> ScoredRequest | None:
    limits = proxy.settings.limits

    def look() -> ScoredRequest | None:
        check_json_shape(body, limits)
        return read_request(body, limits)

    try:
        return look() if len(body) <= _LARGE_BYTES else await asyncio.to_thread(look)
    except RequestError as error:
        raise bad_request(error, param="clairai") from None


async def _check(proxy: Proxy, request: ScoredRequest) -> None:
    """Refused if upstream cannot do what is asked."""
    await proxy.engine_info.check(request.asked.names)
    if request.is_steered or request.asked.stop:
        await proxy.engine_info.check_steering(is_steered=request.is_steered)
    if request.asked.is_captured:
        await proxy.engine_info.check_capture()


class _ScoredAnswer:
    """The three ways to answer one request."""

    def __init__(
        self, proxy: Proxy, request: ScoredRequest, completion: Completion, sheet: RequestScores
    ) -> None:
        self._proxy = proxy
        self._request = request
        self._completion = completion
        self._sheet = sheet

    async def prepare(self) -> None:
        """Whatever a voice needs is there before upstream begins."""
        asked = self._request.asked
        needs_texts = asked.prompt_scores or asked.is_named
        self._texts = await self._proxy.engine_info.texts() if needs_texts else None

    def streamed(self, response: aiohttp.ClientResponse, stack: AsyncExitStack) -> Response:
        voice = self._plain()
        return EventStream(
            self._frames(response, self._merger(voice)),
            stack.pop_all(),
            stall_s=self._proxy.settings.timeouts.stalled,
            headers=dict(response_headers(response.headers)),
        )

    async def whole(self, response: aiohttp.ClientResponse) -> Response:
        body = await self._proxy.upstream.whole(response)
        headers = dict(response_headers(response.headers))
        chunk = read_chunk(body, body)
        if chunk is None:
            return Response(body, response.status, headers)
        self._read_response(chunk)
        for choice in chunk.view.choices:
            self._sheet.read_choice(choice)
        await self._settled()
        self._completion.outcome = "done"
        made = self._plain().edited(chunk)
        return Response(body if made is None else made, response.status, headers)

    def _read_response(self, chunk: Chunk) -> None:
        try:
            self._sheet.read_response(chunk.view)
        except NotSteered as fault:
            raise HttpRefusal(HTTPStatus.BAD_GATEWAY, fault.message, code=fault.code) from None

    def named(self, response: aiohttp.ClientResponse, stack: AsyncExitStack) -> Response:
        run = self._proxy.runs.new()
        self._completion.run, run.stream = run.id, self._sheet.stream
        self._proxy.runs.start(run, self._events(run, response, stack.pop_all()))
        return self._proxy.runs.answer(run, after=0)

    async def _settled(self) -> None:
        """Returns when no row is missing, or when the time for that is over."""
        deadline_s = time.monotonic() + self._proxy.settings.timeouts.finish
        sheet = self._sheet
        while not all(map(sheet.is_complete, sheet.choices)):
            left_s = deadline_s - time.monotonic()
            sheet.changed.clear()
            try:
                async with asyncio.timeout(left_s):
                    await sheet.changed.wait()
            except TimeoutError:
                return

    async def _frames(
        self, response: aiohttp.ClientResponse, merger: Merger[bytes]
    ) -> AsyncGenerator[bytes, None]:
        try:
            async with aclosing(merge_frames(response.content, merger, self._sheet)) as parts:
                async for frames in parts:
                    self._completion.note_token()
                    self._note_end(merger)
                    yield b"".join(frames)
            self._completion.outcome = "done"
        except UpstreamGone as gone:
            self._note_death()
            yield gone.frame()

    async def _events(
        self, run: NamedRun, response: aiohttp.ClientResponse, stack: AsyncExitStack
    ) -> None:
        """Put the run's events into it, to its end."""
        assert self._texts is not None
        voice = NamedEventWriter(self._sheet, self._texts)
        async with stack:
            try:
                await self._put(
                    run, merge_frames(response.content, self._merger(voice), self._sheet)
                )
                self._completion.outcome = "error" if voice.has_failed else "done"
            except UpstreamGone as gone:
                self._note_death()
                run.add([make_event("error", **gone.told())])
            except asyncio.CancelledError:
                run.add(voice.cancelled())
                raise

    async def _put(self, run: NamedRun, parts: AsyncGenerator[list[NamedEvent], None]) -> None:
        async with aclosing(parts):
            async for events in parts:
                self._completion.note_token()
                await run.put(events)

    def _note_end(self, merger: Merger[bytes]) -> None:
        """Before it is sent: a client may leave as it has the end, and was served."""
        if merger.is_over:
            self._completion.outcome = "done"

    def _note_death(self) -> None:
        self._proxy.upstream.errors += 1
        self._completion.outcome = "error"

    def _plain(self) -> OpenAIStreamWriter:
        return OpenAIStreamWriter(
            self._sheet, keeps_token_ids=self._request.keeps_token_ids, texts=self._texts
        )

    def _merger(self, voice: StreamWriter[Item]) -> Merger[Item]:
        max_wait_s = self._proxy.settings.timeouts.finish
        return Merger(self._sheet, voice, max_wait_s=max_wait_s, clock=time.monotonic)
