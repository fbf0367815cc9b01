"""Takes ProxySettings; gives the proxy as an ASGI app: the routes of the table and no others."""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from http import HTTPStatus
from importlib.metadata import version
from typing import Final

from fastapi import FastAPI, Request
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.responses import Response

from clairai.stream.document import document_of, documented
from clairai.stream.guard import SECURITY_HEADERS, Guard, admit, read_body
from clairai.stream.handlers import HANDLERS, Call
from clairai.stream.observe import Exposition, Observer
from clairai.stream.outgoing import ClientGone, while_connected
from clairai.stream.proxy import Proxy
from clairai.stream.reading import load_examples
from clairai.stream.refusal import Refused, answer
from clairai.stream.settings import ProxySettings
from clairai.stream.site import Site
from clairai.stream.table import TABLE, Route
from clairai.stream.upstream import UpstreamGone

_log: Final = logging.getLogger(__name__)
_SENT_BY_PAGES: Final = (
    *("Authorization", "Content-Type", "Last-Event-ID", "If-Match", "If-None-Match"),
    *("Range", "If-Range"),
)
_READ_BY_PAGES: Final = (
    *("X-Clairai-Run", "X-Clairai-Lost"),
    *("ETag", "Content-Range", "Accept-Ranges"),
)


def create_app(
    settings: ProxySettings,
    *,
    observers: Sequence[Observer] = (),
    metrics: Exposition | None = None,
) -> FastAPI:
    """`metrics` observes too, and answers GET /metrics; `app.state.proxy` is the Proxy."""
    proxy = Proxy(settings, observers, metrics)
    site, examples = Site.read(settings.page), load_examples(settings.examples)

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
    for route in TABLE:
        endpoint = _endpoint(route, proxy, site, examples)
        app.add_api_route(route.path, endpoint, methods=[route.method], **documented(route))
    app.openapi = lambda: document_of(app)  # type: ignore[method-assign]
    _add_refusals(app, proxy)
    _add_guards(app, settings)
    return app


def _endpoint(
    route: Route, proxy: Proxy, site: Site, examples: bytes
) -> Callable[[Request], Awaitable[Response]]:
    """The route's handler behind what the table asks of a caller."""
    handler = HANDLERS[route.handler]
    limit = route.body_limit(proxy.settings.limits)

    async def endpoint(request: Request) -> Response:
        admit(request, route, proxy.settings)
        if route.body == "file":  # who reads it sees whether the client is still there
            return await handler(Call(proxy, site, examples, request, None))
        body = await read_body(request, limit) if route.body != "none" else None
        call = Call(proxy, site, examples, request, body)
        return await while_connected(request, handler(call))

    return endpoint


def _add_guards(app: FastAPI, settings: ProxySettings) -> None:
    app.add_middleware(Guard, settings=settings)
    if settings.allowed_origins:
        app.add_middleware(
            CORSMiddleware,
            allow_origins=settings.allowed_origins,
            allow_methods=sorted({route.method for route in TABLE}),
            allow_headers=_SENT_BY_PAGES,
            expose_headers=_READ_BY_PAGES,
        )


def _add_refusals(app: FastAPI, proxy: Proxy) -> None:
    """Every error leaves in OpenAI's shape, in words of our own."""

    async def on_refused(_: Request, error: Exception) -> Response:
        assert isinstance(error, Refused)
        return answer(error)

    async def on_upstream_gone(_: Request, error: Exception) -> Response:
        del error
        proxy.upstream.errors += 1
        return answer(proxy.health.unanswered())

    async def on_client_gone(_: Request, error: Exception) -> Response:
        del error
        return Response(status_code=499)  # nobody reads it

    app.add_exception_handler(Refused, on_refused)
    app.add_exception_handler(UpstreamGone, on_upstream_gone)
    app.add_exception_handler(ClientGone, on_client_gone)
    app.add_exception_handler(HTTPException, _on_http)
    app.add_exception_handler(Exception, _on_mistake)


async def _on_http(_: Request, error: Exception) -> Response:
    """A path or a method that the table does not have."""
    assert isinstance(error, HTTPException)
    status = HTTPStatus(error.status_code)
    message = f"{status.phrase.lower()}; GET /openapi.json lists the routes"
    refused = Refused(status, message, headers=dict(error.headers or {}))
    return answer(refused)


async def _on_mistake(_: Request, error: Exception) -> Response:
    """Ours: the log has it, the client gets no part of it."""
    _log.error("a request failed", exc_info=error)
    made = answer(Refused(HTTPStatus.INTERNAL_SERVER_ERROR, "the proxy failed; see its log"))
    for name, value in SECURITY_HEADERS:  # outside of what would add them
        made.headers[name] = value
    return made
