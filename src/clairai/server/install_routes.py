"""Adds clairai's routes and middleware to vLLM's API server.

Runs in: the API server, called by the plugin. Answers carry only the fixed texts of our errors.
"""

from __future__ import annotations

import asyncio
import logging
from http import HTTPStatus
from typing import Any, Final

import msgspec
from fastapi import APIRouter, FastAPI, Request
from fastapi.responses import JSONResponse, Response

from clairai.errors import ClairaiError, ConfigError
from clairai.local.heartbeat import Heartbeat
from clairai.local.thread_switch import switch_threads_often
from clairai.server import capture_routes, probe_routes, steering_routes, weights_routes
from clairai.server.core_group import CoreGroup
from clairai.server.engine_rpc import (
    ATTRIBUTE,
    NO_TAPS,
    EngineRpc,
    RouteRefusal,
    on_error,
    on_route_refusal,
    require_engine,
)
from clairai.server.error_reasons import ErrorReasons
from clairai.server.model_cards import ModelCards
from clairai.server.request_check import COMPLETION_PATHS, RequestCheck

BEAT_S: Final = 0.5
_TOKENS: Final = "clairai_tokens"
_BEATING: Final = "clairai_beating"
_LINK_WATCH: Final = "clairai_link_watch"
_log: Final = logging.getLogger(__name__)


class TokenTable:
    """The bytes of every token as one JSON document, made when first asked for."""

    def __init__(self, client: Any) -> None:
        self._client = client
        self._making = asyncio.Lock()
        self._answer: bytes | None = None

    async def answer(self) -> bytes:
        from clairai.compat.api_server import fetch_tokenizer, list_token_bytes

        async with self._making:
            if self._answer is None:
                tokenizer = await fetch_tokenizer(self._client)
                # A quarter of a million tokens takes a second: in a thread, beside the event loop.
                pieces = await asyncio.to_thread(list_token_bytes, tokenizer)
                self._answer = msgspec.json.encode({"tokens": pieces})
        return self._answer


def attach(app: FastAPI) -> None:
    """Add routes and middleware; until `connect` the routes answer that there are no taps."""
    router = APIRouter(prefix="/v1")
    router.add_api_route("/clairai", describe, methods=["GET"])
    router.add_api_route("/clairai/alive", check_alive, methods=["GET"])
    router.add_api_route("/clairai/tokens", list_tokens, methods=["GET"])
    probe_routes.add_routes(router)
    steering_routes.add_routes(router)
    capture_routes.add_routes(router)
    weights_routes.add_routes(router)
    app.include_router(router)
    put_completions_first(app)
    app.add_exception_handler(ClairaiError, on_error)
    app.add_exception_handler(RouteRefusal, on_route_refusal)
    app.add_middleware(RequestCheck)
    app.add_middleware(ModelCards)
    app.add_middleware(ErrorReasons)


def put_completions_first(app: FastAPI) -> None:
    """A route is searched for in order, and a second time for vLLM's metrics of it.

    vLLM 0.32 has 17 others before the chats' (entrypoints/launchers/api_server/routers.py).
    """
    app.router.routes.sort(key=lambda route: getattr(route, "path", None) not in COMPLETION_PATHS)


def connect(client: Any, state: Any) -> None:
    from clairai.compat.api_server import is_one_of_several_servers, watch_other_calls
    from clairai.compat.engine_cores import (
        find_core_calls,
        find_runtime_dir,
        is_core_group,
        share_weight_calls,
    )
    from clairai.compat.install import accepts_weights

    takes_weights = accepts_weights(getattr(client, "vllm_config", None))
    is_shared = is_one_of_several_servers(client)
    switch_threads_often()
    cores = None
    if is_core_group(client):
        cores = CoreGroup(find_core_calls(client), find_runtime_dir(client))
    engine = EngineRpc(client, is_shared=is_shared, accepts_weights=takes_weights, cores=cores)
    if takes_weights:
        if cores is not None:
            share_weight_calls(client, cores)
        watch_other_calls(client, engine.weight_versions.other_call)
    setattr(state, ATTRIBUTE, engine)


async def beat(heartbeat: Heartbeat) -> None:
    """Beat for as long as the event loop goes round."""
    while True:
        heartbeat.beat()
        await asyncio.sleep(BEAT_S)


def start_beating(state: Any) -> Heartbeat | None:
    """Only under a launcher that watches this process; else None."""
    heartbeat = Heartbeat.open("api-server")
    if heartbeat is not None:
        setattr(state, _BEATING, asyncio.get_running_loop().create_task(beat(heartbeat)))
    return heartbeat


def start_link_watch(client: Any, state: Any, heartbeat: Heartbeat) -> None:
    """Tell the launcher when the connection to the engine core breaks."""
    from clairai.compat.core_link import is_link_stable

    if is_link_stable(client):
        watch = report_broken_link(client, heartbeat)
        setattr(state, _LINK_WATCH, asyncio.get_running_loop().create_task(watch))


async def report_broken_link(client: Any, heartbeat: Heartbeat) -> None:
    """Wait until it breaks, which nothing mends: the launcher then ends or restarts the engine."""
    from clairai.compat.core_link import has_link_broken

    if await has_link_broken(client):
        _log.error("the connection to the engine core is broken: no request can be answered")
        heartbeat.report_cut_off()


def connect_tokens(client: Any, state: Any) -> None:
    """Called without taps too: tokens do not depend on them."""
    setattr(state, _TOKENS, TokenTable(client))


async def describe(request: Request) -> JSONResponse:
    cores = await require_engine(request.app).describe_cores()
    found = cores[0]
    content = {
        "model": found.model,
        "points": found.points,
        "width": found.width,
        "capacity": found.capacity,
        "epoch": f"{found.epoch:016x}",
        "published": sum(core.published for core in cores),
    }
    if len(cores) > 1:
        content["cores"] = [
            {"epoch": f"{core.epoch:016x}", "published": core.published} for core in cores
        ]
    return JSONResponse(content)


async def check_alive(request: Request) -> JSONResponse:
    """Whether the engine core answers; 503 if not."""
    await require_engine(request.app).check_alive()
    return JSONResponse({"answers": True})


async def list_tokens(request: Request) -> Response:
    """`{"tokens": [...]}`: by token id, its bytes in base64; special tokens by their name."""
    tokens = getattr(request.app.state, _TOKENS, None)
    if tokens is None:
        raise RouteRefusal(HTTPStatus.NOT_FOUND, ConfigError.code, NO_TAPS)
    return Response(await tokens.answer(), media_type="application/json")
