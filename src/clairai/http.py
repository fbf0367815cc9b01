"""Takes HTTP requests under /v1 of vLLM's API server; gives its engine's probes, and changes them.

Runs in the API server. The engine is reached only by `engine_client.collective_rpc`, as vLLM's own
routes do it; answers carry our errors' fixed texts and nothing of the server's.
"""

from __future__ import annotations

import asyncio
from http import HTTPStatus
from typing import Any, Final

import msgspec
from fastapi import APIRouter, FastAPI, Request
from fastapi.responses import JSONResponse, Response

from clairai import http_captures, http_steering, http_weights, wire
from clairai.errors import ClairaiError, ConfigError, ProbeError
from clairai.http_engine import (
    ATTRIBUTE,
    NO_TAPS,
    Engine,
    Unanswered,
    bounded_body,
    engine_of,
    engine_or_none,
    on_error,
    on_unanswered,
    refused,
)
from clairai.points import quote
from clairai.probe.files import loads
from clairai.probe.native import MAX_NBYTES
from clairai.serve.cards import ModelCards
from clairai.serve.fields import FieldCheck

_TOKENS: Final = "clairai_tokens"


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
    http_steering.add_routes(router)
    http_captures.add_routes(router)
    http_weights.add_routes(router)
    app.include_router(router)
    app.add_exception_handler(ClairaiError, on_error)
    app.add_exception_handler(Unanswered, on_unanswered)
    app.add_middleware(FieldCheck, refuse=refused, core_of=engine_or_none)
    app.add_middleware(ModelCards, core_of=engine_or_none)


def connect(client: Any, state: Any) -> None:
    from clairai.compat.arm import takes_weights
    from clairai.compat.servers import is_one_of_many, watch_others

    is_taking = takes_weights(getattr(client, "vllm_config", None))
    engine = Engine(client, is_shared=is_one_of_many(client), is_taking=is_taking)
    if is_taking:
        watch_others(client, engine.editions.elsewhere)
    setattr(state, ATTRIBUTE, engine)


def connect_tokens(client: Any, state: Any) -> None:
    """Also without taps: what a token looks like does not depend on them."""
    setattr(state, _TOKENS, Tokens(client))


async def describe(request: Request) -> JSONResponse:
    found = await engine_of(request.app).ask(wire.Describe(), wire.Description)
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
    return _bank(await engine_of(request.app).ask(wire.ListProbes(), wire.BankState), HTTPStatus.OK)


async def put_probe(name: str, request: Request) -> JSONResponse:
    """Create or replace; `If-None-Match: *` only creates, `If-Match: *` only replaces."""
    engine = engine_of(request.app)
    data = await bounded_body(request, MAX_NBYTES, ProbeError.code, "a probe file")
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
    engine = engine_of(request.app)
    async with engine.changing:
        held = await engine.ask(wire.ListProbes(), wire.BankState)
        if not any(info.name == name for info in held.probes):
            reason = f"the bank has no probe named {quote(name)}; GET /v1/probes lists them"
            raise Unanswered(HTTPStatus.NOT_FOUND, ProbeError.code, reason)
        return _bank(await engine.ask(wire.RemoveProbes((name,)), wire.BankState), HTTPStatus.OK)


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
