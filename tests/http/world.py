"""A running proxy with a fake engine behind it: real sockets, a real ring."""

from __future__ import annotations

import asyncio
import socket
import ssl
import threading
from collections.abc import Coroutine, Iterator
from contextlib import AsyncExitStack, ExitStack, asynccontextmanager, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

import httpx
import uvicorn
from aiohttp import web

from clairai.proxy.app import create_app, create_server
from clairai.proxy.observe.observer import MetricsObserver, Observer
from clairai.proxy.proxy import Proxy
from clairai.proxy.proxy_settings import ProxySettings, Timeouts
from clairai.ring.layout import RingShape
from tests.http.answers import CHAT
from tests.http.fake import Ring, Script, answering, bank_of
from tests.http.fake_server import Upstream
from tests.support.ring_engine import Engine, running_engine, until

Result = TypeVar("Result")
SHAPE = RingShape(slots=512, slot_bytes=4096)
# Rows that will come are waited for on a busy machine too; who tests that they do not, says so.
PATIENT = Timeouts(finish=20.0)
HURRIED = Timeouts(finish=0.05)


@dataclass(frozen=True)
class World:
    """One proxy, one fake engine; `url` is the proxy's address."""

    url: str
    upstream_url: str
    proxy: Proxy
    upstream: Upstream
    engine: Engine | None
    loop: asyncio.AbstractEventLoop
    runner: web.AppRunner

    def client(self, **more: Any) -> httpx.Client:
        return _client(self.url, **more)

    def growing(self, body: dict[str, Any], path: str = CHAT) -> Iterator[bytes]:
        """A streamed answer so far, each time there is more of it."""
        raw = b""
        with self.client() as client, client.stream("POST", path, json=body) as answer:
            for part in answer.iter_bytes():
                raw += part
                yield raw

    def direct(self) -> httpx.Client:
        """To the fake engine itself."""
        return _client(self.upstream_url)

    def stop_upstream(self) -> None:
        """The engine's process is gone; its ring stays, as memory does."""
        asyncio.run_coroutine_threadsafe(self.runner.cleanup(), self.loop).result(60)


@contextmanager
def world(
    folder: Path,
    *,
    script: Script | None = None,
    has_ring: bool = True,
    has_routes: bool = True,
    shape: RingShape = SHAPE,
    observers: tuple[Observer, ...] = (),
    metrics: MetricsObserver | None = None,
    upstream_key: str | None = None,
    upstream_is_socket: bool = False,
    **settings: Any,
) -> Iterator[World]:
    """The proxy has attached to the ring when this begins, if there is one."""
    upstream = Upstream(script or answering([72, 105]), has_routes=has_routes, key=upstream_key)
    with ExitStack() as stack:
        engine = None
        if has_ring:
            engine = stack.enter_context(running_engine(folder, shape=shape, bank_of=bank_of))
            upstream.epoch, upstream.ring = engine.epoch, Ring(engine.writer)
        loop = stack.enter_context(_loop())
        path = folder / "vllm.sock" if upstream_is_socket else None
        parts = _serving(folder, upstream, path, settings, observers, metrics)
        url, address, proxy, serving, runner = stack.enter_context(_within(loop, parts))
        until(lambda: serving.started)
        made = World(url, address, proxy, upstream, engine, loop, runner)
        if has_ring:
            until(lambda: proxy.feed.is_attached)
        yield made


@asynccontextmanager
async def _serving(
    folder: Path,
    upstream: Upstream,
    path: Path | None,
    settings: dict[str, Any],
    observers: tuple[Observer, ...],
    metrics: MetricsObserver | None,
) -> Any:
    async with AsyncExitStack() as stack:
        address, runner = await stack.enter_async_context(running_upstream(upstream, path))
        listener = socket.create_server(("127.0.0.1", 0))
        port = listener.getsockname()[1]
        usual = {"upstream": address, "runtime_dir": folder, "timeouts": PATIENT}
        chosen = ProxySettings(**{**usual, **settings})
        app = create_app(replace(chosen, port=port), observers=observers, metrics=metrics)
        serving = create_server(app, chosen)
        await stack.enter_async_context(_uvicorn(serving, listener))
        yield f"http://127.0.0.1:{port}", address, app.state.proxy, serving, runner


@contextmanager
def proxy_of(settings: ProxySettings) -> Iterator[tuple[str, Proxy]]:
    """A proxy with a real engine behind it: its address, and itself."""
    with _loop() as loop, _within(loop, _proxy(settings)) as (url, proxy, serving):
        until(lambda: serving.started)
        until(lambda: proxy.feed.is_attached)
        yield url, proxy


@asynccontextmanager
async def _proxy(settings: ProxySettings) -> Any:
    listener = socket.create_server(("127.0.0.1", 0))
    app = create_app(settings)
    serving = create_server(app, settings)
    async with _uvicorn(serving, listener):
        yield f"http://127.0.0.1:{listener.getsockname()[1]}", app.state.proxy, serving


@asynccontextmanager
async def running_upstream(upstream: Upstream, path: Path | None = None) -> Any:
    """The fake engine's address, and what runs it; on a Unix socket if a path is given."""
    runner = web.AppRunner(
        upstream.app(), handler_cancellation=True, access_log=None, shutdown_timeout=0.1
    )
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0) if path is None else web.UnixSite(runner, path)
    await site.start()
    port = "" if path is not None else runner.addresses[0][1]
    try:
        yield (f"http://127.0.0.1:{port}" if path is None else f"unix:{path}"), runner
    finally:
        await runner.cleanup()


@asynccontextmanager
async def _uvicorn(serving: uvicorn.Server, listener: socket.socket) -> Any:
    task = asyncio.create_task(serving.serve(sockets=[listener]))
    try:
        yield
    finally:
        serving.should_exit = True
        await task
        listener.close()


def _client(url: str, **more: Any) -> httpx.Client:
    # Without this it reads every certificate of the machine, and there is no TLS here.
    unused = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    return httpx.Client(base_url=url, timeout=60.0, trust_env=False, verify=unused, **more)


@contextmanager
def _loop() -> Iterator[asyncio.AbstractEventLoop]:
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever, name="world")
    thread.start()
    try:
        yield loop
    finally:
        asyncio.run_coroutine_threadsafe(_settled(), loop).result(60)
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.close()


async def _settled() -> None:
    """Transports that are being closed get their turn."""
    for _ in range(10):
        await asyncio.sleep(0)


@contextmanager
def _within(loop: asyncio.AbstractEventLoop, opened: Any) -> Iterator[Any]:
    def run(work: Coroutine[Any, Any, Result]) -> Result:
        return asyncio.run_coroutine_threadsafe(work, loop).result(60)

    value = run(opened.__aenter__())
    try:
        yield value
    finally:
        run(opened.__aexit__(None, None, None))
