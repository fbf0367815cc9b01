"""Calls of an engine that does not answer: each has a limit, and none waits behind a late one."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
from fastapi import FastAPI
from starlette.testclient import TestClient

from clairai.server import engine_rpc, install_routes
from clairai.server.engine_rpc import ATTRIBUTE, EngineRpc, EngineSilent
from clairai.wire import capture_messages, steering_messages
from tests.support.api_server import PATHS

REPLY = msgspec.msgpack.encode(steering_messages.RefusalReason("", ""))


class SilentEngine:
    """Answers a call when `answers` is set, and never before."""

    def __init__(self) -> None:
        self.answers, self.is_asked = asyncio.Event(), asyncio.Event()
        self.num_calls = self.num_cancelled = 0

    async def collective_rpc(self, _: str, args: tuple[bytes]) -> list[bytes]:
        del args
        self.num_calls += 1
        self.is_asked.set()
        try:
            await self.answers.wait()
        except asyncio.CancelledError:
            self.num_cancelled += 1
            raise
        return [REPLY]


def set_limits(monkeypatch: pytest.MonkeyPatch, limit_s: float) -> None:
    for name in ("ALIVE_S", "CALL_S"):
        monkeypatch.setattr(engine_rpc, name, limit_s)


@pytest.fixture
def short_limits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only for an engine that never answers: one that does may need longer than that."""
    set_limits(monkeypatch, 0.05)


def run_with(work: Callable[[SilentEngine, EngineRpc], Any]) -> None:
    async def main() -> None:
        engine = SilentEngine()
        await work(engine, EngineRpc(engine, is_shared=False))

    asyncio.run(asyncio.wait_for(main(), 60))


@pytest.mark.attack(420)
@pytest.mark.usefixtures("short_limits")
def test_a_call_that_is_not_answered_ends_after_its_limit() -> None:
    async def work(_: SilentEngine, rpc: EngineRpc) -> None:
        with pytest.raises(EngineSilent, match=r"has not answered a call within 0\.05 s"):
            await rpc.check_alive()

    run_with(work)


@pytest.mark.attack(421)
@pytest.mark.usefixtures("short_limits")
def test_while_a_call_is_late_the_next_ones_are_refused_at_once_and_none_piles_up(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def work(engine: SilentEngine, rpc: EngineRpc) -> None:
        for _ in range(50):
            with pytest.raises(EngineSilent):
                await rpc.check_alive()
        assert engine.num_calls == 1
        assert engine.num_cancelled == 0  # its end shows that the engine is well again
        engine.answers.set()
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        set_limits(monkeypatch, 60.0)
        await rpc.check_alive()
        assert engine.num_calls == 2

    run_with(work)


def test_a_caller_that_leaves_takes_its_call_along(monkeypatch: pytest.MonkeyPatch) -> None:
    set_limits(monkeypatch, 60.0)  # it leaves before the call is late

    async def work(engine: SilentEngine, rpc: EngineRpc) -> None:
        asking = asyncio.ensure_future(rpc.check_alive())
        await engine.is_asked.wait()
        asking.cancel()
        await asyncio.gather(asking, return_exceptions=True)
        assert engine.num_cancelled == 1

    run_with(work)


@pytest.fixture
def server(short_limits: None) -> TestClient:
    del short_limits

    async def collective_rpc(_: str, args: tuple[bytes]) -> list[bytes]:
        del args
        await asyncio.sleep(3600)
        raise AssertionError

    app = FastAPI()
    install_routes.attach(app)
    client = SimpleNamespace(collective_rpc=collective_rpc)
    setattr(app.state, ATTRIBUTE, EngineRpc(client, is_shared=False))
    return TestClient(app, raise_server_exceptions=False)


@pytest.mark.attack(422)
@pytest.mark.parametrize(
    "path", ["/v1/clairai", "/v1/clairai/alive", "/v1/probes", "/v1/steering/vectors"]
)
def test_every_route_answers_503_for_an_engine_that_does_not(server: TestClient, path: str) -> None:
    answer = server.get(path)
    assert (answer.status_code, answer.headers["retry-after"]) == (503, "2")
    assert answer.json()["error"]["code"] == "engine-gone"
    assert answer.json()["error"]["type"] == "server_error"


@pytest.mark.attack(423)
def test_a_steered_completion_is_refused_with_503_and_does_not_hang(server: TestClient) -> None:
    fields = json.dumps({"steer": [{"vector": "calm"}]})
    body = {"messages": [], "vllm_xargs": {"clairai": fields}}
    answer = server.post(PATHS[0], json=body)
    assert (answer.status_code, answer.json()["error"]["code"]) == (503, "engine-gone")


@pytest.mark.attack(424)
def test_a_capture_is_refused_with_503_while_its_writer_is_being_replaced(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(engine_rpc, "CAPTURE_KNOWN_S", 3600.0)  # longer than the test
    state = capture_messages.CaptureState((), 0, 0, 0, 0, 0, failure="the capture writer is gone")
    asked: list[bytes] = []

    async def collective_rpc(_: str, args: tuple[bytes]) -> list[bytes]:
        asked.append(args[0])
        return [msgspec.msgpack.encode(state)]

    app = FastAPI()
    install_routes.attach(app)
    client = SimpleNamespace(collective_rpc=collective_rpc)
    setattr(app.state, ATTRIBUTE, EngineRpc(client, is_shared=False))
    body = {"messages": [], "vllm_xargs": {"clairai": json.dumps({"capture": {}})}}
    for _ in range(5):
        answer = TestClient(app).post(PATHS[0], json=body)
        assert (answer.status_code, answer.headers["retry-after"]) == (503, "2")
        assert answer.json()["error"]["code"] == "capture-down"
        assert "the capture writer is gone" in answer.json()["error"]["message"]
    assert len(asked) == 1  # a question interrupts the engine
