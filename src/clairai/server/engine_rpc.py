"""Calls from the API server into the engine, and what all routes share: bodies and refusals.

Runs in: the API server. The engine is reached only by `collective_rpc`, as vLLM's own routes do it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from http import HTTPStatus
from typing import Any, Final, Literal, TypeVar

import msgspec
from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse

from clairai import errors
from clairai.errors import (
    CapacityError,
    CaptureOffError,
    ClairaiError,
    ConfigError,
    SteeringOffError,
    VectorCapacityError,
    WeightsBusyError,
    WeightsOffError,
    WeightsTornError,
)
from clairai.library.engine_control import read_reply
from clairai.server.core_cache import CoreCache
from clairai.server.weight_versions import WeightVersions
from clairai.wire.capture_messages import Captured, Captures, FindCaptures
from clairai.wire.control_messages import CONTROL_METHOD, Control
from clairai.wire.steering_messages import RefusalReason, WhyRefused

ReplyStruct = TypeVar("ReplyStruct", bound=msgspec.Struct)

Drain = Literal["wait", "abort"]

NO_TAPS: Final = (
    "this engine was started without clairai; start it with "
    """--additional-config '{"clairai": {...}}' and without CLAIRAI_DISABLE"""
)
ATTRIBUTE: Final = "clairai_engine"  # of the app's state
_ERROR_KINDS: Final = {
    kind.code: kind
    for kind in vars(errors).values()
    if isinstance(kind, type) and issubclass(kind, ClairaiError)
}
_CONFLICTS: Final = (
    CapacityError,
    VectorCapacityError,
    SteeringOffError,
    CaptureOffError,
    WeightsBusyError,
    WeightsOffError,
)


class RouteRefusal(Exception):
    """Ends a request with this status and reason."""

    def __init__(self, status: HTTPStatus, code: str, message: str) -> None:
        super().__init__(message)
        self.status, self.code, self.message = status, code, message


class EngineRpc:
    """All calls of this API server to its engine; the caches see every reply."""

    def __init__(self, client: Any, *, is_shared: bool, accepts_weights: bool = False) -> None:
        """`is_shared`: other API servers call the same engine."""
        self._client = client
        # PUT reads and then changes: one at a time, so that what it read still holds.
        self.changing = asyncio.Lock()
        self.core_cache = CoreCache(self.ask, is_shared=is_shared)
        self.weight_versions = WeightVersions(
            self.ask, self.changing, accepts_weights=accepts_weights, is_shared=is_shared
        )

    async def ask(self, control: Control, kind: type[ReplyStruct]) -> ReplyStruct:
        message = msgspec.msgpack.encode(control)
        replies = await self._client.collective_rpc(CONTROL_METHOD, args=(message,))
        reply = read_reply(replies[0], kind)
        self.core_cache.note(reply)
        return reply

    async def pause(self, mode: Drain) -> None:
        """Return when no request runs and no block of the old weights is cached.

        New requests wait in the queue; `wait` lets the running ones end, `abort` ends them.
        """
        self.weight_versions.invalidate()
        await self._client.pause_generation(mode=mode, clear_cache=True)

    async def resume(self) -> None:
        await self._client.resume_generation()

    async def name_weights(self, version: str) -> None:
        """Responses name the weights: in our fields, and from 0.32 on in vLLM's own."""
        await self.weight_versions.after_change()
        if hasattr(self._client, "update_weight_version"):
            await self._client.update_weight_version(version)

    async def why_refused(self, stream: int) -> ClairaiError | None:
        """Why the core refused this request; None if it did not."""
        reply = await self.ask(WhyRefused(stream), RefusalReason)
        return _ERROR_KINDS.get(reply.code, ClairaiError)(reply.reason) if reply.reason else None

    async def captured(self, stream: int, *, is_ended: bool) -> Sequence[Captured]:
        """What the engine remembers of a request's captured rows, for each answer."""
        question = FindCaptures(streams=(stream,), is_ended=is_ended)
        return (await self.ask(question, Captures)).found[0]


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


def status_of(error: ClairaiError) -> HTTPStatus:
    if isinstance(error, WeightsTornError):
        return HTTPStatus.INTERNAL_SERVER_ERROR
    return HTTPStatus.CONFLICT if isinstance(error, _CONFLICTS) else HTTPStatus.BAD_REQUEST


async def on_error(_: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, ClairaiError)
    return error_response(error)


async def on_route_refusal(_: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, RouteRefusal)
    return refusal_response(error.status, error.code, error.message)


def error_response(error: ClairaiError) -> JSONResponse:
    return refusal_response(status_of(error), error.code, error.reason)


def refusal_response(status: HTTPStatus, code: str, message: str) -> JSONResponse:
    """OpenAI's shape, so that its SDKs show the message."""
    error = {"message": message, "type": "invalid_request_error", "param": None, "code": code}
    return JSONResponse({"error": error}, status)
