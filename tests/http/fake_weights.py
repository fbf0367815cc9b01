"""The routes under /v1/weights of a fake engine, which reads manifests."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field

from aiohttp import web

from clairai.errors import WeightsError, WeightsTornError
from clairai.weights.manifest import parse_manifest
from tests.http.fake import refusal

STATE = {
    "version": 3,
    "label": "step-3",
    "digest": "0123456789abcdef0123456789abcdef",
    "epoch": "00000000000000aa",
    "device": "cpu",
    "num_tensors": 1,
    "is_torn": False,
    "devices": ["cpu"],
    "ranks": [{"epoch": "00000000000000aa", "rank": 0, "has_bank": True}],
}
TENSOR = {"name": "model.norm.weight", "dtypes": ["F32", "BF16"], "shape": [8]}
UNPLANNED = "0" * 32
COMMITTED = {
    "version": 4,
    "digest": "ab",
    "nbytes": 32,
    "load_s": 0.5,
    "bank_version": None,
    "vectors_version": None,
}


@dataclass
class Weights:
    """The routes; `asked` has the path with its query, and the body."""

    asked: list[tuple[str, bytes]] = field(default_factory=list)
    stops_half_way: bool = False  # when weights are committed

    def add_to(self, app: web.Application) -> None:
        app.router.add_get("/v1/weights", self._state)
        app.router.add_get("/v1/weights/tensors", self._tensors)
        for name in ("check", "plan", "commit"):
            app.router.add_post(f"/v1/weights/{name}", self._take)
        app.router.add_put("/v1/weights/buffers/{transfer}/{index}", self._put)

    async def _state(self, request: web.Request) -> web.Response:
        self.asked.append((request.path_qs, b""))
        return web.json_response(STATE)

    async def _tensors(self, request: web.Request) -> web.Response:
        self.asked.append((request.path_qs, b""))
        return web.json_response({"data": [TENSOR]})

    async def _put(self, request: web.Request) -> web.Response:
        """As the engine: what is not planned is refused before it is read."""
        if request.match_info["transfer"] == UNPLANNED:
            return refusal(400, "is not planned here", code=WeightsError.code)
        hashed = hashlib.sha256()
        async for piece in request.content.iter_any():
            hashed.update(piece)
        self.asked.append((request.path_qs, hashed.digest()))
        return web.Response(status=204)

    async def _take(self, request: web.Request) -> web.Response:
        body = await request.read()
        self.asked.append((request.path_qs, body))
        try:
            manifest = parse_manifest(body)
        except WeightsError as error:
            return refusal(400, error.reason, code=error.code)
        if request.path.endswith("commit") and self.stops_half_way:
            return refusal(500, "loading stopped half-way", code=WeightsTornError.code)
        if request.path.endswith("commit"):
            return web.json_response(COMMITTED)
        nbytes = sum(manifest.buffers)
        return web.json_response({"transfer": manifest.transfer, "nbytes": nbytes})
