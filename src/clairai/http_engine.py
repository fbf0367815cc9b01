"""What the routes on vLLM's API server share: the way to the engine, bounded bodies, refusals.

Takes a FastAPI request; gives its engine, its body, or an answer in OpenAI's shape that says no.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from http import HTTPStatus
from typing import Any, Final, Literal, TypeVar

import msgspec
from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse

from clairai import errors, wire, wire_capture, wire_steer
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
from clairai.offline import METHOD, read_reply
from clairai.serve.editions import Editions
from clairai.serve.mirror import Mirror
from clairai.wire_capture import Captured

Reply = TypeVar("Reply", bound=msgspec.Struct)

Drain = Literal["wait", "abort"]

NO_TAPS: Final = (
    "this engine was started without clairai; start it with "
    """--additional-config '{"clairai": {...}}' and without CLAIRAI_DISABLE"""
)
ATTRIBUTE: Final = "clairai_engine"  # of the app's state
_KINDS: Final = {
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


class Unanswered(Exception):
    """A request that ends in this status, and why."""

    def __init__(self, status: HTTPStatus, code: str, message: str) -> None:
        super().__init__(message)
        self.status, self.code, self.message = status, code, message


class Engine:
    """The one way from here to the engine; `mirror` sees every answer."""

    def __init__(self, client: Any, *, is_shared: bool, is_taking: bool = False) -> None:
        """`is_shared`: through other servers too; `is_taking`: weights."""
        self._client = client
        # PUT looks and then changes: one at a time, so that what it saw still holds.
        self.changing = asyncio.Lock()
        self.mirror = Mirror(self.ask, is_shared=is_shared)
        self.editions = Editions(self.ask, self.changing, is_taking=is_taking, is_shared=is_shared)

    async def ask(self, control: wire.Control, kind: type[Reply]) -> Reply:
        message = msgspec.msgpack.encode(control)
        replies = await self._client.collective_rpc(METHOD, args=(message,))
        reply = read_reply(replies[0], kind)
        self.mirror.note(reply)
        return reply

    async def pause(self, mode: Drain) -> None:
        """Return when no request runs and no block of the old weights is cached.

        New requests wait in the queue; `wait` lets the running ones end, `abort` ends them.
        """
        self.editions.forget()  # whatever becomes of the change, nobody is told an old version
        await self._client.pause_generation(mode=mode, clear_cache=True)

    async def resume(self) -> None:
        await self._client.resume_generation()

    async def name_weights(self, version: str) -> None:
        """Answers say which weights made them: ours, and vLLM's own from 0.32 on."""
        await self.editions.settle()
        if hasattr(self._client, "update_weight_version"):
            await self._client.update_weight_version(version)

    async def why_refused(self, stream: int) -> ClairaiError | None:
        """Why the core did not admit this request; None if that is not what happened."""
        reply = await self.ask(wire_steer.WhyRefused(stream), wire_steer.Refused)
        return _KINDS.get(reply.code, ClairaiError)(reply.reason) if reply.reason else None

    async def captured(self, stream: int, *, is_ended: bool) -> Sequence[Captured]:
        """What the engine remembers of a request's captured rows, answer by answer."""
        question = wire_capture.FindCaptures(streams=(stream,), is_ended=is_ended)
        return (await self.ask(question, wire_capture.Captures)).found[0]


def engine_or_none(app: FastAPI) -> Engine | None:
    engine = getattr(app.state, ATTRIBUTE, None)
    assert engine is None or isinstance(engine, Engine)
    return engine


def engine_of(app: FastAPI) -> Engine:
    engine = engine_or_none(app)
    if engine is None:
        raise Unanswered(HTTPStatus.NOT_FOUND, ConfigError.code, NO_TAPS)
    return engine


async def bounded_body(request: Request, limit: int, code: str, what: str) -> bytes:
    """The body, given up on before it is larger than `what` can be."""
    too_large = Unanswered(
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
    return refused(error)


async def on_unanswered(_: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, Unanswered)
    return refusal(error.status, error.code, error.message)


def refused(error: ClairaiError) -> JSONResponse:
    return refusal(status_of(error), error.code, error.reason)


def refusal(status: HTTPStatus, code: str, message: str) -> JSONResponse:
    """OpenAI's shape, so that its SDKs show the message."""
    error = {"message": message, "type": "invalid_request_error", "param": None, "code": code}
    return JSONResponse({"error": error}, status)
