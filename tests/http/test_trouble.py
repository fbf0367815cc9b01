"""Clients that leave or stall, engines that are down or die: the right error, and no leak."""

from __future__ import annotations

import asyncio
import json
import socket
import threading
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from clairai.proxy.proxy_settings import Limits
from clairai.ring.layout import RingShape
from tests.http.answers import CHAT, asking, chunks, collect_scores, expected
from tests.http.fake import Exchange, answering
from tests.http.world import HURRIED, World, world
from tests.support.ring_engine import until

PLAIN = {"messages": [], "stream": True}
# By its hanging up, and not by a time-out: the proxy's for such a client, and for an engine that
# says nothing, have two minutes.
SOON_S = 20.0
WITHOUT_ENGINE = "http://127.0.0.1:9"  # the discard port: nobody listens


def until_cancelled(w: World, since_s: float) -> float:
    w.upstream.wait_for(lambda: w.upstream.last.ended_s is not None)
    assert w.upstream.last.was_cancelled
    assert w.upstream.last.ended_s is not None
    return w.upstream.last.ended_s - since_s


@pytest.mark.parametrize("body", [PLAIN, asking(), {**asking(), "stream": False}])
@pytest.mark.parametrize("has_begun", [True, False])
def test_upstream_is_cancelled_soon_after_the_client_has_gone(
    w: World, body: dict[str, Any], has_begun: bool
) -> None:
    async def script(exchange: Exchange) -> None:
        if has_begun and body["stream"]:
            await exchange.begin()
            await exchange.tokens([72])
        await exchange.forever()

    w.upstream.script = script
    client = raw_request(w, body)
    w.upstream.wait_for(lambda: w.upstream.seen)
    if has_begun and body["stream"]:
        assert client.recv(1000)
    left_s = time.monotonic()
    client.close()
    assert until_cancelled(w, left_s) < SOON_S
    until(lambda: w.proxy.counts().streams == 0)


def raw_request(w: World, body: dict[str, Any], *, buffer: int | None = None) -> socket.socket:
    """A client that does only what it is told to."""
    host, port = w.url.removeprefix("http://").split(":")
    sock = socket.socket()
    if buffer is not None:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, buffer)
    sock.connect((host, int(port)))
    raw = json.dumps(body).encode()
    head = f"POST {CHAT} HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(raw)}\r\n\r\n"
    sock.sendall(head.encode() + raw)
    return sock


def test_a_slow_client_is_waited_for_and_costs_a_bounded_amount(tmp_path: Path) -> None:
    is_stuck = threading.Event()
    text = "x" * 2000

    async def script(exchange: Exchange) -> None:
        await exchange.begin()
        for at in range(20_000):
            if exchange.http.transport.get_write_buffer_size() > 0:  # type: ignore[union-attr]
                is_stuck.set()
            exchange.rows(4 + at, [72])
            chunk = exchange.chunk([72])
            chunk["choices"][0]["delta"]["content"] = text
            await exchange.say(chunk)
        await exchange.end()

    # The ring has room for all records, so that none is overwritten while its reader waits.
    limits, shape = Limits(scores=150), RingShape(slots=32_768, slot_bytes=4096)
    with world(tmp_path, script=script, limits=limits, shape=shape) as w:
        slow = raw_request(w, asking(), buffer=4096)
        assert is_stuck.wait(20)  # 40 MB do not fit anywhere
        (sheet,) = w.proxy._scores.values()
        until(lambda: sheet._held >= 150)
        assert sheet._held < 150 + 3
        # Nobody else notices.
        w.upstream.script = answering([72, 101, 108])
        with w.client() as client:
            (one,) = collect_scores(chunks(client.post(CHAT, json=asking()).content)).values()
        assert (one.scores, one.lost) == (expected([72, 101, 108]), 0)
        assert sheet._held < 150 + 3  # it may have taken some meanwhile
        slow.close()
        w.upstream.wait_for(lambda: w.upstream.seen[0].was_cancelled)


@pytest.mark.parametrize("limits", [Limits(scores=30), Limits(scores_in_all=30)])
def test_scores_over_the_limit_are_lost_and_reported(tmp_path: Path, limits: Limits) -> None:
    tokens = [72] * 30

    async def script(exchange: Exchange) -> None:
        await exchange.begin()
        exchange.rows(4, tokens[:-1])
        await asyncio.to_thread(until, lambda: w.proxy.counts().ring.records_delivered == 1)
        await exchange.tokens(tokens, finish="length")
        await exchange.end()

    with world(tmp_path, limits=limits) as w, w.client() as client:
        w.upstream.script = script
        (one,) = collect_scores(chunks(client.post(CHAT, json=asking()).content)).values()
        assert w.proxy.counts().rows_lost == 19
        assert w.proxy._budget.held == 0
    assert one.lost == 19
    assert [row["token"] for row in one.scores] == [72] * 10 + [None] * 20


def test_a_client_that_stalls_is_disconnected(tmp_path: Path) -> None:
    async def script(exchange: Exchange) -> None:
        await exchange.begin()
        while True:
            await exchange.send(b": " + b"x" * 65536 + b"\n\n")

    with world(tmp_path, script=script, timeouts=replace(HURRIED, stalled=0.2)) as w:
        sock = raw_request(w, asking(), buffer=4096)
        w.upstream.wait_for(lambda: w.upstream.seen and w.upstream.last.was_cancelled)
        sock.close()


@pytest.mark.parametrize("clairai", [None, {}])
def test_an_engine_that_was_never_there_is_starting(
    tmp_path: Path, clairai: dict[str, Any] | None
) -> None:
    body = PLAIN if clairai is None else asking()
    with world(tmp_path, has_ring=False, upstream=WITHOUT_ENGINE) as w, w.client() as client:
        answer, health = client.post(CHAT, json=body), client.get("/health")
    assert answer.status_code == 503
    assert answer.headers["retry-after"]
    assert answer.json()["error"]["code"] == "engine-starting"
    assert (health.status_code, health.json()["status"]) == (503, "starting")


def test_an_engine_that_was_ready_and_is_not_there_has_failed(tmp_path: Path) -> None:
    with world(tmp_path) as w, w.client() as client:
        assert client.get("/health").json()["status"] == "ready"
        w.stop_upstream()
        answer, health = client.post(CHAT, json=asking()), client.get("/health")
        models = client.get("/v1/models")
        assert w.proxy.counts().upstream_errors == 2
    assert (answer.status_code, answer.json()["error"]["code"]) == (502, "engine-gone")
    assert (health.status_code, health.json()["status"]) == (503, "failed")
    assert models.status_code == 502
    for refused in (answer, models, health):
        assert "127.0.0.1" not in refused.text
        assert "Traceback" not in refused.text


@pytest.mark.parametrize("body", [PLAIN, asking()])
@pytest.mark.parametrize("half", [b"", b'data: {"choices":[{"ind'])
def test_an_engine_that_dies_in_a_stream_is_an_error_frame_and_no_end(
    w: World, body: dict[str, Any], half: bytes
) -> None:
    is_seen = threading.Event()

    async def script(exchange: Exchange) -> None:
        await exchange.begin()
        await exchange.tokens([72])
        await exchange.end_when(is_seen)
        await exchange.send(half)
        exchange.die()

    w.upstream.script = script
    raw = b""
    with w.client() as client, client.stream("POST", CHAT, json=body) as answer:
        for part in answer.iter_bytes():
            raw += part
            is_seen.set()
    *_, last = raw.strip().split(b"\n\n")
    assert json.loads(last.removeprefix(b"data: "))["error"]["code"] == "engine-gone"
    assert b"[DONE]" not in raw
    assert raw.count(b'"content":"H"') == 1


@pytest.mark.parametrize("body", [PLAIN | {"stream": False}, asking() | {"stream": False}])
def test_an_engine_that_dies_in_a_whole_answer_is_a_bad_gateway(
    w: World, body: dict[str, Any]
) -> None:
    async def script(exchange: Exchange) -> None:
        await exchange.send_half()
        exchange.die()

    w.upstream.script = script
    with w.client() as client:
        client.get("/health")
        assert client.post(CHAT, json=body).status_code == 502


def test_a_stream_that_just_stops_is_not_taken_for_whole(w: World) -> None:
    async def script(exchange: Exchange) -> None:
        await exchange.begin()
        await exchange.tokens([72])

    w.upstream.script = script
    with w.client() as client:
        raw = client.post(CHAT, json=asking()).content
    assert b'"code":"engine-gone"' in raw.split(b"\n\n")[-2]


def test_more_requests_than_there_are_places_are_refused(tmp_path: Path) -> None:
    async def script(exchange: Exchange) -> None:
        await exchange.forever()

    with world(tmp_path, script=script, limits=Limits(streams=1)) as w:
        first = raw_request(w, asking())
        w.upstream.wait_for(lambda: w.upstream.seen)
        with w.client() as client:
            refused = client.post(CHAT, json=PLAIN)
        first.close()
        until_cancelled(w, time.monotonic())
    assert (refused.status_code, refused.headers["retry-after"]) == (503, "1")
