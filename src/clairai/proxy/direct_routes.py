"""Calls the endpoint of a route without parameters straight from its method and path.

FastAPI tries one route after the other, and wraps each call in exit stacks and dependencies that no
route of ours has. It still answers every other path. Runs in: the proxy, on the event loop.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from typing import Final

from fastapi.routing import APIRoute
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute
from starlette.types import ASGIApp, Receive, Scope, Send

from clairai.proxy.request_guard import GuardedRequest
from clairai.proxy.responses import ClientGone, HttpRefusal
from clairai.proxy.upstream import UpstreamGone

Endpoint = Callable[[Request], Awaitable[Response]]
ErrorHandler = Callable[[Request, Exception], Awaitable[Response]]
# Errors of an endpoint that are answers; any other is a bug of ours.
ANSWERED_ERRORS: Final = (HttpRefusal, UpstreamGone, ClientGone, HTTPException)


class DirectRoutes:
    """ASGI middleware within the guard, around the routes, which get what is not in its table."""

    def __init__(
        self, app: ASGIApp, *, routes: Sequence[BaseRoute], answer_error: ErrorHandler
    ) -> None:
        self._app = app
        self._answer_error = answer_error
        self._routes: dict[tuple[str, str], APIRoute] = {
            (method, route.path): route
            for route in routes
            if isinstance(route, APIRoute) and not route.param_convertors
            for method in route.methods
        }

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        is_http = scope["type"] == "http"
        route = self._routes.get((scope["method"], scope["path"])) if is_http else None
        if route is None:
            await self._app(scope, receive, send)
            return
        scope["route"], scope["path_params"] = route, {}
        request = GuardedRequest(scope, receive, send)
        try:
            response: Response = await route.endpoint(request)
        except ANSWERED_ERRORS as error:
            response = await self._answer_error(request, error)
        await response(scope, receive, send)
