"""Takes an app and a port; gives it answering in a thread, and a port that is free again."""

from __future__ import annotations

import contextlib
import http.client
import socket
from collections.abc import AsyncIterator

import pytest
import uvicorn
from fastapi import FastAPI

from clairai.errors import ClairaiError, ConfigError
from clairai.serve.front import Front, listen
from clairai.serve.launch import Bind
from clairai.stream.listen import server
from clairai.stream.settings import ProxySettings


def free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return int(sock.getsockname()[1])


def _server(app: FastAPI) -> uvicorn.Server:
    return server(app, ProxySettings("http://127.0.0.1:1"))


def _get(port: int, path: str) -> tuple[int, bytes]:
    with contextlib.closing(http.client.HTTPConnection("127.0.0.1", port, timeout=10)) as asked:
        asked.request("GET", path)
        answer = asked.getresponse()
        return answer.status, answer.read()


def test_the_app_answers_inside_the_block_and_the_port_is_free_after_it() -> None:
    ended: list[bool] = []

    @contextlib.asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        yield
        ended.append(True)

    app = FastAPI(lifespan=lifespan)
    app.get("/health")(lambda: "well")
    port = free_port()
    with Front(_server(app), listen(Bind(port=port))) as front:
        assert _get(port, "/health") == (200, b'"well"')
        front.check()
    assert ended == [True]
    listen(Bind(port=port)).close()


def test_a_port_that_is_taken_is_said_before_anything_starts() -> None:
    port = free_port()
    with (
        listen(Bind(port=port)),
        pytest.raises(ConfigError, match=r"in use\); choose another with --port"),
    ):
        listen(Bind(port=port))


def test_a_host_that_is_not_ours_is_said() -> None:
    with pytest.raises(ConfigError, match="cannot be used"):
        listen(Bind("192.0.2.1", 7000, api_key="k"))


def test_an_app_that_cannot_start_is_an_error_and_not_a_wait() -> None:
    @contextlib.asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        raise RuntimeError("planted")
        yield

    with listen(Bind(port=free_port())) as listener:
        front = Front(_server(FastAPI(lifespan=lifespan)), listener)
        with pytest.raises(ClairaiError, match="the proxy has ended"):
            front.__enter__()
