"""The routes under /v1/steering of a fake engine, which keeps vectors and tiers."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass, field
from typing import Any

from aiohttp import web

from clairai.errors import ClairaiError
from clairai.fields.request_fields import parse_fields
from clairai.fields.steer import parse_entries
from tests.http.fake import refusal
from tests.http.fake_captures import handle

POINTS = ["post_block.1", "post_block.3"]
WIDTH = 8
OFF = "this engine cannot steer"


@dataclass
class Steering:
    """The routes; `is_on` is whether the engine was started to steer."""

    is_on: bool = True
    vectors: dict[str, bytes] = field(default_factory=dict)
    tiers: dict[str, Any] = field(default_factory=lambda: {"base": [], "prefill": [], "decode": []})
    asked: list[tuple[str, str, dict[str, str]]] = field(default_factory=list)

    def forget(self) -> None:
        self.is_on = True
        self.vectors.clear()
        self.asked.clear()
        self.tiers.update(base=[], prefill=[], decode=[])

    def add_to(self, app: web.Application) -> None:
        app.router.add_get("/v1/steering", self._tiers)
        app.router.add_post("/v1/steering", self._set_tiers)
        app.router.add_post("/v1/steering/requests/{name}", self._amend)
        app.router.add_get("/v1/steering/vectors", self._list)
        for method, route in (("GET", self._get), ("PUT", self._put), ("DELETE", self._remove)):
            app.router.add_route(method, "/v1/steering/vectors/{name:.*}", route)

    def _note(self, request: web.Request) -> web.Response | None:
        name = request.match_info.get("name", "")
        self.asked.append((request.method, name, dict(request.headers)))
        return None if self.is_on else refusal(409, OFF, code="steering-off")

    async def _list(self, request: web.Request) -> web.Response:
        return self._note(request) or self._listed(200)

    async def _get(self, request: web.Request) -> web.Response:
        name = request.match_info["name"]
        if no := self._note(request):
            return no
        if name not in self.vectors:
            return refusal(404, "no vector is named so", code="vector")
        tag = f'"{digest_of(self.vectors[name])}"'
        if request.headers.get("If-None-Match") == tag:
            return web.Response(status=304, headers={"ETag": tag})
        kind = "application/octet-stream"
        return web.Response(body=self.vectors[name], headers={"ETag": tag, "Content-Type": kind})

    async def _put(self, request: web.Request) -> web.Response:
        name, data = request.match_info["name"], await request.read()
        if no := self._note(request):
            return no
        is_new = name not in self.vectors
        self.vectors[name] = data
        return self._listed(201 if is_new else 200)

    async def _remove(self, request: web.Request) -> web.Response:
        if no := self._note(request):
            return no
        if self.vectors.pop(request.match_info["name"], None) is None:
            return refusal(404, "no vector is named so", code="vector")
        return self._listed(200)

    async def _tiers(self, request: web.Request) -> web.Response:
        return self._note(request) or web.json_response({**self.tiers, "version": 1})

    async def _set_tiers(self, request: web.Request) -> web.Response:
        if no := self._note(request):
            return no
        try:
            given = json.loads(await request.read())
            assert isinstance(given, dict)
            assert given.keys() <= self.tiers.keys()
            read = {tier: parse_entries(given[tier], what=tier) for tier in given}
        except (ValueError, AssertionError, ClairaiError):
            return refusal(400, "these are no tiers", code="request")
        self.tiers.update({tier: [one.describe() for one in read[tier]] for tier in read})
        return web.json_response({**self.tiers, "version": 2})

    async def _amend(self, request: web.Request) -> web.Response:
        if no := self._note(request):
            return no
        try:
            given = json.loads(await request.read())
            entries = parse_entries(given["steer"], what="steer")
        except (ValueError, TypeError, KeyError, ClairaiError):
            return refusal(400, "no object with steer", code="request")
        applied = [one.describe() for one in entries]
        return web.json_response({"positions": [9], "steering": applied})

    def _listed(self, status: int) -> web.Response:
        data = [_about(name, raw) for name, raw in self.vectors.items()]
        capacity = {"rows": 64, "programs": 64}
        made = {"data": data, "version": 1, "points": POINTS, "width": WIDTH, "capacity": capacity}
        return web.json_response(made, status=status)


def applied(xargs: Any) -> dict[str, Any] | None:
    """What an engine with clairai's routes says of a request; ClairaiError as it would refuse."""
    wanted = parse_fields(xargs)
    is_captured = wanted.capture is not None and wanted.capture.is_wanted
    kept = {"capture": handle(f"{wanted.stream:016x}", state="open")} if is_captured else {}
    if not wanted.steer and not wanted.stop:
        return kept or None
    entries = [
        {**entry.describe(), "digest": digest_of(b""), "points": POINTS}
        | {"vector": entry.vector if isinstance(entry.vector, str) else None}
        for entry in wanted.steer
    ]
    made: dict[str, Any] = {"steering": entries}
    rules = [rule.to_json() for rule in wanted.stop]
    return made | ({"stop": rules} if rules else {}) | kept


def digest_of(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def _about(name: str, data: bytes) -> dict[str, Any]:
    made = {"name": name, "points": POINTS, "width": WIDTH, "digest": digest_of(data)}
    return {**made, "norms": [1.0, 1.0], "description": None, "method": None, "scale": 1.0}
