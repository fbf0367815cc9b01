"""Takes HTTP requests under /v1 of vLLM's API server; gives its engine's probes, and changes them.

Runs in the API server. The engine is reached only by `engine_client.collective_rpc`, as vLLM's own
routes do it; answers carry our errors' fixed texts and nothing of the server's.
"""

from __future__ import annotations

import asyncio
from http import HTTPStatus
from typing import Any, Final, TypeVar

import msgspec
from fastapi import APIRouter, FastAPI, Request
from fastapi.responses import JSONResponse, Response

from clairai import wire
from clairai.errors import CapacityError, ClairaiError, ConfigError, ProbeError
from clairai.offline import read_reply
from clairai.points import quote
from clairai.probe.files import loads
from clairai.probe.native import MAX_NBYTES
from clairai.serve.fields import FieldCheck

Reply = TypeVar("Reply", bound=msgspec.Struct)

NO_TAPS: Final = (
    "this engine was started without clairai; start it with "
    """--additional-config '{"clairai": {...}}' and without CLAIRAI_DISABLE"""
)
_STATE: Final = "clairai_engine"
_TOKENS: Final = "clairai_tokens"


class Unanswered(Exception):
    """A request that ends in this status, and why."""

    def __init__(self, status: HTTPStatus, code: str, message: str) -> None:
        super().__init__(message)
        self.status, self.code, self.message = status, code, message


class Engine:
    """The one way from a route to the worker."""

    def __init__(self, client: Any) -> None:
        self._client = client
        # PUT looks and then changes: one at a time, so that what it saw still holds.
        self.changing = asyncio.Lock()

    async def ask(self, control: wire.Control, kind: type[Reply]) -> Reply:
        message = msgspec.msgpack.encode(control)
        replies = await self._client.collective_rpc("clairai_control", args=(message,))
        return read_reply(replies[0], kind)


class Tokens:
    """The bytes of every token as one JSON answer, made when first asked for."""

    def __init__(self, client: Any) -> None:
        self._client = client
        self._making = asyncio.Lock()
        self._answer: bytes | None = None

    async def answer(self) -> bytes:
        from clairai.compat.vocabulary import token_bytes, tokenizer_of

        async with self._making:
            if self._answer is None:
                tokenizer = await tokenizer_of(self._client)
                # A table of a quarter of a million takes a second: tokens go on meanwhile.
                pieces = await asyncio.to_thread(token_bytes, tokenizer)
                self._answer = msgspec.json.encode({"tokens": pieces})
        return self._answer


def attach(app: FastAPI) -> None:
    """Add the routes; until `connect` they answer that there are no taps."""
    router = APIRouter(prefix="/v1")
    router.add_api_route("/clairai", describe, methods=["GET"])
    router.add_api_route("/clairai/tokens", list_tokens, methods=["GET"])
    router.add_api_route("/probes", list_probes, methods=["GET"])
    # A probe's name may hold slashes.
    router.add_api_route("/probes/{name:path}", put_probe, methods=["PUT"])
    router.add_api_route("/probes/{name:path}", remove_probe, methods=["DELETE"])
    app.include_router(router)
    app.add_exception_handler(ClairaiError, _on_error)
    app.add_exception_handler(Unanswered, _on_unanswered)
    app.add_middleware(FieldCheck, refuse=_bad_request, is_on=_has_taps)


def connect(client: Any, state: Any) -> None:
    setattr(state, _STATE, Engine(client))


def connect_tokens(client: Any, state: Any) -> None:
    """Also without taps: what a token looks like does not depend on them."""
    setattr(state, _TOKENS, Tokens(client))


async def describe(request: Request) -> JSONResponse:
    found = await _engine(request).ask(wire.Describe(), wire.Description)
    return JSONResponse(
        {
            "model": found.model,
            "points": found.points,
            "width": found.width,
            "capacity": found.capacity,
            "epoch": f"{found.epoch:016x}",
            "published": found.published,
        }
    )


async def list_tokens(request: Request) -> Response:
    """`{"tokens": [...]}`: by token id, its bytes in base64; special tokens as they are written."""
    tokens = getattr(request.app.state, _TOKENS, None)
    if tokens is None:
        raise Unanswered(HTTPStatus.NOT_FOUND, ConfigError.code, NO_TAPS)
    return Response(await tokens.answer(), media_type="application/json")


async def list_probes(request: Request) -> JSONResponse:
    return _bank(await _engine(request).ask(wire.ListProbes(), wire.BankState), HTTPStatus.OK)


async def put_probe(name: str, request: Request) -> JSONResponse:
    """Create or replace; `If-None-Match: *` only creates, `If-Match: *` only replaces."""
    engine = _engine(request)
    data = await _bounded_body(request)
    probe = loads(data, source="request body")
    if probe.name != name:
        raise ProbeError(
            f"the path names {quote(name)} and the file {quote(probe.name)}; make them the same"
        )
    async with engine.changing:
        held = await engine.ask(wire.ListProbes(), wire.BankState)
        is_there = any(info.name == name for info in held.probes)
        _check_conditions(request, name, is_there=is_there)
        change = wire.ReplaceProbes((data,)) if is_there else wire.AddProbes((data,))
        state = await engine.ask(change, wire.BankState)
    return _bank(state, HTTPStatus.OK if is_there else HTTPStatus.CREATED)


async def remove_probe(name: str, request: Request) -> JSONResponse:
    engine = _engine(request)
    async with engine.changing:
        held = await engine.ask(wire.ListProbes(), wire.BankState)
        if not any(info.name == name for info in held.probes):
            reason = f"the bank has no probe named {quote(name)}; GET /v1/probes lists them"
            raise Unanswered(HTTPStatus.NOT_FOUND, ProbeError.code, reason)
        return _bank(await engine.ask(wire.RemoveProbes((name,)), wire.BankState), HTTPStatus.OK)


def _has_taps(app: FastAPI) -> bool:
    return hasattr(app.state, _STATE)


def _engine(request: Request) -> Engine:
    if not _has_taps(request.app):
        raise Unanswered(HTTPStatus.NOT_FOUND, ConfigError.code, NO_TAPS)
    engine = getattr(request.app.state, _STATE)
    assert isinstance(engine, Engine)
    return engine


async def _bounded_body(request: Request) -> bytes:
    """The body, given up on before it is larger than a probe can be."""
    too_large = Unanswered(
        HTTPStatus.REQUEST_ENTITY_TOO_LARGE,
        ProbeError.code,
        f"the body is over {MAX_NBYTES} bytes, the most a probe file has",
    )
    if int(request.headers.get("content-length", "0")) > MAX_NBYTES:
        raise too_large
    body = bytearray()
    async for chunk in request.stream():
        if len(body) + len(chunk) > MAX_NBYTES:
            raise too_large
        body += chunk
    return bytes(body)


def _check_conditions(request: Request, name: str, *, is_there: bool) -> None:
    header, reason = (
        ("if-none-match", "the bank has a probe named {}; replace it, or rename")
        if is_there
        else ("if-match", "the bank has no probe named {}; add it")
    )
    if request.headers.get(header) == "*":
        reason = reason.format(quote(name))
        raise Unanswered(HTTPStatus.PRECONDITION_FAILED, ProbeError.code, reason)


def _bank(state: wire.BankState, status: HTTPStatus) -> JSONResponse:
    probes = [msgspec.to_builtins(probe) for probe in state.probes]
    content = {"data": probes, "capacity": state.capacity, "version": state.version}
    return JSONResponse(content, status)


async def _on_error(_: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, ClairaiError)
    status = HTTPStatus.CONFLICT if isinstance(error, CapacityError) else HTTPStatus.BAD_REQUEST
    return _refusal(status, error.code, error.reason)


async def _on_unanswered(_: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, Unanswered)
    return _refusal(error.status, error.code, error.message)


def _bad_request(error: ClairaiError) -> JSONResponse:
    return _refusal(HTTPStatus.BAD_REQUEST, error.code, error.reason)


def _refusal(status: HTTPStatus, code: str, message: str) -> JSONResponse:
    """OpenAI's shape, so that its SDKs show the message."""
    error = {"message": message, "type": "invalid_request_error", "param": None, "code": code}
    return JSONResponse({"error": error}, status)
