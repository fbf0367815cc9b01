"""The proxy's thread: it answers on its port, and frees the port again."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import http.client
import resource
import socket
import threading
from collections.abc import AsyncIterator, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import uvicorn
from fastapi import FastAPI

from clairai.errors import ClairaiError, ConfigError
from clairai.launch import proxy_thread
from clairai.launch.engine_command import ListenAddress
from clairai.launch.proxy_thread import (
    ProxyOptions,
    ProxyThread,
    listen,
    raise_descriptor_limit,
    run_proxy,
)
from clairai.proxy.connections import most_connections
from clairai.proxy.proxy_settings import ProxySettings, Timeouts
from tests.support.ring_engine import until


def free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return int(sock.getsockname()[1])


def _server(app: FastAPI) -> uvicorn.Server:
    return uvicorn.Server(uvicorn.Config(app, lifespan="on", log_config=None))


def _get(port: int, path: str) -> tuple[int, bytes]:
    with contextlib.closing(http.client.HTTPConnection("127.0.0.1", port, timeout=60)) as asked:
        asked.request("GET", path)
        answer = asked.getresponse()
        return answer.status, answer.read()


def test_the_app_answers_inside_the_block_and_the_port_is_free_after_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(proxy_thread, "STOP_S", 60.0)  # an end that is forced skips the app's
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


def test_a_proxy_that_serves_goes_through_nothing_for_garbage_that_it_was_started_with(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(proxy_thread, "STOP_S", 60.0)
    port = free_port()
    settings = ProxySettings(f"http://127.0.0.1:{free_port()}", runtime_dir=tmp_path, port=port)
    with run_proxy(settings, listen(ListenAddress(port=port))) as (_, proxy):
        assert not any(found is proxy for found in gc.get_objects())
        assert _get(port, "/health/live")[0] == 200
    assert any(found is proxy for found in gc.get_objects())


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


class Clock:
    """The clock by which a silent event loop is judged; it goes when the test says so."""

    now_s = 0.0

    def tick(self) -> float:
        return self.now_s


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    made = Clock()
    monkeypatch.setattr(proxy_thread, "OwnClock", lambda: made)
    return made


@pytest.mark.attack(434)
def test_an_event_loop_that_hangs_is_an_error(clock: Clock) -> None:
    go_on, is_stuck = threading.Event(), threading.Event()

    async def hang() -> None:
        is_stuck.set()
        go_on.wait(60)

    app = FastAPI()
    app.get("/hang")(hang)
    port = free_port()
    client = threading.Thread(target=_get, args=(port, "/hang"), daemon=True)
    try:
        with ProxyThread(_server(app), listen(ListenAddress(port=port))) as front:
            front.check()
            client.start()
            assert is_stuck.wait(60)
            front.check()  # it has seen the last round
            clock.now_s += proxy_thread.STALL_S
            with pytest.raises(ClairaiError, match="event loop has not gone round"):
                front.check()
            go_on.set()
            client.join(60)
            until(lambda: _is_well(front))  # it has gone on
    finally:
        go_on.set()


def _is_well(front: ProxyThread) -> bool:
    try:
        front.check()
    except ClairaiError:
        return False
    return True


class CountingServer(uvicorn.Server):
    """Counts the rounds of its main loop."""

    num_rounds = 0

    async def on_tick(self, counter: int) -> bool:
        self.num_rounds += 1
        return await super().on_tick(counter)


def test_a_busy_event_loop_that_goes_round_is_none_that_hangs(clock: Clock) -> None:
    app = FastAPI()
    is_busy, is_enough = threading.Event(), threading.Event()

    async def work() -> str:
        is_busy.set()
        while not is_enough.is_set():
            sum(range(100_000))
            await asyncio.sleep(0)  # lets others run in between
        return "done"

    app.get("/work")(work)
    port = free_port()
    server = CountingServer(_server(app).config)
    with (
        ProxyThread(server, listen(ListenAddress(port=port))) as front,
        ThreadPoolExecutor(1) as clients,
    ):
        answer = clients.submit(_get, port, "/work")
        try:
            assert is_busy.wait(60)
            for _ in range(3):  # more than twice the limit in all
                seen = server.num_rounds
                until(lambda seen=seen: server.num_rounds > seen)  # type: ignore[misc]
                clock.now_s += 0.9 * proxy_thread.STALL_S
                front.check()
        finally:
            is_enough.set()
        assert answer.result() == (200, b'"done"')


@pytest.fixture
def few_files() -> Iterator[int]:
    """The hard limit of descriptors; the soft one is that of a shell."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (1024, hard))
    yield hard
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_descriptors_are_used_that_a_shell_withholds(few_files: int) -> None:
    before = most_connections(4096)
    assert before < 512
    raise_descriptor_limit()
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    assert (soft, hard) == (min(few_files, proxy_thread.NUM_FILES), few_files)
    assert most_connections(4096) == min(4096, before + (soft - 1024) // 2)


def test_a_limit_that_is_high_already_stays(
    few_files: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(proxy_thread, "NUM_FILES", 512)
    raise_descriptor_limit()
    assert resource.getrlimit(resource.RLIMIT_NOFILE) == (1024, few_files)


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
