"""Takes requests under /v1/steering of vLLM's API server; gives and changes vectors and tiers.

Vectors have names, and content: an ETag is the content's digest. Tiers steer every request.
"""

from __future__ import annotations

import asyncio
import re
from http import HTTPStatus
from typing import Any, Final

import msgspec
from fastapi import APIRouter, Request
from fastapi.responses import Response

from clairai import wire_steer
from clairai.errors import RequestError, VectorError
from clairai.http_engine import Unanswered, bounded_body, engine_of
from clairai.points import quote
from clairai.steer import files
from clairai.steer.vector import Vector
from clairai.wanted import MAX_STREAM

MAX_TIERS_NBYTES: Final = 64 << 20
_STREAM: Final = re.compile(r"[1-9][0-9]{0,19}")
_UNREADABLE: Final = (msgspec.MsgspecError, UnicodeDecodeError, RecursionError)
_JSON: Final = "application/json"
_FILE: Final = "application/octet-stream"


class _Tiers(msgspec.Struct, forbid_unknown_fields=True):
    """What POST /v1/steering takes; a tier that is not there stays as it is."""

    base: list[Any] | msgspec.UnsetType = msgspec.UNSET
    prefill: list[Any] | msgspec.UnsetType = msgspec.UNSET
    decode: list[Any] | msgspec.UnsetType = msgspec.UNSET


class _Change(msgspec.Struct, forbid_unknown_fields=True):
    """What POST /v1/steering/requests/{stream} takes."""

    steer: list[Any]


def add_routes(router: APIRouter) -> None:
    router.add_api_route("/steering", get_steering, methods=["GET"])
    router.add_api_route("/steering", set_steering, methods=["POST"])
    router.add_api_route("/steering/requests/{stream}", amend, methods=["POST"])
    router.add_api_route("/steering/vectors", list_vectors, methods=["GET"])
    # A vector's name may hold slashes.
    for method, route in (("GET", get_vector), ("PUT", put_vector), ("DELETE", remove_vector)):
        router.add_api_route("/steering/vectors/{name:path}", route, methods=[method])


async def list_vectors(request: Request) -> Response:
    state = await engine_of(request.app).ask(wire_steer.ListVectors(), wire_steer.VectorState)
    return _listed(state, HTTPStatus.OK)


async def get_vector(name: str, request: Request) -> Response:
    engine = engine_of(request.app)
    held = _find(await engine.ask(wire_steer.ListVectors(), wire_steer.VectorState), name)
    if held is None:
        raise _unknown(name)
    tag = _tag(held.digest)
    if _names(request, "if-none-match", tag):
        return Response(status_code=HTTPStatus.NOT_MODIFIED, headers={"ETag": tag})
    found = await engine.ask(wire_steer.GetVector(name), wire_steer.VectorFile)
    return Response(found.data, media_type=_FILE, headers={"ETag": _tag(found.digest)})


async def put_vector(name: str, request: Request) -> Response:
    """Create or replace, under the conditions that If-Match and If-None-Match set."""
    engine = engine_of(request.app)
    data = await bounded_body(request, files.MAX_NBYTES, VectorError.code, "a vector file")
    # Megabytes are read and hashed: tokens go on meanwhile.
    vector, file = await asyncio.to_thread(_read, data, name)
    async with engine.changing:
        state = await engine.ask(wire_steer.ListVectors(), wire_steer.VectorState)
        held = _find(state, name)
        _check_conditions(request, name, held)
        mode: Any = "add" if held is None else "replace"
        change = wire_steer.PutVectors((file,), mode)
        state = await engine.ask(change, wire_steer.VectorState)
    status = HTTPStatus.CREATED if held is None else HTTPStatus.OK
    return _listed(state, status, {"ETag": _tag(vector.digest)})


async def remove_vector(name: str, request: Request) -> Response:
    engine = engine_of(request.app)
    async with engine.changing:
        state = await engine.ask(wire_steer.ListVectors(), wire_steer.VectorState)
        held = _find(state, name)
        if held is None:
            raise _unknown(name)
        _check_conditions(request, name, held)
        change = wire_steer.RemoveVectors((name,))
        state = await engine.ask(change, wire_steer.VectorState)
    return _listed(state, HTTPStatus.OK)


async def get_steering(request: Request) -> Response:
    engine = engine_of(request.app)
    return _tiers(await engine.ask(wire_steer.GetSteering(), wire_steer.SteeringState))


async def set_steering(request: Request) -> Response:
    engine = engine_of(request.app)
    body = await bounded_body(request, MAX_TIERS_NBYTES, RequestError.code, "a set of tiers")
    tiers = await asyncio.to_thread(_read_tiers, body)
    async with engine.changing:
        change = wire_steer.SetSteering(**tiers)
        return _tiers(await engine.ask(change, wire_steer.SteeringState))


async def amend(stream: str, request: Request) -> Response:
    """Steer a running request otherwise from its next step on; `[]` for not at all."""
    number = int(stream) if _STREAM.fullmatch(stream) else 0
    if not 1 <= number <= MAX_STREAM:
        raise RequestError(f"{quote(stream)} is no stream: a whole number from 1 to 2**64 - 1")
    engine = engine_of(request.app)
    body = await bounded_body(request, MAX_TIERS_NBYTES, RequestError.code, "a list of entries")
    entries = await asyncio.to_thread(_read_change, body)
    change = wire_steer.Amend(number, entries)
    found = await engine.ask(change, wire_steer.Amended)
    applied = msgspec.Raw(found.applied)
    content = msgspec.json.encode({"positions": found.positions, "steering": applied})
    return Response(content, media_type=_JSON)


def _read_change(body: bytes) -> bytes:
    try:
        return msgspec.json.encode(msgspec.json.decode(body, type=_Change).steer)
    except _UNREADABLE as error:
        raise RequestError(f"the body is no object with steer: {str(error)[:200]}") from None


def _read_tiers(body: bytes) -> dict[str, bytes | None]:
    """Each that is there as JSON, which the core reads again."""
    try:
        given = msgspec.json.decode(body, type=_Tiers)
    except _UNREADABLE as error:
        raise RequestError(
            f"the body is no object with base, prefill or decode: {str(error)[:200]}"
        ) from None
    found = {name: getattr(given, name) for name in given.__struct_fields__}
    return {
        name: None if tier is msgspec.UNSET else msgspec.json.encode(tier)
        for name, tier in found.items()
    }


def _read(data: bytes, name: str) -> tuple[Vector, bytes]:
    vector = files.loads(data, source="request body", name=name)
    if vector.name != name:
        raise VectorError(
            f"the path names {quote(name)} and the file {quote(vector.name)}; make them the same"
        )
    return vector, files.dumps(vector)


def _find(state: wire_steer.VectorState, name: str) -> wire_steer.ListedVector | None:
    return next((vector for vector in state.vectors if vector.name == name), None)


def _unknown(name: str) -> Unanswered:
    reason = f"no vector is named {quote(name)}; GET /v1/steering/vectors lists them"
    return Unanswered(HTTPStatus.NOT_FOUND, VectorError.code, reason)


def _check_conditions(request: Request, name: str, held: wire_steer.ListedVector | None) -> None:
    tag = None if held is None else _tag(held.digest)
    if "if-match" in request.headers and not _names(request, "if-match", tag):
        reason = f"no vector named {quote(name)} has this content now; read it again"
        raise Unanswered(HTTPStatus.PRECONDITION_FAILED, VectorError.code, reason)
    if _names(request, "if-none-match", tag):
        reason = f"a vector named {quote(name)} is there; replace it, or rename"
        raise Unanswered(HTTPStatus.PRECONDITION_FAILED, VectorError.code, reason)


def _names(request: Request, header: str, tag: str | None) -> bool:
    """Whether the header lists this tag, or `*` and there is one (RFC 9110, 13.1)."""
    listed = {one.strip() for one in request.headers.get(header, "").split(",")}
    return tag is not None and ("*" in listed or tag in listed)


def _tag(digest: str) -> str:
    return f'"{digest}"'


def _listed(
    state: wire_steer.VectorState, status: HTTPStatus, headers: dict[str, str] | None = None
) -> Response:
    content = {
        "data": state.vectors,
        "version": state.version,
        "points": state.points,
        "width": state.width,
        "capacity": {"rows": state.rows, "programs": state.programs},
    }
    return Response(msgspec.json.encode(content), status, headers, media_type=_JSON)


def _tiers(state: wire_steer.SteeringState) -> Response:
    tiers = {name: msgspec.Raw(getattr(state, name)) for name in ("base", "prefill", "decode")}
    content = msgspec.json.encode({**tiers, "version": state.version})
    return Response(content, media_type=_JSON)
