"""Calls from the API server into the engine, and what all routes share: bodies and refusals.

Runs in: the API server. The engine is reached by `collective_rpc`, as vLLM's own routes do it.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import AsyncIterator, Coroutine, Mapping, Sequence
from http import HTTPStatus
from typing import Any, Final, Literal, TypeVar

import msgspec
from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse

from clairai.errors import (
    CaptureDownError,
    ClairaiError,
    ConfigError,
    EngineGoneError,
    make_error,
)
from clairai.library.engine_control import read_reply
from clairai.server.core_cache import CoreCache
from clairai.server.core_group import CoreGroup
from clairai.server.error_status import status_of
from clairai.server.weight_versions import WeightVersions
from clairai.wire.capture_messages import (
    Captured,
    Captures,
    CaptureState,
    DescribeCapture,
    FindCaptures,
)
from clairai.wire.control_messages import CONTROL_METHOD, Control, Describe, Description
from clairai.wire.steering_messages import RefusalReason, WhyRefused
from clairai.wire.weights_messages import WeightsControl

_log: Final = logging.getLogger(__name__)
ReplyStruct = TypeVar("ReplyStruct", bound=msgspec.Struct)

Drain = Literal["wait", "abort"]
# How long a call may take: it waits for the step that runs, which on a CPU may be a long one.
CALL_S: Final = 30.0
WEIGHTS_CALL_S: Final = 1800.0  # waits for unfinished requests, loads weights
ALIVE_S: Final = 5.0
CAPTURE_KNOWN_S: Final = 1.0  # how long an answer about the capture writer is believed

NO_TAPS: Final = (
    "this engine was started without clairai; start it with "
    """--additional-config '{"clairai": {...}}' and without CLAIRAI_DISABLE"""
)
ATTRIBUTE: Final = "clairai_engine"  # of the app's state


class RouteRefusal(Exception):
    """Ends a request with this status and reason."""

    def __init__(
        self,
        status: HTTPStatus,
        code: str,
        message: str,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status, self.code, self.message = status, code, message
        self.headers = dict(headers or {})


class EngineSilent(RouteRefusal):
    """The engine has not answered a call in time."""

    def __init__(self, limit_s: float) -> None:
        super().__init__(
            HTTPStatus.SERVICE_UNAVAILABLE,
            EngineGoneError.code,
            f"the engine has not answered a call within {limit_s:g} s; try again when GET /health "
            f"says it is ready",
        )


class EngineRpc:
    """All calls of this API server to its engine; the caches see every reply.

    Every call has a limit. While one is late, the next ones are refused at once: they would wait
    behind it.
    """

    def __init__(
        self,
        client: Any,
        *,
        is_shared: bool,
        accepts_weights: bool = False,
        cores: CoreGroup | None = None,
    ) -> None:
        """`is_shared`: other API servers call the same engine. `cores`: it has several of them."""
        self._client = client
        self._cores = cores
        self._late: asyncio.Future[Any] | None = None  # a call that took too long
        self._capture_failure, self._capture_asked_s = "", float("-inf")
        # PUT reads and then changes: one at a time, so that what it read still holds.
        self.changing = asyncio.Lock()
        self.core_cache = CoreCache(self.ask, is_shared=is_shared)
        self.weight_versions = WeightVersions(
            self.ask, self.changing, accepts_weights=accepts_weights, is_shared=is_shared
        )

    async def ask(
        self, control: Control, kind: type[ReplyStruct], *, limit_s: float | None = None
    ) -> ReplyStruct:
        """The reply; EngineSilent if there is none in time, ClairaiError if it is a refusal."""
        if limit_s is None:
            limit_s = WEIGHTS_CALL_S if isinstance(control, WeightsControl) else CALL_S
        reply = read_reply(await self._within(limit_s, self._call(control)), kind)
        self.core_cache.note(reply)
        return reply

    async def _call(self, control: Control) -> bytes:
        if self._cores is not None:
            return await self._cores.ask(control)
        message = msgspec.msgpack.encode(control)
        replies: list[bytes] = await self._client.collective_rpc(CONTROL_METHOD, args=(message,))
        return replies[0]

    @contextlib.asynccontextmanager
    async def alone(self) -> AsyncIterator[None]:
        """While no other API server changes the engine cores, if there are several."""
        if self._cores is None:
            yield
            return
        async with self._cores.lock():
            yield

    async def describe_cores(self) -> list[Description]:
        """Of each engine core, in the order of their numbers."""
        if self._cores is None:
            return [await self.ask(Describe(), Description)]
        asking = self._cores.ask_each(msgspec.msgpack.encode(Describe()))
        return [read_reply(one, Description) for one in await self._within(CALL_S, asking)]

    async def check_alive(self) -> None:
        """EngineSilent if an engine core does not answer; no worker is asked."""
        await self.ask(WhyRefused(0), RefusalReason, limit_s=ALIVE_S)

    async def _within(self, limit_s: float, work: Coroutine[Any, Any, Any]) -> Any:
        """The result of a call; a late one goes on, so that its end shows that all is well."""
        if self._late is not None and not self._late.done():
            work.close()
            raise EngineSilent(limit_s)
        call = asyncio.ensure_future(work)
        try:
            await asyncio.wait({call}, timeout=limit_s)
        except asyncio.CancelledError:
            call.cancel()
            raise
        if call.done():
            return call.result()
        self._late = call
        call.add_done_callback(_note_late_end)
        raise EngineSilent(limit_s)

    async def pause(self, mode: Drain) -> None:
        """Return when no request runs and no block of the old weights is cached.

        New requests wait in the queue; `wait` lets the running ones end, `abort` ends them.
        """
        self.weight_versions.invalidate()
        await self._within(
            WEIGHTS_CALL_S, self._client.pause_generation(mode=mode, clear_cache=True)
        )

    async def resume(self) -> None:
        await self._within(CALL_S, self._client.resume_generation())

    async def name_weights(self, version: str) -> None:
        """Responses name the weights: in our fields, and from 0.32 on in vLLM's own."""
        await self.weight_versions.after_change()
        if hasattr(self._client, "update_weight_version"):
            await self._within(CALL_S, self._client.update_weight_version(version))

    async def why_refused(self, stream: int) -> ClairaiError | None:
        """Why the core refused this request; None if it did not."""
        reply = await self.ask(WhyRefused(stream), RefusalReason, limit_s=ALIVE_S)
        return make_error(reply.code, reply.reason) if reply.reason else None

    async def check_capture(self) -> None:
        """CaptureDownError if nothing is captured now; the engine is asked once a second."""
        now_s = time.monotonic()
        if now_s >= self._capture_asked_s + CAPTURE_KNOWN_S:
            self._capture_failure = (await self.ask(DescribeCapture(), CaptureState)).failure
            self._capture_asked_s = now_s
        if self._capture_failure:
            raise CaptureDownError(
                f"{self._capture_failure}; ask without a capture, or again in a few seconds"
            )

    async def captured(self, stream: int, *, is_ended: bool) -> Sequence[Captured]:
        """What the engine remembers of a request's captured rows, for each answer."""
        question = FindCaptures(streams=(stream,), is_ended=is_ended)
        return (await self.ask(question, Captures)).found[0]


def _note_late_end(call: asyncio.Future[Any]) -> None:
    error = None if call.cancelled() else call.exception()
    _log.warning("a late call of the engine has ended%s", f": {error!r}" if error else "")


def find_engine(app: FastAPI) -> EngineRpc | None:
    engine = getattr(app.state, ATTRIBUTE, None)
    assert engine is None or isinstance(engine, EngineRpc)
    return engine


def require_engine(app: FastAPI) -> EngineRpc:
    engine = find_engine(app)
    if engine is None:
        raise RouteRefusal(HTTPStatus.NOT_FOUND, ConfigError.code, NO_TAPS)
    return engine


async def read_body(request: Request, limit: int, code: str, what: str) -> bytes:
    """The body; refused as soon as it is larger than `what` can be."""
    too_large = RouteRefusal(
        HTTPStatus.REQUEST_ENTITY_TOO_LARGE,
        code,
        f"the body is over {limit} bytes, the most {what} has",
    )
    if int(request.headers.get("content-length", "0")) > limit:
        raise too_large
    body = bytearray()
    async for chunk in request.stream():
        if len(body) + len(chunk) > limit:
            raise too_large
        body += chunk
    return bytes(body)


async def on_error(_: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, ClairaiError)
    return error_response(error)


async def on_route_refusal(_: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, RouteRefusal)
    return route_refusal_response(error)


def route_refusal_response(error: RouteRefusal) -> JSONResponse:
    response = refusal_response(error.status, error.code, error.message, error.headers)
    if error.status == HTTPStatus.SERVICE_UNAVAILABLE:
        response.headers["Retry-After"] = "2"
    return response


def error_response(error: ClairaiError) -> JSONResponse:
    return route_refusal_response(RouteRefusal(status_of(error), error.code, error.reason))


def refusal_response(
    status: HTTPStatus, code: str, message: str, headers: Mapping[str, str] | None = None
) -> JSONResponse:
    """OpenAI's shape, so that its SDKs show the message."""
    kind = "invalid_request_error" if status < HTTPStatus.INTERNAL_SERVER_ERROR else "server_error"
    error = {"message": message, "type": kind, "param": None, "code": code}
    return JSONResponse({"error": error}, status, headers)
