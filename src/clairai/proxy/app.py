"""Builds the proxy: an ASGI app with the routes of `routes.py`, and the server for it."""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from functools import partial
from http import HTTPStatus
from importlib.metadata import version
from typing import Any, Final, cast

import uvicorn
from fastapi import FastAPI, Request
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.responses import Response

from clairai.proxy.body_reader import declared_length, read_body
from clairai.proxy.connections import Connections, most_connections, peer_name
from clairai.proxy.dashboard import Dashboard
from clairai.proxy.direct_routes import ANSWERED_ERRORS, DirectRoutes, Endpoint, ErrorHandler
from clairai.proxy.handlers import HANDLERS, HandlerCall, load_examples
from clairai.proxy.http_protocol import BacklogServer, BoundedProtocol, Turns, quiet_connection_log
from clairai.proxy.observe.observer import MetricsObserver, Observer
from clairai.proxy.processes.first_process import CompletionProcesses
from clairai.proxy.processes.moving_protocol import MovingProtocol
from clairai.proxy.processes.servers import CompletionServer, FirstProcess, SharingServer
from clairai.proxy.processes.shared_counts import SharedCounts
from clairai.proxy.proxy import Proxy
from clairai.proxy.proxy_settings import ProxySettings
from clairai.proxy.request_guard import REPLICA, SECURITY_HEADERS, RequestGuard, check_access
from clairai.proxy.responses import ClientGone, HttpRefusal, error_response, while_connected
from clairai.proxy.routes import ROUTES, Route, describe_route, openapi_document
from clairai.proxy.upstream import UpstreamGone

_log: Final = logging.getLogger(__name__)
GRACE_S: Final = 2
# Headers that pages of allowed origins may send and read.
_SENT_BY_PAGES: Final = (
    *("Authorization", "Content-Type", "Last-Event-ID", "If-Match", "If-None-Match"),
    *("Range", "If-Range", "X-Clairai-Scores"),
)
_READ_BY_PAGES: Final = (
    *("X-Clairai-Run", "X-Clairai-Lost", "X-Clairai-Unscored", REPLICA),
    *("ETag", "Content-Range", "Accept-Ranges"),
)


def create_app(
    settings: ProxySettings,
    *,
    observers: Sequence[Observer] = (),
    metrics: MetricsObserver | None = None,
    shared: SharedCounts | None = None,
) -> FastAPI:
    """`metrics` is an observer that also answers GET /metrics. `app.state.proxy` is the Proxy.

    With several completion processes each has observers of its own, and this one sees what the
    first process answers. `shared` is for such a process.
    """
    proxy = _create_proxy(settings, observers, metrics, shared)
    dashboard, examples = Dashboard.read(settings.page), load_examples(settings.examples)

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        await proxy.open()
        try:
            yield
        finally:
            await proxy.close()

    app = FastAPI(
        title="clairai",
        version=version("clairai"),
        docs_url=None,
        redoc_url=None,
        openapi_url=None,
        redirect_slashes=False,
        lifespan=lifespan,
    )
    app.state.proxy = proxy
    for route in ROUTES:
        endpoint = _make_endpoint(route, proxy, dashboard, examples)
        app.add_api_route(route.path, endpoint, methods=[route.method], **describe_route(route))
    app.openapi = lambda: openapi_document(app)  # type: ignore[method-assign]
    answer_error = _make_error_handler(proxy)
    for kind in (*ANSWERED_ERRORS, Exception):
        app.add_exception_handler(kind, answer_error)
    _add_middleware(app, settings, answer_error)
    return app


def _create_proxy(
    settings: ProxySettings,
    observers: Sequence[Observer],
    metrics: MetricsObserver | None,
    shared: SharedCounts | None,
) -> Proxy:
    if shared is not None or settings.completion_processes == 1:
        return Proxy(settings, observers, metrics, shared)
    counts, memory_fd = SharedCounts.create(1 + settings.completion_processes)
    proxy = Proxy(settings, observers, metrics, counts)
    proxy.processes = CompletionProcesses(proxy, counts, memory_fd)
    return proxy


def _make_endpoint(route: Route, proxy: Proxy, dashboard: Dashboard, examples: bytes) -> Endpoint:
    """The route's handler, behind the checks that the table asks for."""
    handler = HANDLERS[route.handler]

    async def answer(request: Request) -> Response:
        caller = request.state.caller = check_access(request, route, proxy.settings)
        if route.body == "file":  # reading it shows whether the client is still there
            return await handler(HandlerCall(proxy, dashboard, examples, request, caller, None))
        if route.body == "none":
            call = HandlerCall(proxy, dashboard, examples, request, caller, None)
            return await while_connected(request, handler(call))
        client = caller.name or peer_name(None if request.client is None else request.client.host)
        with proxy.bodies.hold(client) as hold:  # until upstream has it
            body = await _receive_body(proxy, request, route, client, hold)
            call = HandlerCall(proxy, dashboard, examples, request, caller, body)
            return await while_connected(request, handler(call))

    async def endpoint(request: Request) -> Response:
        response = await answer(request)
        label = request.headers.get("x-request-id")
        if label is not None:  # the client's own; the engine has an id that the proxy made
            response.headers["X-Request-Id"] = label
        return response

    return endpoint


async def _receive_body(
    proxy: Proxy, request: Request, route: Route, client: str, hold: Callable[[int], None]
) -> bytes:
    """The body, as large and as fast as this client may send it."""
    settings = proxy.settings
    limit = route.body_limit(settings.limits)
    if route.body != "json":
        return await read_body(request, limit=limit, settings=settings, take=hold)
    proxy.byte_rates.check(client, min(declared_length(request) or 0, limit))

    def take(nbytes: int) -> None:
        hold(nbytes)
        proxy.byte_rates.take(client, nbytes)

    return await read_body(request, limit=limit, settings=settings, take=take)


def _add_middleware(app: FastAPI, settings: ProxySettings, answer_error: ErrorHandler) -> None:
    proxy: Proxy = app.state.proxy
    app.add_middleware(DirectRoutes, routes=app.routes, answer_error=answer_error)
    app.add_middleware(
        RequestGuard,
        settings=settings,
        on_refusal=proxy.count_refusal,
        on_answer=proxy.count_answer,
    )
    if settings.allowed_origins:
        app.add_middleware(
            CORSMiddleware,
            allow_origins=settings.allowed_origins,
            allow_methods=sorted({route.method for route in ROUTES}),
            allow_headers=_SENT_BY_PAGES,
            expose_headers=_READ_BY_PAGES,
        )


def _make_error_handler(proxy: Proxy) -> ErrorHandler:
    """Answers every error in OpenAI's shape, with fixed texts of our own."""

    async def answer_error(_: Request, error: Exception) -> Response:
        if isinstance(error, HttpRefusal):
            proxy.count_refusal(error.status)
            return error_response(error)
        if isinstance(error, UpstreamGone):
            proxy.upstream.num_errors += 1
            return error_response(proxy.health.refusal())
        if isinstance(error, ClientGone):
            return Response(status_code=499)  # nobody reads it
        if isinstance(error, HTTPException):
            return _answer_http_error(error)
        return _answer_internal_error(error)

    return answer_error


def _answer_http_error(error: HTTPException) -> Response:
    """Answer a path or a method that no route has."""
    status = HTTPStatus(error.status_code)
    message = f"{status.phrase.lower()}; GET /openapi.json lists the routes"
    return error_response(HttpRefusal(status, message, headers=dict(error.headers or {})))


def _answer_internal_error(error: Exception) -> Response:
    """Log a bug of ours; the client learns nothing of it."""
    _log.error("a request failed", exc_info=error)
    refusal = HttpRefusal(HTTPStatus.INTERNAL_SERVER_ERROR, "the proxy failed; see its log")
    response = error_response(refusal)
    for name, value in SECURITY_HEADERS:  # the guard does not see this response
        response.headers[name] = value
    return response


def create_server(app: FastAPI, settings: ProxySettings) -> uvicorn.Server:
    """Run it with `.run()`, or in an event loop with `await .serve()`.

    Its connections read heads themselves (request_head.py) and leave to h11 what is not plain: of a
    head that httptools reads, no header is bounded before the app sees it.
    """
    proxy: Proxy = app.state.proxy
    connections = proxy.connections = Connections(most_connections(settings.limits.connections))
    shown = _protocol_arguments(proxy, settings)
    config = _server_config(
        app, settings, partial(BoundedProtocol, connections=connections, **shown)
    )
    config.backlog = connections.most_at_once
    if proxy.processes is None:
        return BacklogServer(config)
    moving = partial(MovingProtocol, mover=proxy.processes, **shown)
    return SharingServer(config, moving, proxy.processes, connections)


def create_completion_server(
    app: FastAPI, settings: ProxySettings, first: FirstProcess
) -> CompletionServer:
    """The server of a completion process; `first` is its link to the first process."""
    moving = partial(MovingProtocol, mover=first, **_protocol_arguments(app.state.proxy, settings))
    return CompletionServer(_server_config(app, settings, moving), moving, first)


def _protocol_arguments(proxy: Proxy, settings: ProxySettings) -> dict[str, Any]:
    return {"settings": settings, "turns": Turns(), "on_refusal": proxy.count_refusal}


def _server_config(
    app: FastAPI, settings: ProxySettings, protocol: Callable[..., asyncio.Protocol]
) -> uvicorn.Config:
    quiet_connection_log()
    return uvicorn.Config(
        app,
        host=settings.host,
        port=settings.port,
        http=cast(type[asyncio.Protocol], protocol),
        ws="none",
        lifespan="on",
        log_config=None,
        access_log=False,
        server_header=False,
        proxy_headers=False,
        h11_max_incomplete_event_size=settings.limits.header_bytes,
        timeout_keep_alive=math.ceil(settings.timeouts.idle),
        timeout_graceful_shutdown=GRACE_S,
    )
