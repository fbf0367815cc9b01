"""Answers a completion request: with scores if it asks for them, else as upstream answers it.

Runs in: the proxy, on the event loop.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator
from contextlib import AsyncExitStack, aclosing
from dataclasses import dataclass
from http import HTTPStatus
from typing import Final, TypeVar

from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from clairai.errors import RequestError
from clairai.fields.request_fields import FRESH_STREAM_HEADER
from clairai.proxy.caller import Caller
from clairai.proxy.completions.chunk import read_chunk
from clairai.proxy.completions.completion_request import (
    COMPLETION,
    RESPONSE,
    SCORES_HEADER,
    ClairaiOptions,
    RequestKind,
    ScoredRequest,
    make_quiet_request,
    read_request,
    read_scores_header,
)
from clairai.proxy.completions.kept_scores import KeptAnswer
from clairai.proxy.completions.merger import Merger, StreamWriter, merge_frames
from clairai.proxy.completions.named_runs import NamedRun
from clairai.proxy.completions.request_scores import RequestScores
from clairai.proxy.completions.response_answer import (
    NoTokenIds,
    ResponseAnswer,
    ResponseStream,
    read_frames,
)
from clairai.proxy.completions.stream_writers import (
    NamedEventWriter,
    OpenAIStreamWriter,
    QuietStreamWriter,
    make_event,
)
from clairai.proxy.proxy import Completion, Proxy
from clairai.proxy.relay import (
    forwarded_headers,
    is_event_stream,
    read_whole,
    relay_completion,
    with_query,
)
from clairai.proxy.responses import EventStream, HttpRefusal, PartWriter, bad_request
from clairai.proxy.upstream import NotSteered, UpstreamGone, response_headers
from clairai.proxy.upstream_connection import BufferedResponse, ResponseContent, UpstreamResponse

Item = TypeVar("Item")
RESPONSES: Final = "/v1/responses"
UNSCORED_HEADER: Final = "X-Clairai-Unscored"


async def complete(
    proxy: Proxy, http: HttpRequest, caller: Caller, body: bytes, path: str
) -> Response:
    """`path` is the same here and upstream."""
    async with AsyncExitStack() as stack:
        named = proxy.observe_completion(
            path, key=caller.name, request_id=http.headers.get("x-request-id")
        )
        completion = stack.enter_context(named)
        kind = RESPONSE if path == RESPONSES else COMPLETION
        request = await _read_request(proxy, http, body, kind)
        stack.enter_context(proxy.reserve_place())
        if isinstance(request, _Unscored):
            answer = await relay_completion(stack.pop_all(), proxy, http, body, path, completion)
            return request.explain(answer)
        _check_rights(caller, request)
        await _check_engine(proxy, request)
        scores = completion.scores = stack.enter_context(proxy.open_scores(request))
        kept = proxy.kept_scores.open(scores, caller.name)
        stack.callback(lambda: kept.end(completion.outcome))
        headers = [*forwarded_headers(proxy, http, is_edited=True), (FRESH_STREAM_HEADER, "1")]
        asking = proxy.upstream.ask(
            "POST",
            with_query(path, http),
            headers=headers,
            body=await proxy.large_bodies.run(
                body, lambda: request.body(scores.stream, caller.name)
            ),
            silence_s=proxy.settings.timeouts.completion,
        )
        if request.options.is_named:
            proxy.runs.make_room()
        scored = _ScoredAnswer(proxy, request, completion, scores, kept, caller)
        await scored.load_texts()  # before upstream begins
        response = await stack.enter_async_context(asking)
        if response.status != HTTPStatus.OK:
            completion.set_failed(response.status)
            return await read_whole(proxy.upstream, response, dict(headers)["X-Request-Id"])
        if request.options.is_named:
            return scored.as_named_run(response, stack)
        if is_event_stream(response):
            return scored.as_stream(response, stack)
        return await scored.as_whole(response)


async def complete_elsewhere(
    proxy: Proxy, http: HttpRequest, caller: Caller, body: bytes, path: str
) -> Response:
    """A request to a route of vLLM's that has no scores; its answer may take as long."""
    async with AsyncExitStack() as stack:
        named = proxy.observe_completion(
            path, key=caller.name, request_id=http.headers.get("x-request-id")
        )
        completion = stack.enter_context(named)
        stack.enter_context(proxy.reserve_place())
        return await relay_completion(stack.pop_all(), proxy, http, body, path, completion)


@dataclass(frozen=True)
class _Unscored:
    """A request that goes upstream byte for byte; `reason` if it should have been scored."""

    reason: str | None = None

    def explain(self, answer: Response) -> Response:
        if self.reason is not None:
            answer.headers[UNSCORED_HEADER] = self.reason.encode("ascii", "replace").decode()
        return answer


async def _read_request(
    proxy: Proxy, http: HttpRequest, body: bytes, kind: RequestKind
) -> ScoredRequest | _Unscored:
    limits, header = proxy.settings.limits, http.headers.get(SCORES_HEADER)
    try:
        asked = read_scores_header(header)
        request = await proxy.large_bodies.run(body, lambda: read_request(body, limits, kind))
        if request is not None:
            return request
        if asked is not None:
            return await _make_quiet_request(proxy, body, asked, kind)
    except RequestError as error:
        param = "clairai" if header is None else SCORES_HEADER
        raise bad_request(error, param=param) from None
    if header is not None or not proxy.settings.score_all:
        return _Unscored()
    try:
        return await _make_quiet_request(proxy, body, ClairaiOptions(), kind)
    except RequestError as error:  # the client did not ask for scores: it gets its answer
        return _Unscored(error.reason)


async def _make_quiet_request(
    proxy: Proxy, body: bytes, options: ClairaiOptions, kind: RequestKind
) -> ScoredRequest:
    limits = proxy.settings.limits
    return await proxy.large_bodies.run(
        body, lambda: make_quiet_request(body, options, limits, kind)
    )


def _check_rights(caller: Caller, request: ScoredRequest) -> None:
    """HttpRefusal if the caller's key has not the rights that the fields need."""
    if request.is_steered:
        caller.require("steer")
    if request.options.is_captured:
        caller.require("capture")


async def _check_engine(proxy: Proxy, request: ScoredRequest) -> None:
    """HttpRefusal if the engine cannot do what is asked."""
    await proxy.engine_facts.check_probes(request.options.names)
    if request.is_steered or request.options.has_rules:
        await proxy.engine_facts.check_steering(is_steered=request.is_steered)
    if request.options.is_captured:
        await proxy.engine_facts.check_capture()


def _write_tokens_at_once(
    response: UpstreamResponse, merger: Merger[bytes], writer: PartWriter, completion: Completion
) -> None:
    """Write ordinary tokens as they arrive, without waking the task that reads the answer.

    That takes half of the time. Everything else is left to that task, in order.
    """
    if not isinstance(response, BufferedResponse):
        return

    def take(part: bytes) -> bool:
        written = merger.take_token(part) if writer.is_ready else None
        if written is None:
            return False
        completion.note_token()
        for frame in written:
            writer.write_now(frame)
        return True

    response.set_sink(take)


class _ScoredAnswer:
    """The answer to one scored request, in one of three forms."""

    def __init__(
        self,
        proxy: Proxy,
        request: ScoredRequest,
        completion: Completion,
        scores: RequestScores,
        kept: KeptAnswer,
        caller: Caller,
    ) -> None:
        self._proxy = proxy
        # Not the request: its body may be megabytes, and the answer may take minutes.
        self._options = request.options.without_vectors()
        self._keeps_token_ids = request.keeps_token_ids
        self._kind = request.kind
        self._completion = completion
        self._shows_scores = request.shows_scores
        self._scores = scores
        self._kept = kept
        self._caller = caller

    async def load_texts(self) -> None:
        options = self._options
        needs_texts = options.prompt_scores or options.is_named
        self._texts = await self._proxy.engine_facts.token_texts() if needs_texts else None

    def as_stream(self, response: UpstreamResponse, stack: AsyncExitStack) -> Response:
        is_chat = self._kind is not RESPONSE
        merger = self._merger(self._openai_writer()) if is_chat else None

        def start(writer: PartWriter) -> None:
            if merger is not None:
                _write_tokens_at_once(response, merger, writer, self._completion)

        return EventStream(
            self._response_frames(response) if merger is None else self._frames(response, merger),
            stack.pop_all(),
            stall_s=self._proxy.settings.timeouts.stalled,
            headers=dict(response_headers(response.headers)),
            on_start=start,
        )

    def as_named_run(self, response: UpstreamResponse, stack: AsyncExitStack) -> Response:
        run = self._proxy.runs.new(self._caller.name)
        self._completion.run, run.stream = run.id, self._scores.stream
        self._proxy.runs.start(run, self._put_events(run, response, stack.pop_all()))
        return self._proxy.runs.respond(run, after=0)

    async def as_whole(self, response: UpstreamResponse) -> Response:
        body = await self._proxy.upstream.read_body(response)
        headers = dict(response_headers(response.headers))
        if self._kind is RESPONSE:
            return Response(await self._score_response(body), response.status, headers)
        chunk = read_chunk(body, body)
        if chunk is None:
            self._completion.set_answered(response.status)
            return Response(body, response.status, headers)
        try:
            self._scores.read_response(chunk.view)
        except NotSteered as error:
            raise HttpRefusal(HTTPStatus.BAD_GATEWAY, error.message, code=error.code) from None
        for choice in chunk.view.choices:
            self._scores.read_choice(choice)
        await self._wait_for_rows()
        self._completion.outcome = "done"
        edited = self._openai_writer().edit(chunk)
        return Response(body if edited is None else edited, response.status, headers)

    async def _wait_for_rows(self) -> None:
        """Return when no row is missing, or when the time for that is over."""
        deadline_s = time.monotonic() + self._proxy.settings.timeouts.finish
        scores = self._scores
        while not all(map(scores.is_complete, scores.choices)):
            left_s = deadline_s - time.monotonic()
            scores.changed.clear()
            scores.hurry()
            try:
                async with asyncio.timeout(left_s):
                    await scores.changed.wait()
            except TimeoutError:
                return

    async def _score_response(self, body: bytes) -> bytes:
        answer = ResponseAnswer(self._scores, self._openai_writer())
        try:
            answer.read(body)
        except (NotSteered, NoTokenIds) as error:
            raise HttpRefusal(HTTPStatus.BAD_GATEWAY, error.message, code=error.code) from None
        await self._wait_for_rows()
        self._completion.outcome = "done"
        return answer.write(body)

    async def _response_frames(self, response: UpstreamResponse) -> AsyncGenerator[bytes, None]:
        """Upstream's events as they come; the last one waits for rows, and has the scores."""
        stream = ResponseStream(self._scores, self._openai_writer())
        try:
            async with aclosing(read_frames(response.content)) as frames:
                async for frame in frames:
                    self._completion.note_token()
                    yield (
                        await self._end_response(stream, frame) if stream.is_last(frame) else frame
                    )
            if self._completion.outcome != "done":
                raise UpstreamGone
        except UpstreamGone as gone:
            self._note_upstream_error()
            yield stream.write_error(gone)

    async def _end_response(self, stream: ResponseStream, frame: bytes) -> bytes:
        await self._wait_for_rows()
        written = stream.write_last(frame)
        self._completion.outcome = "done"
        self._kept.end("done")
        return written

    async def _frames(
        self, response: UpstreamResponse, merger: Merger[bytes]
    ) -> AsyncGenerator[bytes, None]:
        try:
            async with aclosing(merge_frames(response.content, merger)) as parts:
                async for frames in parts:
                    self._note_frames(merger)
                    yield b"".join(frames)
            self._completion.outcome = "done"
        except UpstreamGone as gone:
            self._note_upstream_error()
            yield gone.frame()

    async def _put_events(
        self, run: NamedRun, response: UpstreamResponse, stack: AsyncExitStack
    ) -> None:
        """Put the events of the run into it, until its end."""
        assert self._texts is not None
        writer = NamedEventWriter(self._scores, self._texts)
        async with stack:
            try:
                await self._put_all(run, response.content, writer)
                self._completion.outcome = "error" if writer.has_failed else "done"
            except UpstreamGone as gone:
                self._note_upstream_error()
                run.add([make_event("error", gone.error_body())])
            except asyncio.CancelledError:
                run.add(writer.write_cancelled())
                raise

    async def _put_all(
        self, run: NamedRun, content: ResponseContent, writer: NamedEventWriter
    ) -> None:
        merger = self._merger(writer)
        async with aclosing(merge_frames(content, merger)) as parts:
            async for events in parts:
                self._note_first_token()
                if merger.is_done:
                    self._kept.end("error" if writer.has_failed else "done")
                await run.put(events)

    def _note_first_token(self) -> None:
        if self._scores.num_tokens:  # not by the chunk with the role, which comes before
            self._completion.note_token()

    def _note_frames(self, merger: Merger[bytes]) -> None:
        self._note_first_token()
        if merger.is_done:  # noted before it is sent: the client may leave when it has the end
            self._completion.outcome = "done"
            self._kept.end("done")

    def _note_upstream_error(self) -> None:
        self._proxy.upstream.num_errors += 1
        self._completion.outcome = "error"

    def _openai_writer(self) -> OpenAIStreamWriter:
        kind = OpenAIStreamWriter if self._shows_scores else QuietStreamWriter
        return kind(self._scores, keeps_token_ids=self._keeps_token_ids, texts=self._texts)

    def _merger(self, writer: StreamWriter[Item]) -> Merger[Item]:
        max_wait_s = self._proxy.settings.timeouts.finish
        return Merger(self._scores, writer, max_wait_s=max_wait_s, clock=time.monotonic)
