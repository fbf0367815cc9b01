"""The server of a fake engine; it records what it is asked."""

from __future__ import annotations

import asyncio
import base64
import json
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import msgspec
from aiohttp import web

from clairai.errors import ClairaiError
from clairai.wire.control_messages import ListedProbe
from clairai.wire.ring_messages import Bank
from tests.http import vllm_wire
from tests.http.fake import BANK, TOKEN_BYTES, Exchange, Ring, Script, answering, refusal
from tests.http.fake_captures import Captures
from tests.http.fake_steering import Steering, applied
from tests.http.fake_weights import Weights

# Routes of vLLM's own that the proxy passes on.
VLLM_POSTS = (
    "/v1/messages",
    "/v1/embeddings",
    "/inference/v1/generate",
    "/v1/audio/transcriptions",
)
ROOT = "/srv/models/of-somebody/toy"  # the folder of the model
CONTROL_PATHS = ("/v1/clairai", "/v1/probes", "/v1/steering", "/v1/captures", "/v1/models")


@dataclass
class Upstream:
    """The server; `script` answers the next completions, `seen` keeps what was asked."""

    script: Script
    epoch: int | None = None
    core_epochs: tuple[int, ...] = ()  # of an engine with several cores
    ring: Ring | None = None
    has_routes: bool = True
    key: str | None = None
    metrics: str = "# TYPE vllm:num_requests_running gauge\nvllm:num_requests_running 0.0\n"
    control_status: int | None = None  # what clairai's routes answer instead; 0: nothing, ever
    num_health_checks: int = 0
    bank: Bank = BANK  # what GET /v1/probes lists
    listing: threading.Event | None = None  # that answer is held until it is set
    waits_for: set[str] = field(default_factory=set)  # paths that are answered when all were asked
    seen: list[Exchange] = field(default_factory=list)
    probes: list[tuple[str, str, bytes]] = field(default_factory=list)
    steering: Steering = field(default_factory=Steering)
    captures: Captures = field(default_factory=Captures)
    weights: Weights = field(default_factory=Weights)
    changed: threading.Condition = field(default_factory=threading.Condition)

    def app(self) -> web.Application:
        app = web.Application(client_max_size=1 << 30, middlewares=[self._break_control])
        app.router.add_post("/v1/chat/completions", self._complete)
        app.router.add_post("/v1/completions", self._complete)
        app.router.add_post("/v1/responses", self._complete)
        for path in VLLM_POSTS:
            app.router.add_post(path, self._complete)
        app.router.add_get("/version", self._version)
        app.router.add_get("/metrics", self._metrics)
        app.router.add_get("/v1/responses/{id}", self._stored_response)
        app.router.add_get("/health", self._health)
        app.router.add_get("/v1/models", self._models)
        app.router.add_post("/tokenize", self._echo)
        app.router.add_post("/detokenize", self._echo)
        if self.has_routes:
            app.router.add_get("/v1/clairai", self._describe)
            app.router.add_get("/v1/clairai/alive", self._alive)
            app.router.add_get("/v1/clairai/tokens", self._tokens)
            app.router.add_get("/v1/probes", self._list_probes)
            app.router.add_put("/v1/probes/{name:.+}", self._change_probe)
            app.router.add_delete("/v1/probes/{name:.+}", self._change_probe)
            self.steering.add_to(app)
            self.captures.add_to(app)
            self.weights.add_to(app)
        return app

    def forget(self) -> None:
        with self.changed:
            self.script = answering([72, 105])
            self.control_status = self.listing = None
            self.bank = BANK
            self.seen.clear()
            self.probes.clear()
            self.steering.forget()
            self.captures.forget()
            self.weights.asked.clear()

    def wait_for(self, condition: Callable[[], object], timeout_s: float = 30.0) -> None:
        """Called in the test: until something that was asked or ended makes it true."""
        with self.changed:
            assert self.changed.wait_for(condition, timeout_s), "upstream did not get there"

    @property
    def last(self) -> Exchange:
        return self.seen[-1]

    async def _complete(self, request: web.Request) -> web.StreamResponse:
        if self.key is not None and request.headers.get("Authorization") != f"Bearer {self.key}":
            return web.json_response({"error": {"message": "Unauthorized"}}, status=401)
        raw = await request.read()
        try:
            body = json.loads(raw)
        except ValueError:
            body = None
        exchange = Exchange(
            body, raw, dict(request.headers), "chat" in request.path, self.ring, request
        )
        self._note(self.seen.append, exchange)
        if not isinstance(body, dict):
            return refusal(400, "no object of JSON")
        if self.has_routes:
            try:
                exchange.echo = applied(body.get("vllm_xargs"))
            except ClairaiError as error:
                return refusal(400, error.reason, code=error.code)
        try:
            made = await self.script(exchange)
        except (asyncio.CancelledError, ConnectionError):
            exchange.was_cancelled = True
            raise
        finally:
            self._note(setattr, exchange, "ended_s", time.monotonic())
        response = made if made is not None else exchange.response
        assert response is not None
        return response

    def _note(self, act: Callable[..., object], *args: Any) -> None:
        with self.changed:
            act(*args)
            self.changed.notify_all()

    @web.middleware
    async def _break_control(self, request: web.Request, handler: Any) -> web.StreamResponse:
        if request.path in self.waits_for:
            self.waits_for.discard(request.path)
            while self.waits_for:  # noqa: ASYNC110  a test's few requests
                await asyncio.sleep(0)
        is_broken = self.control_status is not None and request.path.startswith(CONTROL_PATHS)
        if not is_broken:
            return await _answer_as_vllm(handler, request)
        if not self.control_status:
            await asyncio.Event().wait()
        return refusal(self.control_status or 500, "broken", code="engine-gone")

    async def _alive(self, _: web.Request) -> web.Response:
        return web.json_response({"answers": True})

    async def _health(self, _: web.Request) -> web.Response:
        self.num_health_checks += 1
        return web.Response()

    async def _version(self, _: web.Request) -> web.Response:
        return web.json_response({"version": "0.32.0"})

    async def _stored_response(self, request: web.Request) -> web.Response:
        return refusal(404, f"Response with id {request.raw_path!r} not found.")

    async def _metrics(self, _: web.Request) -> web.Response:
        return web.Response(text=self.metrics, headers={"Content-Type": "text/plain"})

    async def _models(self, _: web.Request) -> web.Response:
        headers = {"Access-Control-Allow-Origin": "*", "X-Extra": "kept"}
        model = {"id": vllm_wire.MODEL, "object": "model", "root": ROOT, "max_model_len": 4096}
        return web.json_response({"object": "list", "data": [model]}, headers=headers)

    async def _echo(self, request: web.Request) -> web.Response:
        try:
            return web.json_response({"path": request.path, "got": await request.json()})
        except ValueError:
            return refusal(400, "not JSON")

    async def _describe(self, _: web.Request) -> web.Response:
        if self.epoch is None:
            return refusal(404, "no taps", code="config")
        about: dict[str, Any] = {
            "model": vllm_wire.MODEL,
            "points": ["pre_attn.0"],
            "width": 8,
            "capacity": 2,
        }
        if self.core_epochs:
            about["cores"] = [{"epoch": f"{one:016x}", "published": 1} for one in self.core_epochs]
        return web.json_response({**about, "epoch": f"{self.epoch:016x}", "published": 3})

    async def _tokens(self, _: web.Request) -> web.Response:
        return web.json_response({"tokens": [base64.b64encode(t).decode() for t in TOKEN_BYTES]})

    async def _list_probes(self, _: web.Request) -> web.Response:
        made = self._describe_bank()
        if self.listing is not None:
            self._note(self.probes.append, ("GET", "", b""))
            assert await asyncio.to_thread(self.listing.wait, 60)
        return made

    def _describe_bank(self) -> web.Response:
        if self.epoch is None:
            return refusal(404, "no taps", code="config")
        listed = (ListedProbe(*msgspec.structs.astuple(info)) for info in self.bank.probes)
        data = [msgspec.to_builtins(probe) for probe in listed]
        return web.json_response({"data": data, "capacity": 2, "version": self.bank.version})

    async def _change_probe(self, request: web.Request) -> web.Response:
        name, data = request.match_info["name"], await request.read()
        self._note(self.probes.append, (request.method, name, data))
        if name == "unknown":
            return refusal(404, "no such probe", code="probe")
        if name == "lost":  # it happens, and its answer does not arrive
            assert request.transport is not None
            request.transport.abort()
        return self._describe_bank()


async def _answer_as_vllm(handler: Any, request: web.Request) -> web.StreamResponse:
    try:
        response: web.StreamResponse = await handler(request)
        return response
    except (web.HTTPNotFound, web.HTTPMethodNotAllowed) as error:
        return refusal(error.status, error.reason)
