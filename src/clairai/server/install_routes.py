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

from clairai.errors import ClairaiError, ConfigError, ProbeError
from clairai.points import quote
from clairai.probe.files import MAX_PROBE_NBYTES, loads
from clairai.server import capture_routes, steering_routes, weights_routes
from clairai.server.engine_rpc import (
    ATTRIBUTE,
    NO_TAPS,
    EngineClient,
    HttpRefusal,
    error_response,
    find_engine,
    on_error,
    on_http_refusal,
    read_body,
    require_engine,
)
from clairai.server.model_cards import ModelCards
from clairai.server.request_check import RequestCheck
from clairai.wire import ring_messages

_TOKENS: Final = "clairai_tokens"


class TokenTable:
    """The bytes of every token as one JSON answer, made when first asked for."""

    def __init__(self, client: Any) -> None:
        self._client = client
        self._making = asyncio.Lock()
        self._answer: bytes | None = None

    async def answer(self) -> bytes:
        from clairai.compat.api_server import fetch_tokenizer, list_token_bytes

        async with self._making:
            if self._answer is None:
                tokenizer = await fetch_tokenizer(self._client)
                # A table of a quarter of a million takes a second: tokens go on meanwhile.
                pieces = await asyncio.to_thread(list_token_bytes, tokenizer)
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
    steering_routes.add_routes(router)
    capture_routes.add_routes(router)
    weights_routes.add_routes(router)
    app.include_router(router)
    app.add_exception_handler(ClairaiError, on_error)
    app.add_exception_handler(HttpRefusal, on_http_refusal)
    app.add_middleware(RequestCheck, refuse=error_response, core_of=find_engine)
    app.add_middleware(ModelCards, core_of=find_engine)


def connect(client: Any, state: Any) -> None:
    from clairai.compat.api_server import is_one_of_several_servers, watch_other_calls
    from clairai.compat.install import accepts_weights

    is_taking = accepts_weights(getattr(client, "vllm_config", None))
    engine = EngineClient(client, is_shared=is_one_of_several_servers(client), is_taking=is_taking)
    if is_taking:
        watch_other_calls(client, engine.weight_versions.elsewhere)
    setattr(state, ATTRIBUTE, engine)


def connect_tokens(client: Any, state: Any) -> None:
    """Also without taps: what a token looks like does not depend on them."""
    setattr(state, _TOKENS, TokenTable(client))


async def describe(request: Request) -> JSONResponse:
    found = await require_engine(request.app).ask(
        ring_messages.Describe(), ring_messages.Description
    )
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
        raise HttpRefusal(HTTPStatus.NOT_FOUND, ConfigError.code, NO_TAPS)
    return Response(await tokens.answer(), media_type="application/json")


async def list_probes(request: Request) -> JSONResponse:
    return _bank_response(
        await require_engine(request.app).ask(ring_messages.ListProbes(), ring_messages.BankState),
        HTTPStatus.OK,
    )


async def put_probe(name: str, request: Request) -> JSONResponse:
    """Create or replace; `If-None-Match: *` only creates, `If-Match: *` only replaces."""
    engine = require_engine(request.app)
    data = await read_body(request, MAX_PROBE_NBYTES, ProbeError.code, "a probe file")
    probe = loads(data, source="request body")
    if probe.name != name:
        raise ProbeError(
            f"the path names {quote(name)} and the file {quote(probe.name)}; make them the same"
        )
    async with engine.changing:
        held = await engine.ask(ring_messages.ListProbes(), ring_messages.BankState)
        is_there = any(info.name == name for info in held.probes)
        _check_conditions(request, name, is_there=is_there)
        change = (
            ring_messages.ReplaceProbes((data,)) if is_there else ring_messages.AddProbes((data,))
        )
        state = await engine.ask(change, ring_messages.BankState)
    return _bank_response(state, HTTPStatus.OK if is_there else HTTPStatus.CREATED)


async def remove_probe(name: str, request: Request) -> JSONResponse:
    engine = require_engine(request.app)
    async with engine.changing:
        held = await engine.ask(ring_messages.ListProbes(), ring_messages.BankState)
        if not any(info.name == name for info in held.probes):
            reason = f"the bank has no probe named {quote(name)}; GET /v1/probes lists them"
            raise HttpRefusal(HTTPStatus.NOT_FOUND, ProbeError.code, reason)
        return _bank_response(
            await engine.ask(ring_messages.RemoveProbes((name,)), ring_messages.BankState),
            HTTPStatus.OK,
        )


def _check_conditions(request: Request, name: str, *, is_there: bool) -> None:
    header, reason = (
        ("if-none-match", "the bank has a probe named {}; replace it, or rename")
        if is_there
        else ("if-match", "the bank has no probe named {}; add it")
    )
    if request.headers.get(header) == "*":
        reason = reason.format(quote(name))
        raise HttpRefusal(HTTPStatus.PRECONDITION_FAILED, ProbeError.code, reason)


def _bank_response(state: ring_messages.BankState, status: HTTPStatus) -> JSONResponse:
    probes = [msgspec.to_builtins(probe) for probe in state.probes]
    content = {"data": probes, "capacity": state.capacity, "version": state.version}
    return JSONResponse(content, status)
