"""Routes under /v1/probes: list, add, replace and remove the probes of the running engine.

Runs in: the API server.
"""

from __future__ import annotations

from http import HTTPStatus

import msgspec
from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse

from clairai.errors import ProbeError, quote
from clairai.probe.files import MAX_PROBE_NBYTES, loads
from clairai.server.engine_rpc import RouteRefusal, read_body, require_engine
from clairai.wire.control_messages import (
    AddProbes,
    BankState,
    ListProbes,
    RemoveProbes,
    ReplaceProbes,
)


def add_routes(router: APIRouter) -> None:
    router.add_api_route("/probes", list_probes, methods=["GET"])
    # A probe's name may contain slashes.
    router.add_api_route("/probes/{name:path}", put_probe, methods=["PUT"])
    router.add_api_route("/probes/{name:path}", remove_probe, methods=["DELETE"])


async def list_probes(request: Request) -> JSONResponse:
    state = await require_engine(request.app).ask(ListProbes(), BankState)
    return _bank_response(state, HTTPStatus.OK)


async def put_probe(name: str, request: Request) -> JSONResponse:
    """Create or replace; `If-None-Match: *` only creates, `If-Match: *` only replaces."""
    engine = require_engine(request.app)
    data = await read_body(request, MAX_PROBE_NBYTES, ProbeError.code, "a probe file")
    given = loads(data, source="request body")
    if given.name != name:
        raise ProbeError(
            f"the path names {quote(name)} and the file {quote(given.name)}; make them the same"
        )
    async with engine.changing:
        bank = await engine.ask(ListProbes(), BankState)
        is_there = any(probe.name == name for probe in bank.probes)
        _check_conditions(request, name, is_there=is_there)
        change = ReplaceProbes((data,)) if is_there else AddProbes((data,))
        state = await engine.ask(change, BankState)
    return _bank_response(state, HTTPStatus.OK if is_there else HTTPStatus.CREATED)


async def remove_probe(name: str, request: Request) -> JSONResponse:
    engine = require_engine(request.app)
    async with engine.changing:
        bank = await engine.ask(ListProbes(), BankState)
        if not any(probe.name == name for probe in bank.probes):
            reason = f"the bank has no probe named {quote(name)}; GET /v1/probes lists them"
            raise RouteRefusal(HTTPStatus.NOT_FOUND, ProbeError.code, reason)
        state = await engine.ask(RemoveProbes((name,)), BankState)
    return _bank_response(state, HTTPStatus.OK)


def _check_conditions(request: Request, name: str, *, is_there: bool) -> None:
    header, reason = (
        ("if-none-match", "the bank has a probe named {}; replace it, or rename")
        if is_there
        else ("if-match", "the bank has no probe named {}; add it")
    )
    if request.headers.get(header) == "*":
        reason = reason.format(quote(name))
        raise RouteRefusal(HTTPStatus.PRECONDITION_FAILED, ProbeError.code, reason)


def _bank_response(state: BankState, status: HTTPStatus) -> JSONResponse:
    probes = [msgspec.to_builtins(probe) for probe in state.probes]
    content = {"data": probes, "capacity": state.capacity, "version": state.version}
    return JSONResponse(content, status)
