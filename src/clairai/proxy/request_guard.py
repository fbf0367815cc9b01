"""Refuses requests before anything is done for them: by host name, key, origin and size.

It also adds the security headers that every response carries.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from functools import lru_cache
from http import HTTPStatus
from typing import ClassVar, Final
from urllib.parse import urlsplit

from starlette.datastructures import Headers
from starlette.requests import Request
from starlette.routing import Route as StarletteRoute
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from clairai.proxy.caller import Caller, authorize
from clairai.proxy.proxy_settings import Limits, ProxySettings, is_loopback
from clairai.proxy.responses import HttpRefusal, error_response
from clairai.proxy.routes import Route

_LOOPBACK_NAMES: Final = frozenset(("localhost", "127.0.0.1", "::1"))
_CONTROL: Final = re.compile(rb"[\x00-\x08\x0a-\x1f\x7f]")
_REQUEST_ID: Final = re.compile(rb"[A-Za-z0-9._-]{1,128}")
REPLICA: Final = "X-Clairai-Replica"
OTHER: Final = "other"  # of a request for a path that no route has
SECURITY_HEADERS: Final = (
    ("X-Content-Type-Options", "nosniff"),
    ("Referrer-Policy", "no-referrer"),
    ("X-Frame-Options", "DENY"),
    ("Cross-Origin-Resource-Policy", "same-origin"),
)
RawHeaders = tuple[tuple[bytes, bytes], ...]
_DEFAULT_HEADERS: Final = tuple(
    (name.lower().encode(), value.encode())
    for name, value in (*SECURITY_HEADERS, ("Cache-Control", "no-store"))
)


class IndexedHeaders(Headers):
    """The headers of a request by name: Starlette goes through all of them for each."""

    KEY: ClassVar[str] = "clairai.headers"  # of the scope

    def __init__(self, scope: Scope) -> None:
        super().__init__(scope=scope)
        pairs = ((name.decode("latin-1"), value) for name, value in reversed(self.raw))
        self._first = {name: value.decode("latin-1") for name, value in pairs}

    def __getitem__(self, name: str) -> str:
        return self._first[name.lower()]


class GuardedRequest(Request):
    """A request that has passed the guard."""

    @property
    def headers(self) -> Headers:
        found: Headers = self.scope[IndexedHeaders.KEY]
        return found


class RequestGuard:
    """ASGI middleware around all routes, including those that do not exist."""

    def __init__(
        self,
        app: ASGIApp,
        settings: ProxySettings,
        on_refusal: Callable[[int], None],
        on_answer: Callable[[str, int], None],
    ) -> None:
        """`on_answer` gets the route and the status of every response that begins."""
        self._app = app
        self._on_refusal = on_refusal
        self._on_answer = on_answer
        self._limits = settings.limits
        self._names = host_names(settings)
        self._headers = (*_DEFAULT_HEADERS, *_replica_headers(settings.replica))

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "websocket":
            await send({"type": "websocket.close", "code": 1008})
            return
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        has_begun = False

        def note(status: int) -> None:
            nonlocal has_begun
            has_begun = True
            self._on_answer(_route_name(scope), status)

        sending = with_headers(send, self._headers, on_start=note)
        try:
            headers = scope[IndexedHeaders.KEY] = IndexedHeaders(scope)
            self._check(headers)
        except HttpRefusal as refusal:
            self._on_refusal(refusal.status)
            await error_response(refusal)(scope, receive, sending)
            return
        try:
            await self._app(scope, receive, sending)
        except Exception:
            if not has_begun:  # what answers then is around all middleware
                note(HTTPStatus.INTERNAL_SERVER_ERROR)
            raise

    def _check(self, headers: Headers) -> None:
        check_headers(headers, self._limits)
        check_header_text(headers)
        if self._names is not None and _host_name(headers.get("host", "")) not in self._names:
            raise HttpRefusal(
                HTTPStatus.MISDIRECTED_REQUEST,
                "the Host header names another host than this proxy; "
                "use the address it printed at its start, or list the name",
            )


def _route_name(scope: Scope) -> str:
    """As in the table of routes: it is a label of metrics, so no client may add to them."""
    route = scope.get("route")
    if not isinstance(route, StarletteRoute):
        return OTHER
    return f"{min(route.methods or {''})} {route.path}"


def _replica_headers(replica: str | None) -> RawHeaders:
    return () if replica is None else ((REPLICA.lower().encode(), replica.encode()),)


def with_headers(send: Send, more: RawHeaders, *, on_start: Callable[[int], None]) -> Send:
    """Adds the headers that a response has not got itself."""

    async def sending(message: Message) -> None:
        if message["type"] == "http.response.start":
            on_start(message["status"])
            message["headers"] = _with_missing(message.get("headers", ()), more)
        await send(message)

    return sending


def _with_missing(
    headers: Iterable[tuple[bytes, bytes]], more: RawHeaders
) -> list[tuple[bytes, bytes]]:
    given = list(headers)
    names = {name.lower() for name, _ in given}
    return [*given, *(pair for pair in more if pair[0] not in names)]


def check_headers(headers: Headers, limits: Limits) -> None:
    nbytes = sum(len(name) + len(value) for name, value in headers.raw)
    if len(headers.raw) > limits.headers or nbytes > limits.header_bytes:
        raise HttpRefusal(
            HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE,
            f"at most {limits.headers} headers with {limits.header_bytes} bytes in all",
        )


def check_header_text(headers: Headers) -> None:
    """HttpRefusal for what would be read differently elsewhere: upstream, in a log, on a screen."""
    if _CONTROL.search(b"".join([value for _, value in headers.raw])):
        raise HttpRefusal(
            HTTPStatus.BAD_REQUEST, "a header holds a control character; leave it out"
        )
    labels = [value for name, value in headers.raw if name == b"x-request-id"]
    if not all(map(_REQUEST_ID.fullmatch, labels)):
        raise HttpRefusal(
            HTTPStatus.BAD_REQUEST,
            "X-Request-Id has 1 to 128 letters, digits, dots, dashes and underscores",
        )
    if len(labels) > 1:
        raise HttpRefusal(HTTPStatus.BAD_REQUEST, "X-Request-Id is there twice; send it once")
    if headers.get("content-encoding", "identity").lower() != "identity":
        raise HttpRefusal(
            HTTPStatus.UNSUPPORTED_MEDIA_TYPE,
            "the body is compressed; send it as it is, without Content-Encoding",
            headers={"Accept-Encoding": "identity"},
        )


def host_names(settings: ProxySettings) -> frozenset[str] | None:
    """Host names that a request may use; None if any is allowed.

    The page of another site can point its own name at 127.0.0.1, and would then be of our origin.
    A proxy that can be reached from outside has a key instead, which such a page does not know.
    """
    listed = frozenset(_host_name(name) for name in settings.allowed_hosts)
    if is_loopback(settings.host):
        return _LOOPBACK_NAMES | {_host_name(settings.host)} | listed
    return listed | {_host_name(settings.host)} if listed else None


@lru_cache(maxsize=64)
def _host_name(host: str) -> str:
    """A host without port and brackets."""
    if host.count(":") > 1 and not host.startswith("["):
        return host.lower()  # a bare IPv6 address
    try:
        return (urlsplit(f"//{host}").hostname or "").lower()
    except ValueError:
        return ""


def check_access(request: Request, route: Route, settings: ProxySettings) -> Caller:
    """Who asks; HttpRefusal for a wrong key, a missing right, or another site's page."""
    given = request.headers.get("authorization", "")
    caller = authorize(given, route.right, settings.access_keys)
    if route.changes:
        _check_origin(request.headers, settings.allowed_origins)
    return caller


def _check_origin(headers: Headers, allowed: tuple[str, ...]) -> None:
    origin = headers.get("origin")
    if origin is None:
        is_ours = headers.get("sec-fetch-site", "none") != "cross-site"
    else:
        is_ours = origin in allowed or _authority(origin) == headers.get("host", "").lower()
    if not is_ours:
        raise HttpRefusal(
            HTTPStatus.FORBIDDEN,
            "another site's page may not do this; list its origin to let it",
        )


def _authority(origin: str) -> str | None:
    """None for an origin that no page of ours has: `null`, a file, an extension."""
    try:
        parts = urlsplit(origin)
    except ValueError:
        return None
    return parts.netloc.lower() if parts.scheme in ("http", "https") else None
