"""Takes the headers of a request for a file; gives the range of bytes that it asks for.

RFC 9110, 14.1 and 14.2: one range; a header that asks for several, or that is not understood, is
passed over, and the file given whole.
"""

from __future__ import annotations

import asyncio
import re
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from http import HTTPStatus
from pathlib import Path
from typing import Any, Final

import msgspec
from fastapi import APIRouter, Request
from fastapi.responses import Response, StreamingResponse

from clairai.errors import RequestError, StoreError
from clairai.points import Point, quote
from clairai.server.engine_rpc import EngineRpc, HttpRefusal, require_engine
from clairai.server.response_fields import capture_fields, is_settled, wait_settled
from clairai.store.bundle import Bundle, bundle
from clairai.store.disk import MANIFEST
from clairai.store.read import Store
from clairai.store.read import open as open_store
from clairai.wire import capture_messages
from clairai.wire.capture_messages import Captured

_RANGE: Final = re.compile(r"\s*bytes\s*=\s*(\d{0,19})\s*-\s*(\d{0,19})\s*", re.ASCII)


@dataclass(frozen=True)
class WholeFile:
    """All of it."""


@dataclass(frozen=True)
class NotSatisfiable:
    """No byte of it."""


WHOLE_FILE: Final = WholeFile()
NOT_SATISFIABLE: Final = NotSatisfiable()


def requested_range(
    headers: Mapping[str, str], etag: str, nbytes: int
) -> tuple[int, int] | WholeFile | NotSatisfiable:
    """Bytes [first, end). A range of another version of the file is not given: If-Range."""
    found = _RANGE.fullmatch(headers.get("range", ""))
    if found is None or headers.get("if-range", etag) != etag:
        return WHOLE_FILE
    first, last = found[1], found[2]
    if not first and not last:
        return WHOLE_FILE
    if not first:  # the last so many
        return (max(nbytes - int(last), 0), nbytes) if int(last) and nbytes else NOT_SATISFIABLE
    if last and int(last) < int(first):
        return WHOLE_FILE
    if int(first) >= nbytes:
        return NOT_SATISFIABLE
    return int(first), min(int(last) + 1 if last else nbytes, nbytes)


# MERGED
# Takes requests under /v1/captures of vLLM's API server; gives what was captured, as safetensors.
#
# The engine says what became of a request's rows and which folder has them; the folder is read
# here.


ATTRIBUTE: Final = "clairai_captures"  # of the app's state
MAX_LISTED: Final = 1000
MAX_POINTS: Final = 512
KEPT_NBYTES: Final = 256 << 20  # of files that a client may come back to for the next range
_ID: Final = re.compile(r"[0-9a-f]{16}")
_JSON: Final = "application/json"
_FILE: Final = "application/octet-stream"


def add_routes(router: APIRouter) -> None:
    router.add_api_route("/captures", list_captures, methods=["GET"])
    router.add_api_route("/captures/{id}", get_capture, methods=["GET"])


async def list_captures(request: Request) -> Response:
    """The newest first; `?limit=` of them."""
    engine = require_engine(request.app)
    limit = _int_param(request, "limit", 100, MAX_LISTED)
    found = await engine.ask(capture_messages.ListCaptures(limit), capture_messages.Captures)
    state = await engine.ask(capture_messages.DescribeCapture(), capture_messages.CaptureState)
    content = {
        "data": [_listed(answers) for answers in found.found if answers],
        "consumers": [
            {"name": one.consumer, "state": one.state, "reason": one.reason} for one in state.places
        ],
        "rows": state.rows,
        "dropped": state.dropped,
        "discarded": state.discarded,
        "memory": {
            "stash_nbytes": state.stash_nbytes,
            "staging_nbytes": state.staging_nbytes,
            "pending_nbytes": state.pending_nbytes,
        },
    }
    return Response(msgspec.json.encode(content), media_type=_JSON)


async def get_capture(id: str, request: Request) -> Response:
    """One request's rows: `?point=` some points, `?choice=` one answer, any range of bytes."""
    engine = require_engine(request.app)
    stream = int(id, 16) if _ID.fullmatch(id) else 0
    if not stream:
        raise _no_capture(id)
    asked = _BundleKey(stream, _points_param(request), _choice_param(request))
    found = await _find_kept(engine, id, stream)
    folders = await _folders(engine, found)
    made = await _bundle_cache(request).get(asked, folders)
    if made is None:
        raise _no_capture(id)
    return _file_response(request, id, made, sum(one.lost for one in found))


@dataclass(frozen=True)
class _BundleKey:
    stream: int
    points: tuple[str, ...]
    choice: int | None


class BundleCache:
    """Folders that were opened, and the last bundles; one thread at a time reads."""

    def __init__(self) -> None:
        self._stores: dict[str, Store] = {}
        self._bundles: OrderedDict[tuple[object, ...], Bundle] = OrderedDict()
        self._reading = asyncio.Lock()

    async def get(self, asked: _BundleKey, folders: Sequence[str]) -> Bundle | None:
        """From the first folder that has rows of the request; None if none has."""
        async with self._reading:
            return await asyncio.to_thread(self._get, asked, folders)

    def _get(self, asked: _BundleKey, folders: Sequence[str]) -> Bundle | None:
        for folder in folders:
            store = self._store(folder)
            if store.has(asked.stream):
                names = tuple(entry.name for entry in store.shards_with(asked.stream))
                return self._bundle(store, asked, (folder, names, asked))
        return None

    def _store(self, folder: str) -> Store:
        if folder in self._stores:
            self._stores[folder].refresh()
        else:
            self._stores[folder] = open_store(folder)
        return self._stores[folder]

    def _bundle(self, store: Store, asked: _BundleKey, key: tuple[object, ...]) -> Bundle:
        if key not in self._bundles:
            made = bundle(store, asked.stream, points=asked.points, choice=asked.choice)
            self._bundles[key] = made
        self._bundles.move_to_end(key)
        while len(self._bundles) > 1 and self._nbytes > KEPT_NBYTES:
            self._bundles.popitem(last=False)
        return self._bundles[key]

    @property
    def _nbytes(self) -> int:
        return sum(one.nbytes for one in self._bundles.values())


def _bundle_cache(request: Request) -> BundleCache:
    state = request.app.state
    if not hasattr(state, ATTRIBUTE):
        setattr(state, ATTRIBUTE, BundleCache())
    shelf = getattr(state, ATTRIBUTE)
    assert isinstance(shelf, BundleCache)
    return shelf


async def _find_kept(engine: EngineRpc, id: str, stream: int) -> Sequence[Captured]:
    """What the engine remembers of it, when its rows are safe; nothing of one from before."""
    found = await engine.captured(stream, is_ended=False)
    told = capture_fields(stream, found)
    if found and told["state"] == "writing":
        found = await wait_settled(lambda: engine.captured(stream, is_ended=True))
        told = capture_fields(stream, found)
    if found and told["state"] == "discarded":
        raise HttpRefusal(HTTPStatus.GONE, StoreError.code, f"no rows were kept: {told['reason']}")
    if found and not is_settled(found):
        why = told.get("reason") or "its request has not ended, or its rows are on their way"
        raise HttpRefusal(HTTPStatus.CONFLICT, StoreError.code, f"capture {id} is not whole: {why}")
    return found


async def _folders(engine: EngineRpc, found: Sequence[Captured]) -> list[str]:
    """Where its rows can be: where the engine says, or else anywhere that it writes to."""
    places = [place for one in found for place in one.places]
    if not places:
        state = await engine.ask(capture_messages.DescribeCapture(), capture_messages.CaptureState)
        places = list(state.places)
    named = dict.fromkeys(place.where for place in places)
    return [where for where in named if (Path(where) / MANIFEST).is_file()]


def _file_response(request: Request, id: str, made: Bundle, lost: int) -> Response:
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
    if isinstance(chosen, NotSatisfiable):
        headers["Content-Range"] = f"bytes */{made.nbytes}"
        status = HTTPStatus.REQUESTED_RANGE_NOT_SATISFIABLE
        return Response(status_code=status, headers=headers)
    first, end = (0, made.nbytes) if isinstance(chosen, WholeFile) else chosen
    headers["Content-Length"] = str(end - first)
    if isinstance(chosen, WholeFile):
        return StreamingResponse(made.part(0, end), headers=headers, media_type=_FILE)
    headers["Content-Range"] = f"bytes {first}-{end - 1}/{made.nbytes}"
    parts, status = made.part(first, end), HTTPStatus.PARTIAL_CONTENT
    return StreamingResponse(parts, status, headers, media_type=_FILE)


def _listed(answers: Sequence[Captured]) -> dict[str, Any]:
    first = answers[0]
    about = {"points": first.points, "encoder": first.encoder, "answers": len(answers)}
    return {**capture_fields(first.stream, answers), **about}


def _no_capture(id: str) -> HttpRefusal:
    reason = f"no capture has the id {quote(id)}; GET /v1/captures lists the newest"
    return HttpRefusal(HTTPStatus.NOT_FOUND, StoreError.code, reason)


def _points_param(request: Request) -> tuple[str, ...]:
    given = request.query_params.getlist("point")
    if len(given) > MAX_POINTS:
        raise RequestError(f"{len(given)} points; ask for at most {MAX_POINTS} at once")
    return tuple(str(Point.parse(point)) for point in given)


def _choice_param(request: Request) -> int | None:
    if "choice" not in request.query_params:
        return None
    return _int_param(request, "choice", 0, (1 << 16) - 1, least=0)


def _int_param(request: Request, name: str, usual: int, most: int, *, least: int = 1) -> int:
    given = request.query_params.get(name, str(usual))
    is_number = given.isascii() and given.isdecimal() and len(given) < 10
    if not is_number or not least <= int(given) <= most:
        raise RequestError(f"{name} must be a whole number of {least} to {most}")
    return int(given)
