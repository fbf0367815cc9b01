"""Routes under /v1/captures: list what was captured, and fetch a request's rows as safetensors.

Runs in: the API server. The engine says what became of a request's rows and which folder has them;
the folder is read here.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from http import HTTPStatus
from typing import Any, Final, TypeVar

import msgspec
from fastapi import APIRouter, Request
from fastapi.responses import Response

from clairai.errors import RequestError, StoreError, quote
from clairai.fields.request_fields import is_owner
from clairai.points import Point
from clairai.server.capture_download import BundleKey, DownloadResponse, Downloads
from clairai.server.engine_rpc import EngineRpc, RouteRefusal, require_engine
from clairai.server.response_fields import capture_fields, is_settled, wait_settled
from clairai.server.stored_owners import StoredOwners
from clairai.store.bundle import Bundle
from clairai.store.core_folders import whole_folder
from clairai.store.disk import has_captures
from clairai.wire.capture_messages import (
    OWNER_HEADER,
    Captured,
    Captures,
    CaptureState,
    ConsumerStatus,
    DescribeCapture,
    ListCaptures,
)

ATTRIBUTE: Final = "clairai_captures"  # of the app's state
OWNERS_ATTRIBUTE: Final = "clairai_capture_owners"
State = TypeVar("State")
MAX_LISTED: Final = 1000
MAX_POINTS: Final = 512
NOT_SATISFIABLE: Final = (0, 0)
_ID: Final = re.compile(r"[0-9a-f]{16}")
_RANGE: Final = re.compile(r"\s*bytes\s*=\s*(\d{0,19})\s*-\s*(\d{0,19})\s*", re.ASCII)
_JSON: Final = "application/json"


def add_routes(router: APIRouter) -> None:
    router.add_api_route("/clairai/capture", describe_capture, methods=["GET"])
    router.add_api_route("/captures", list_captures, methods=["GET"])
    router.add_api_route("/captures/{id}", get_capture, methods=["GET"])


async def describe_capture(request: Request) -> Response:
    """How the consumers do: for the proxy's health and metrics."""
    state = await require_engine(request.app).ask(DescribeCapture(), CaptureState)
    content = {**_counts(state), "dropping_since": state.dropping_since}
    return Response(msgspec.json.encode(content), media_type=_JSON)


async def list_captures(request: Request) -> Response:
    """The newest first; `?limit=` of them."""
    engine = require_engine(request.app)
    limit = _int_param(request, "limit", 100, MAX_LISTED)
    captures = await engine.ask(ListCaptures(limit, _asking_owner(request)), Captures)
    state = await engine.ask(DescribeCapture(), CaptureState)
    content = {
        "data": [_list_capture(answers) for answers in captures.found if answers],
        **_counts(state),
        "memory": {
            "stash_nbytes": state.stash_nbytes,
            "staging_nbytes": state.staging_nbytes,
            "pending_nbytes": state.pending_nbytes,
        },
    }
    return Response(msgspec.json.encode(content), media_type=_JSON)


def _counts(state: CaptureState) -> dict[str, Any]:
    return {
        "consumers": [_describe_consumer(one) for one in state.places],
        "rows": state.rows,
        "dropped": state.dropped,
        "discarded": state.discarded,
    }


def _describe_consumer(status: ConsumerStatus) -> dict[str, Any]:
    """Without the place, which is a path or an address of the operator's."""
    fields = msgspec.structs.asdict(status)
    del fields["where"]
    return {"name": fields.pop("consumer"), **fields}


async def get_capture(id: str, request: Request) -> Response:
    """One request's rows: `?point=` some points, `?choice=` one answer, any range of bytes."""
    engine = require_engine(request.app)
    stream = int(id, 16) if _ID.fullmatch(id) else 0
    if not stream:
        raise _no_capture(id)
    key = BundleKey(stream, _points_param(request), _choice_param(request))
    downloads = _downloads(request)
    with ExitStack() as closing:
        closing.enter_context(downloads.reserve())
        if not await _is_shown(request, stream):
            raise _no_capture(id)
        captured = await _require_kept(engine, id, stream)
        folders = await _find_folders(engine, captured)
        made = await downloads.open(key, folders, closing)
        if made is None:
            raise _no_capture(id)
        lost = sum(one.lost for one in captured)
        return _file_response(request, id, made, lost, closing)


def requested_range(headers: Mapping[str, str], etag: str, nbytes: int) -> tuple[int, int] | None:
    """The bytes [first, end) that a request asks for; None for the whole file.

    As RFC 9110, 14.1 and 14.2: a header that asks for several ranges, that is not understood, or
    whose If-Range names another version of the file, is ignored.
    """
    found = _RANGE.fullmatch(headers.get("range", ""))
    if found is None or headers.get("if-range", etag) != etag:
        return None
    first, last = found[1], found[2]
    if not first and not last:
        return None
    if not first:  # the last so many bytes
        return (max(nbytes - int(last), 0), nbytes) if int(last) and nbytes else NOT_SATISFIABLE
    if last and int(last) < int(first):
        return None
    if int(first) >= nbytes:
        return NOT_SATISFIABLE
    return int(first), min(int(last) + 1 if last else nbytes, nbytes)


def _app_state(request: Request, name: str, kind: type[State]) -> State:
    """The one object of this kind that the app has, made when it is first asked for."""
    state = request.app.state
    if not hasattr(state, name):
        setattr(state, name, kind())
    found = getattr(state, name)
    assert isinstance(found, kind)
    return found


def _downloads(request: Request) -> Downloads:
    return _app_state(request, ATTRIBUTE, Downloads)


async def _require_kept(engine: EngineRpc, id: str, stream: int) -> Sequence[Captured]:
    """What the engine remembers of the request, once its rows are safe; may be nothing."""
    captured = await engine.captured(stream, is_ended=False)
    fields = capture_fields(stream, captured)
    if captured and fields["state"] == "writing":
        captured = await wait_settled(lambda: engine.captured(stream, is_ended=True))
        fields = capture_fields(stream, captured)
    if captured and fields["state"] == "discarded":
        raise RouteRefusal(
            HTTPStatus.GONE, StoreError.code, f"no rows were kept: {fields['reason']}"
        )
    if captured and not is_settled(captured):
        why = fields.get("reason") or "its request has not ended, or its rows are on their way"
        reason = f"capture {id} is not whole: {why}"
        raise RouteRefusal(HTTPStatus.CONFLICT, StoreError.code, reason)
    return captured


async def _find_folders(engine: EngineRpc, captured: Sequence[Captured]) -> list[str]:
    """Where the rows can be: where the engine says, or anywhere that it writes to.

    Answers of one request may be in the folders of several engine cores, which are read as one.
    """
    places = [place.where for one in captured for place in one.places]
    if not places:
        state = await engine.ask(DescribeCapture(), CaptureState)
        places = [one.where for one in state.places]
    return [folder for folder in dict.fromkeys(map(whole_folder, places)) if has_captures(folder)]


def _file_response(
    request: Request, id: str, made: Bundle, lost: int, closing: ExitStack
) -> Response:
    """The file, or what of it is asked for; a response that sends rows takes over `closing`."""
    headers = {
        "Accept-Ranges": "bytes",
        "ETag": f'"{made.digest}"',
        "Cache-Control": "private, no-cache",
        "Content-Disposition": f'attachment; filename="{id}.safetensors"',
        "X-Clairai-Lost": str(lost),
    }
    known = {one.strip() for one in request.headers.get("if-none-match", "").split(",")}
    if known & {headers["ETag"], "*"}:
        return Response(status_code=HTTPStatus.NOT_MODIFIED, headers=headers)
    chosen = requested_range(request.headers, headers["ETag"], made.nbytes)
    if chosen == NOT_SATISFIABLE:
        headers["Content-Range"] = f"bytes */{made.nbytes}"
        status = HTTPStatus.REQUESTED_RANGE_NOT_SATISFIABLE
        return Response(status_code=status, headers=headers)
    first, end = (0, made.nbytes) if chosen is None else chosen
    headers["Content-Length"] = str(end - first)
    status = HTTPStatus.OK
    if chosen is not None:
        headers["Content-Range"] = f"bytes {first}-{end - 1}/{made.nbytes}"
        status = HTTPStatus.PARTIAL_CONTENT
    parts = made.part(first, end)
    return DownloadResponse(parts, closing.pop_all(), status=status, headers=headers)


def _list_capture(answers: Sequence[Captured]) -> dict[str, Any]:
    first = answers[0]
    more = {"points": first.points, "encoder": first.encoder, "answers": len(answers)}
    named = {"label": first.label, "owner": first.owner}
    more |= {name: value for name, value in named.items() if value}
    return {**capture_fields(first.stream, answers), **more}


def _asking_owner(request: Request) -> str | None:
    """Whose captures are asked for; None for everybody's. The proxy says so, and no client can."""
    owner = request.headers.get(OWNER_HEADER)
    if owner is not None and not is_owner(owner):
        raise RequestError(f"{OWNER_HEADER} must be the name of an API key")
    return owner


async def _is_shown(request: Request, stream: int) -> bool:
    """False for another's capture: it is answered like one that does not exist."""
    owner = _asking_owner(request)
    if owner is None:
        return True
    engine = require_engine(request.app)
    if captured := await engine.captured(stream, is_ended=False):
        return captured[0].owner == owner
    folders = await _find_folders(engine, ())
    return await _stored_owners(request).find(stream, folders) == owner


def _stored_owners(request: Request) -> StoredOwners:
    return _app_state(request, OWNERS_ATTRIBUTE, StoredOwners)


def _no_capture(id: str) -> RouteRefusal:
    reason = f"no capture has the id {quote(id)}; GET /v1/captures lists the newest"
    return RouteRefusal(HTTPStatus.NOT_FOUND, StoreError.code, reason)


def _points_param(request: Request) -> tuple[str, ...]:
    given = request.query_params.getlist("point")
    if len(given) > MAX_POINTS:
        raise RequestError(f"{len(given)} points; ask for at most {MAX_POINTS} at once")
    return tuple(str(Point.parse(point)) for point in given)


def _choice_param(request: Request) -> int | None:
    if "choice" not in request.query_params:
        return None
    return _int_param(request, "choice", 0, (1 << 16) - 1, least=0)


def _int_param(request: Request, name: str, default: int, most: int, *, least: int = 1) -> int:
    given = request.query_params.get(name, str(default))
    is_number = given.isascii() and given.isdecimal() and len(given) < 10
    if not is_number or not least <= int(given) <= most:
        raise RequestError(f"{name} must be a whole number of {least} to {most}")
    return int(given)
