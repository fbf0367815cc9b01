"""The proxy's thread: it answers on its port, and frees the port again."""

from __future__ import annotations

import contextlib
import http.client
import socket
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import uvicorn
from fastapi import FastAPI

from clairai.errors import ClairaiError, ConfigError
from clairai.launch.engine_command import ListenAddress
from clairai.launch.proxy_thread import ProxyOptions, ProxyThread, listen
from clairai.proxy.proxy_settings import Timeouts


def free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return int(sock.getsockname()[1])


def _server(app: FastAPI) -> uvicorn.Server:
    return uvicorn.Server(uvicorn.Config(app, lifespan="on", log_config=None))


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
    with ProxyThread(_server(app), listen(ListenAddress(port=port))) as front:
        assert _get(port, "/health") == (200, b'"well"')
        front.check()
    assert ended == [True]
    listen(ListenAddress(port=port)).close()


def test_a_port_in_use_is_reported_before_anything_starts() -> None:
    port = free_port()
    with (
        listen(ListenAddress(port=port)),
        pytest.raises(ConfigError, match=r"in use\); choose another with --port"),
    ):
        listen(ListenAddress(port=port))


def test_a_host_of_another_machine_is_reported() -> None:
    with pytest.raises(ConfigError, match="cannot be used"):
        listen(ListenAddress("192.0.2.1", 7000, api_key="k"))


def test_an_app_that_cannot_start_is_an_error_at_once() -> None:
    @contextlib.asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        raise RuntimeError("planted")
        yield

    with listen(ListenAddress(port=free_port())) as listener:
        front = ProxyThread(_server(FastAPI(lifespan=lifespan)), listener)
        with pytest.raises(ClairaiError, match="the proxy has ended"):
            front.__enter__()


def test_options_about_scores_reach_the_proxy() -> None:
    options = ProxyOptions(ListenAddress("127.0.0.1", 1), score_all=True, scores_kept_s=5.0)
    settings = options.settings("http://127.0.0.1:2", Path())
    assert (settings.score_all, settings.timeouts.scores_kept) == (True, 5.0)
    usual = ProxyOptions(ListenAddress("127.0.0.1", 1)).settings("http://127.0.0.1:2", Path())
    assert (usual.score_all, usual.timeouts) == (False, Timeouts())
