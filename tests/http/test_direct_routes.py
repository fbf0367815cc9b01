"""A route that is called directly answers every request as FastAPI would have it answered."""

from __future__ import annotations

import asyncio
import re
import socket
from collections.abc import Iterator
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any, NamedTuple

import httpx
import pytest
from fastapi import FastAPI

from clairai.proxy import handlers
from clairai.proxy.app import create_app
from clairai.proxy.direct_routes import DirectRoutes
from clairai.proxy.proxy_settings import Limits, ProxySettings
from clairai.proxy.routes import ROUTES
from tests.http.answers import CHAT, asking
from tests.http.fake import answering
from tests.http.fake_server import Upstream
from tests.http.world import running_upstream

KEY = "a-key-for-tests"
HELD = {"Authorization": f"Bearer {KEY}"}
CHATTING: dict[str, Any] = {"messages": [{"role": "user", "content": "Hi"}]}
# Times and random ids differ between any two answers.
VARYING = re.compile(
    rb'"(?:since|created|expires)":[^,}]*|[0-9a-f]{32}|^.*(?:_seconds|process_|python_).*$',
    re.MULTILINE,
)


class Sent(NamedTuple):
    method: str
    path: str
    headers: dict[str, str]
    body: bytes = b""


def requests() -> Iterator[Sent]:
    fixed = [route for route in ROUTES if "{" not in route.path]
    for route in fixed:
        for headers in ({}, HELD, {**HELD, "Origin": "http://elsewhere"}):
            yield Sent(route.method, route.path, headers)
            yield Sent(route.method, route.path, headers, b"{}")
        yield Sent("HEAD", route.path, HELD)
        yield Sent("PATCH", route.path, HELD)
        yield Sent("OPTIONS", route.path, {"Origin": "http://listed", **HELD})
        yield Sent(route.method, f"{route.path}/", HELD)
        yield Sent(route.method, f"{route.path}%0A", HELD)
        yield Sent(route.method, f"{route.path}?a=1&a=%ff", {**HELD, "X-Request-Id": "mine"})
        yield Sent(route.method, f"/{route.path}", HELD)
    for route in (one for one in ROUTES if "{" in one.path):
        yield Sent(route.method, re.sub(r"{(\w+)(:path)?}", "x", route.path), HELD, b"{}")


def completions() -> Iterator[Sent]:
    for path in (CHAT, "/v1/completions", "/v1/responses"):
        for body in (CHATTING, {**CHATTING, "stream": True}, asking(), asking(stream=False)):
            raw = httpx.Request("POST", "http://a", json=body).content
            yield Sent("POST", path, HELD, raw)
            yield Sent("POST", path, {**HELD, "X-Clairai-Scores": "all"}, raw)
            yield Sent("POST", path, {**HELD, "Content-Encoding": "gzip"}, raw)
        for odd in (b"", b"{", b"\xff", b"[]", b"{" * 100, b'{"clairai":1}', b" " * 5000):
            yield Sent("POST", path, HELD, odd)


async def answers(app: FastAPI, sent: list[Sent]) -> list[tuple[int, list[Any], bytes]]:
    found = []
    transport = httpx.ASGITransport(app, raise_app_exceptions=False)
    async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
        for one in sent:
            answer = await client.request(
                one.method, one.path, headers=one.headers, content=one.body
            )
            body = VARYING.sub(b"", answer.content)
            lines = [pair for pair in answer.headers.multi_items() if pair[0] != "content-length"]
            found.append((answer.status_code, lines, body))
    return found


def through_fastapi(app: FastAPI) -> FastAPI:
    app.user_middleware = [one for one in app.user_middleware if not is_direct(one.cls)]
    return app


def is_direct(middleware: object) -> bool:
    return middleware is DirectRoutes


def both_ways(folder: Path, sent: list[Sent], **more: Any) -> Iterator[tuple[Sent, Any, Any]]:
    async def run() -> list[list[Any]]:
        found = []
        for make in (lambda app: app, through_fastapi):
            async with AsyncExitStack() as stack:
                upstream = Upstream(answering([72, 105]), has_routes=True, key=None)
                address, _ = await stack.enter_async_context(running_upstream(upstream))
                usual = {"upstream": address, "runtime_dir": folder, "api_key": KEY, **more}
                app = make(create_app(ProxySettings(**usual)))
                await stack.enter_async_context(app.router.lifespan_context(app))
                found.append(await answers(app, sent))
        return found

    yield from zip(sent, *asyncio.run(run()), strict=True)


@pytest.mark.parametrize("origins", [(), ("http://listed",)], ids=["", "cors"])
def test_every_route_answers_the_same_both_ways(tmp_path: Path, origins: tuple[str, ...]) -> None:
    limits = Limits(body_bytes=4096)
    sent = [*requests(), *completions()]
    statuses = set()
    for one, direct, other in both_ways(tmp_path, sent, allowed_origins=origins, limits=limits):
        assert direct == other, one
        statuses.add(direct[0])
    assert {200, 400, 401, 403, 404, 405, 413, 415} <= statuses


def test_an_engine_that_is_gone_is_the_same_both_ways(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as closed:
        port = closed.getsockname()[1]
    sent = [one for one in completions() if one.path == CHAT]
    for one, direct, other in both_ways(tmp_path, sent, upstream=f"http://127.0.0.1:{port}"):
        assert direct == other, one
        assert direct[0] >= 400


def test_a_bug_in_a_handler_is_the_same_both_ways(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def fail(_: handlers.HandlerCall) -> None:
        raise ZeroDivisionError("planted")

    monkeypatch.setitem(handlers.HANDLERS, "chat", fail)
    sent = [Sent("POST", CHAT, HELD, b"{}")]
    for _, direct, other in both_ways(tmp_path, sent):
        assert direct == other
        assert direct[0] == 500
        assert b"planted" not in direct[2]
