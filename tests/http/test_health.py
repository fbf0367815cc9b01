"""Liveness is the proxy's alone; readiness is whether a request would be answered now."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import httpx
import pytest

from clairai.proxy.engine_facts import RECENT_S, HealthStatus
from clairai.proxy.proxy_settings import Limits, Timeouts
from clairai.weights.manifest import encode_manifest
from tests.http.answers import CHAT
from tests.http.fake import Exchange
from tests.http.world import World, world
from tests.support.ring_engine import until
from tests.support.weights import plan

LIVE, READY = "/health/live", "/health/ready"
KEY = "a-key-for-tests"


@pytest.fixture
def own(tmp_path: Path) -> Iterator[World]:
    with world(tmp_path) as made:
        yield made


def _get(w: World, path: str, *, timeout_s: float = 20.0) -> httpx.Response:
    with w.client() as client:
        return client.get(path, timeout=timeout_s)


def _silent_connection(w: World, peer: str) -> socket.socket:
    """Of another address: one peer never has all connections."""
    host, port = w.url.removeprefix("http://").split(":")
    return socket.create_connection((host, int(port)), timeout=20, source_address=(peer, 0))


def _assert_not_ready(w: World, reason: str) -> None:
    answer = _get(w, READY)
    assert answer.status_code == 503
    assert answer.json() == {"ready": False, "reason": reason}
    assert 1 <= int(answer.headers["Retry-After"]) <= 5


def test_a_proxy_whose_engine_serves_is_live_and_ready(own: World) -> None:
    assert (_get(own, LIVE).status_code, _get(own, LIVE).json()) == (200, {"live": True})
    ready = _get(own, READY)
    assert (ready.status_code, ready.json()) == (200, {"ready": True, "reason": None})
    assert "Retry-After" not in ready.headers


def test_liveness_asks_nobody_and_goes_on_without_an_engine(own: World) -> None:
    for status in (None, HealthStatus("starting"), HealthStatus("failed", "it died")):
        own.proxy.health.set_status(status)
        assert _get(own, LIVE).status_code == 200
    assert own.upstream.num_health_checks == 0
    own.stop_upstream()
    assert _get(own, LIVE).status_code == 200


def test_liveness_is_not_answered_while_the_event_loop_stands_still(own: World) -> None:
    going_on = threading.Event()
    own.loop.call_soon_threadsafe(going_on.wait, 60)
    try:
        with pytest.raises(httpx.ReadTimeout):
            _get(own, LIVE, timeout_s=0.3)
    finally:
        going_on.set()
    assert _get(own, LIVE).status_code == 200


@pytest.mark.parametrize(
    "status",
    [
        HealthStatus("starting", "the engine is loading weights, 12 s"),
        HealthStatus("failed", "the engine died 3 times in a row"),
        HealthStatus("degraded", "the engine core makes no progress", 1.0, is_stalled=True),
    ],
)
def test_what_the_launcher_says_of_the_engine_is_the_reason(
    own: World, status: HealthStatus
) -> None:
    own.proxy.health.set_status(status)
    assert status.reason is not None
    _assert_not_ready(own, status.reason)
    own.proxy.health.set_status(None)
    assert _get(own, READY).status_code == 200


def test_an_engine_that_is_gone_makes_the_proxy_unready_at_once(own: World) -> None:
    assert _get(own, READY).status_code == 200  # and this answer may be used for a second
    own.stop_upstream()
    with own.client() as client:
        assert client.post(CHAT, json={"messages": []}).status_code == 502
    _assert_not_ready(own, "the engine does not answer")


def test_a_core_that_does_not_answer_makes_the_proxy_unready(own: World) -> None:
    assert _get(own, "/health").json()["status"] == "ready"
    own.upstream.control_status = 503
    answer = _get(own, READY)
    assert answer.status_code == 503
    assert answer.json()["reason"].startswith("the engine core does not answer")


def test_an_engine_with_half_of_its_weights_is_not_ready_until_a_whole_set_has_come(
    own: World,
) -> None:
    def commit() -> int:
        with own.client() as client:
            body = encode_manifest(plan())
            return client.post("/v1/weights/commit", content=body).status_code

    assert _get(own, READY).status_code == 200
    own.upstream.weights.stops_half_way = True
    assert commit() == 500
    answer = _get(own, READY)
    assert (answer.status_code, "half-way" in answer.json()["reason"]) == (503, True)
    assert _get(own, "/health").json()["status"] == "failed"
    own.upstream.weights.stops_half_way = False
    assert commit() == 200
    assert _get(own, READY).status_code == 200


def test_the_next_engine_has_whole_weights(own: World) -> None:
    own.proxy.health.note_commit(is_torn=True)
    assert _get(own, READY).status_code == 503
    own.proxy.feed.rings[0].epoch = 1  # as of an engine that was started again
    own.proxy.health.set_status(None)
    assert _get(own, READY).status_code == 200


def test_answers_without_scores_are_answers(tmp_path: Path) -> None:
    with world(tmp_path, has_ring=False) as w, w.client() as client:
        assert client.get("/health").json()["status"] == "degraded"
        assert _get(w, READY).status_code == 200


def test_a_proxy_with_as_many_requests_as_it_takes_is_unready_until_one_ends(
    tmp_path: Path,
) -> None:
    async def wait(exchange: Exchange) -> None:
        await exchange.begin()
        await exchange.forever()

    body = {"messages": [], "stream": True}
    with world(tmp_path, script=wait, limits=Limits(streams=1)) as w, w.client() as client:
        with client.stream("POST", CHAT, json=body):
            _assert_not_ready(w, "as many requests are being answered as may be at once")
            assert _get(w, LIVE).status_code == 200
        until(lambda: _get(w, READY).status_code == 200)


def test_a_proxy_whose_connections_are_all_taken_says_so_on_those_kept_for_health(
    tmp_path: Path,
) -> None:
    patient = Timeouts(finish=20.0, head=600.0)
    with world(tmp_path, limits=Limits(connections=4), timeouts=patient) as w:
        with ExitStack() as held:
            for peer in ("127.0.0.2", "127.0.0.2", "127.0.0.3", "127.0.0.3"):
                held.enter_context(_silent_connection(w, peer))
            until(lambda: _get(w, READY).status_code == 503)
            _assert_not_ready(w, "as many connections are open as may be at once")
            assert _get(w, LIVE).status_code == 200
        until(lambda: _get(w, READY).status_code == 200)


@pytest.mark.parametrize("path", [LIVE, READY])
def test_no_key_is_asked_for(tmp_path: Path, path: str) -> None:
    with world(tmp_path, api_key=KEY) as w:
        assert _get(w, "/v1/models").status_code == 401
        assert _get(w, path).status_code == 200


def test_asking_without_end_asks_the_engine_once_a_second(own: World) -> None:
    began_s = time.monotonic()
    for _ in range(100):
        assert _get(own, READY).status_code == 200
    most = 1 + (time.monotonic() - began_s) / RECENT_S
    assert 1 <= own.upstream.num_health_checks <= most
