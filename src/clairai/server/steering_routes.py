"""Routes under /v1/steering: vectors, global tiers, and the steering of a running request.

Runs in: the API server. A vector's ETag is the digest of its content. Tiers steer every request.
"""

from __future__ import annotations

import asyncio
import re
from http import HTTPStatus
from typing import Any, Final

import msgspec
from fastapi import APIRouter, Request
from fastapi.responses import Response

from clairai.errors import RequestError, VectorError, printable, quote
from clairai.fields.request_fields import MAX_STREAM
from clairai.library.engine_control import require_running
from clairai.server.engine_rpc import RouteRefusal, read_body, require_engine
from clairai.vector import files
from clairai.vector.model import Vector
from clairai.wire.steering_messages import (
    ChangeSteering,
    GetSteering,
    GetVector,
    ListedVector,
    ListVectors,
    PutVectors,
    RemoveVectors,
    SetSteering,
    SteeringChanged,
    SteeringState,
    VectorFile,
    VectorState,
)

MAX_TIERS_NBYTES: Final = 64 << 20
_STREAM: Final = re.compile(r"[1-9][0-9]{0,19}")
_UNREADABLE: Final = (msgspec.MsgspecError, UnicodeDecodeError, RecursionError)
_JSON: Final = "application/json"
_FILE: Final = "application/octet-stream"


class _Tiers(msgspec.Struct, forbid_unknown_fields=True):
    """The body of POST /v1/steering; a tier that is left out stays as it is."""

    base: list[Any] | msgspec.UnsetType = msgspec.UNSET
    prefill: list[Any] | msgspec.UnsetType = msgspec.UNSET
    decode: list[Any] | msgspec.UnsetType = msgspec.UNSET


class _Change(msgspec.Struct, forbid_unknown_fields=True):
    """The body of POST /v1/steering/requests/{stream}."""

    steer: list[Any]


def add_routes(router: APIRouter) -> None:
    router.add_api_route("/steering", get_steering, methods=["GET"])
    router.add_api_route("/steering", set_steering, methods=["POST"])
    router.add_api_route("/steering/requests/{stream}", change_steering, methods=["POST"])
    router.add_api_route("/steering/vectors", list_vectors, methods=["GET"])
    # A vector's name may contain slashes.
    for method, route in (("GET", get_vector), ("PUT", put_vector), ("DELETE", remove_vector)):
        router.add_api_route("/steering/vectors/{name:path}", route, methods=[method])


async def list_vectors(request: Request) -> Response:
    state = await require_engine(request.app).ask(ListVectors(), VectorState)
    return _vectors_response(state, HTTPStatus.OK)


async def get_vector(name: str, request: Request) -> Response:
    engine = require_engine(request.app)
    known = _find(await engine.ask(ListVectors(), VectorState), name)
    if known is None:
        raise _no_vector(name)
    tag = _tag(known.digest)
    if _has_tag(request, "if-none-match", tag):
        return Response(status_code=HTTPStatus.NOT_MODIFIED, headers={"ETag": tag})
    found = await engine.ask(GetVector(name), VectorFile)
    return Response(found.data, media_type=_FILE, headers={"ETag": _tag(found.digest)})


async def put_vector(name: str, request: Request) -> Response:
    """Create or replace, under the conditions of If-Match and If-None-Match."""
    engine = require_engine(request.app)
    data = await read_body(request, files.MAX_NBYTES, VectorError.code, "a vector file")
    # Megabytes are read and hashed: in a thread, beside the event loop.
    vector, file = await asyncio.to_thread(_read_vector, data, name)
    async with engine.changing:
        state = await engine.ask(ListVectors(), VectorState)
        known = _find(state, name)
        _check_conditions(request, name, known)
        mode: Any = "add" if known is None else "replace"
        change = PutVectors((file,), mode)
        state = await engine.ask(change, VectorState)
    status = HTTPStatus.CREATED if known is None else HTTPStatus.OK
    return _vectors_response(state, status, {"ETag": _tag(vector.digest)})


async def remove_vector(name: str, request: Request) -> Response:
    engine = require_engine(request.app)
    async with engine.changing:
        state = await engine.ask(ListVectors(), VectorState)
        known = _find(state, name)
        if known is None:
            raise _no_vector(name)
        _check_conditions(request, name, known)
        change = RemoveVectors((name,))
        state = await engine.ask(change, VectorState)
    return _vectors_response(state, HTTPStatus.OK)


async def get_steering(request: Request) -> Response:
    engine = require_engine(request.app)
    return _tiers_response(await engine.ask(GetSteering(), SteeringState))


async def set_steering(request: Request) -> Response:
    engine = require_engine(request.app)
    body = await read_body(request, MAX_TIERS_NBYTES, RequestError.code, "a set of tiers")
    tiers = await asyncio.to_thread(_read_tiers, body)
    async with engine.changing:
        change = SetSteering(**tiers)
        return _tiers_response(await engine.ask(change, SteeringState))


async def change_steering(stream: str, request: Request) -> Response:
    """Change the steering of a running request from its next step on; `[]` ends it."""
    number = int(stream) if _STREAM.fullmatch(stream) else 0
    if not 1 <= number <= MAX_STREAM:
        raise RequestError(f"{quote(stream)} is no stream: a whole number from 1 to 2**64 - 1")
    engine = require_engine(request.app)
    body = await read_body(request, MAX_TIERS_NBYTES, RequestError.code, "a list of entries")
    entries = await asyncio.to_thread(_read_change, body)
    change = ChangeSteering(number, entries)
    found = require_running(await engine.ask(change, SteeringChanged), number)
    applied = msgspec.Raw(found.applied)
    content = msgspec.json.encode({"positions": found.positions, "steering": applied})
    return Response(content, media_type=_JSON)


def _read_change(body: bytes) -> bytes:
    try:
        return msgspec.json.encode(msgspec.json.decode(body, type=_Change).steer)
    except _UNREADABLE as error:
        raise RequestError(f"the body is no object with steer: {printable(error)}") from None


def _read_tiers(body: bytes) -> dict[str, bytes | None]:
    """Each given tier as JSON, which the core reads again."""
    try:
        given = msgspec.json.decode(body, type=_Tiers)
    except _UNREADABLE as error:
        raise RequestError(
            f"the body is no object with base, prefill or decode: {printable(error)}"
        ) from None
    found = {name: getattr(given, name) for name in given.__struct_fields__}
    return {
        name: None if tier is msgspec.UNSET else msgspec.json.encode(tier)
        for name, tier in found.items()
    }


def _read_vector(data: bytes, name: str) -> tuple[Vector, bytes]:
    vector = files.loads(data, source="request body", name=name)
    if vector.name != name:
        raise VectorError(
            f"the path names {quote(name)} and the file {quote(vector.name)}; make them the same"
        )
    return vector, files.dumps(vector)


def _find(state: VectorState, name: str) -> ListedVector | None:
    return next((vector for vector in state.vectors if vector.name == name), None)


def _no_vector(name: str) -> RouteRefusal:
    reason = f"no vector is named {quote(name)}; GET /v1/steering/vectors lists them"
    return RouteRefusal(HTTPStatus.NOT_FOUND, VectorError.code, reason)


def _check_conditions(request: Request, name: str, known: ListedVector | None) -> None:
    tag = None if known is None else _tag(known.digest)
    if "if-match" in request.headers and not _has_tag(request, "if-match", tag):
        reason = f"no vector named {quote(name)} has this content now; read it again"
        raise RouteRefusal(HTTPStatus.PRECONDITION_FAILED, VectorError.code, reason)
    if _has_tag(request, "if-none-match", tag):
        reason = f"a vector named {quote(name)} is there; replace it, or rename"
        raise RouteRefusal(HTTPStatus.PRECONDITION_FAILED, VectorError.code, reason)


def _has_tag(request: Request, header: str, tag: str | None) -> bool:
    """True if the header lists this tag, or is `*` and there is one (RFC 9110, 13.1)."""
    listed = {one.strip() for one in request.headers.get(header, "").split(",")}
    return tag is not None and ("*" in listed or tag in listed)


def _tag(digest: str) -> str:
    return f'"{digest}"'


def _vectors_response(
    state: VectorState, status: HTTPStatus, headers: dict[str, str] | None = None
) -> Response:
    content = {
        "data": state.vectors,
        "version": state.version,
        "points": state.points,
        "width": state.width,
        "capacity": {"rows": state.rows, "programs": state.programs},
    }
    return Response(msgspec.json.encode(content), status, headers, media_type=_JSON)


def _tiers_response(state: SteeringState) -> Response:
    tiers = {name: msgspec.Raw(getattr(state, name)) for name in ("base", "prefill", "decode")}
    content = msgspec.json.encode({**tiers, "version": state.version})
    return Response(content, media_type=_JSON)
