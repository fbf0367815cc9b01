"""What the observers of the proxy learn of each kind of completion."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_args

import numpy as np
import pytest
from aiohttp import web
from numpy.typing import NDArray

from clairai.proxy.engine_facts import RECENT_S, HealthStatus
from clairai.proxy.observe.metrics import Metrics
from clairai.proxy.observe.observer import FEATURES, CompletionEnd, HealthState
from clairai.wire import ring_messages
from tests.http.answers import CHAT
from tests.http.fake import PROMPT, Exchange
from tests.http.test_counts_agree import read_samples
from tests.http.world import World, world
from tests.support.ring_engine import until

SCORED = {"clairai": {"probes": "all"}}


class Recorder:
    """An observer that records what is reported."""

    def __init__(self) -> None:
        self.ends: list[CompletionEnd] = []
        self.lags_s: list[float] = []

    def on_scores(
        self,
        bank: ring_messages.Bank,
        rows: NDArray[np.void],
        scores_RP: NDArray[np.float32],
        stamp_ns: int,
    ) -> None:
        assert scores_RP.shape == (len(rows), len(bank.probes))
        self.lags_s.append((time.monotonic_ns() - stamp_ns) / 1e9)

    def on_completion_end(self, end: CompletionEnd) -> None:
        self.ends.append(end)


@pytest.fixture
def observer() -> Recorder:
    return Recorder()


@pytest.fixture
def proxied(tmp_path: Path, observer: Recorder) -> Iterator[World]:
    with world(tmp_path, observers=(observer,), metrics=Metrics()) as made:
        yield made


def _post(proxied: World, **fields: Any) -> int:
    body = {"model": "m", "messages": [{"role": "user", "content": "hi"}], **fields}
    with proxied.client() as client:
        return client.post(CHAT, json=body).status_code


def _only(observer: Recorder) -> CompletionEnd:
    until(lambda: observer.ends)
    (end,) = observer.ends
    return end


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("fields", [{}, SCORED])
def test_the_end_of_every_completion_is_reported_with_its_times(
    proxied: World, observer: Recorder, fields: dict[str, Any], stream: bool
) -> None:
    assert _post(proxied, stream=stream, **fields) == 200
    end = _only(observer)
    assert (end.route, end.status, end.outcome, end.run) == (CHAT, 200, "done", None)
    assert end.is_scored == bool(fields)
    assert [choice.tokens for choice in end.choices] == ([2] if fields else [])
    assert (end.first_token_seconds is not None) == stream
    assert 0 <= (end.first_token_seconds or 0) <= end.seconds < 20


@pytest.mark.parametrize("fields", [{}, SCORED])
def test_the_first_token_is_not_the_chunk_with_the_role(
    proxied: World, observer: Recorder, fields: dict[str, Any]
) -> None:
    has_role = threading.Event()

    async def script(exchange: Exchange) -> None:
        await exchange.begin()
        await exchange.end_when(has_role)
        exchange.prefill()
        exchange.rows(len(PROMPT), [72])
        await exchange.tokens([72])
        await exchange.tokens([73], finish="length")
        await exchange.end(num_generated=2)

    proxied.upstream.script = script
    body = {"messages": [], "stream": True, **fields}
    with proxied.client() as client, client.stream("POST", CHAT, json=body) as answer:
        lines = answer.iter_lines()
        assert '"role"' in next(lines)
        asked_s = time.monotonic()
        until(lambda: time.monotonic() - asked_s > 0.05)
        has_role.set()
        list(lines)
    assert (_only(observer).first_token_seconds or 0) > 0.05


def test_a_named_run_is_reported_with_its_id(proxied: World, observer: Recorder) -> None:
    body = {"messages": [], "clairai": {"events": "named"}}
    with proxied.client() as client:
        answer = client.post(CHAT, json=body)
    assert _only(observer).run == answer.headers["X-Clairai-Run"]


def test_a_refused_request_is_reported_with_its_status(proxied: World, observer: Recorder) -> None:
    assert _post(proxied, clairai={"bogus": 1}) == 400
    end = _only(observer)
    assert (end.status, end.outcome, end.is_scored) == (400, "error", False)


@pytest.mark.parametrize("fields", [{}, SCORED])
def test_a_refusal_of_upstream_is_reported_with_its_status(
    proxied: World, observer: Recorder, fields: dict[str, Any]
) -> None:
    async def refuse(_: Exchange) -> web.StreamResponse:
        return web.json_response({"error": {"message": "no"}}, status=422)

    proxied.upstream.script = refuse
    assert _post(proxied, **fields) == 422
    end = _only(observer)
    assert (end.status, end.outcome) == (422, "error")


@pytest.mark.parametrize("fields", [{}, SCORED])
def test_an_answer_in_another_shape_is_an_answer(
    proxied: World, observer: Recorder, fields: dict[str, Any]
) -> None:
    async def answer(_: Exchange) -> web.StreamResponse:
        return web.json_response(["something else"])

    proxied.upstream.script = answer
    assert _post(proxied, **fields) == 200
    assert _only(observer).outcome == "done"


@pytest.mark.parametrize("fields", [{}, SCORED])
def test_an_engine_that_dies_in_the_middle_is_reported_as_an_error(
    proxied: World, observer: Recorder, fields: dict[str, Any]
) -> None:
    async def die(exchange: Exchange) -> None:
        await exchange.begin()
        exchange.die()

    proxied.upstream.script = die
    assert _post(proxied, stream=True, **fields) == 200
    assert _only(observer).outcome == "error"


@pytest.mark.parametrize("fields", [{}, SCORED])
def test_a_client_that_leaves_is_reported_as_cancelled_and_counted_once(
    proxied: World, observer: Recorder, fields: dict[str, Any]
) -> None:
    async def wait(exchange: Exchange) -> None:
        await exchange.begin()
        await exchange.tokens([72])
        await asyncio.Event().wait()

    proxied.upstream.script = wait
    body = {"messages": [], "stream": True, **fields}
    with proxied.client() as client, client.stream("POST", CHAT, json=body) as answer:
        next(answer.iter_raw())
    assert _only(observer).outcome == "cancelled"
    assert proxied.proxy.counts().ended["cancelled"] == 1


@pytest.mark.parametrize("fields", [{}, SCORED])
def test_a_client_that_leaves_after_the_end_is_reported_as_done(
    proxied: World, observer: Recorder, fields: dict[str, Any]
) -> None:
    async def linger(exchange: Exchange) -> None:
        """Says the end, and keeps the connection open behind it."""
        exchange.prefill()  # or the proxy waits for the names of the probes
        await exchange.begin()
        await exchange.tokens([72], finish="length")
        await exchange.end()
        await asyncio.Event().wait()

    proxied.upstream.script = linger
    body = {"messages": [], "stream": True, **fields}
    with proxied.client() as client, client.stream("POST", CHAT, json=body) as answer:
        assert any("[DONE]" in line for line in answer.iter_lines())
    assert _only(observer).outcome == "done"
    assert proxied.proxy.counts().ended["cancelled"] == 0


def test_a_status_set_by_the_launcher_is_what_clients_get(
    proxied: World, observer: Recorder
) -> None:
    async def die(exchange: Exchange) -> None:
        exchange.die()

    proxied.upstream.script = die
    for status, code in (("starting", "engine-starting"), ("failed", "engine-gone")):
        proxied.proxy.health.set_status(HealthStatus(status, "it is being mended"))  # type: ignore[arg-type]
        with proxied.client() as client:
            answer = client.post(CHAT, json={"messages": []})
        assert answer.status_code == 503
        error = answer.json()["error"]
        assert (error["code"], "it is being mended" in error["message"]) == (code, True)
    until(lambda: len(observer.ends) == 2)
    assert [end.status for end in observer.ends] == [503, 503]


def test_records_come_with_the_time_they_were_published(proxied: World, observer: Recorder) -> None:
    _post(proxied, **SCORED)
    until(lambda: observer.lags_s)
    assert all(0 <= lag_s < 20 for lag_s in observer.lags_s)
    # An answer may be with its client before those who watch have been told of its rows.
    counted = {
        'clairai_completions_ended_total{"outcome": "done"}': 1,
        'clairai_generated_score_count{"probe": "token"}': 1,
    }
    until(lambda: counted.items() <= _metrics(proxied).items())


def _metrics(proxied: World) -> dict[str, float]:
    with proxied.client() as client:
        return read_samples(client.get("/metrics").text)


def test_requests_are_counted_by_route_and_nothing_that_a_client_writes_adds_a_series(
    proxied: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def fail(_: object) -> None:
        raise RuntimeError("planted")

    with proxied.client() as client:
        client.get("/v1/models")
        for at in range(9):
            client.get(f"/nothing/{at}")
            client.get(f"/v1/runs/run-{at}")
            client.request(f"METHOD{at}", "/v1/models")
        monkeypatch.setattr(proxied.proxy.engine_facts, "check_probes", fail)
        assert client.post(CHAT, json={"messages": [], **SCORED}).status_code == 500
    found = {key: value for key, value in _metrics(proxied).items() if "_requests_total" in key}
    series = {
        ("GET /v1/models", "2xx"): 1,
        ("GET /v1/models", "4xx"): 9,
        ("GET /v1/runs/{run}", "4xx"): 9,
        (f"POST {CHAT}", "5xx"): 1,
        ("other", "4xx"): 9,
    }
    assert found == {
        f'clairai_requests_total{{"route": "{route}", "status": "{status}"}}': count
        for (route, status), count in series.items()
    }


@pytest.mark.parametrize(
    ("asked", "features"),
    [
        ({}, {"scores"}),
        ({"prompt_scores": True}, {"scores", "prompt_scores"}),
        ({"steer": [{"vector": "calm", "scale": 2.0}]}, {"scores", "steering"}),
        ({"stop": [{"probe": "token", "threshold": 9, "tokens": 2}]}, {"scores", "rules"}),
        ({"capture": True}, {"scores", "capture"}),
        ({"events": "named"}, {"scores", "events"}),
    ],
)
def test_completions_are_counted_by_what_they_ask_of_clairai(
    proxied: World, asked: dict[str, Any], features: set[str]
) -> None:
    assert _post(proxied) == 200  # asks for nothing
    assert _post(proxied, clairai=asked) == 200
    found = _metrics(proxied)
    counts = {
        name: found[f'clairai_completions_asked_total{{"feature": "{name}"}}'] for name in FEATURES
    }
    assert counts == {name: float(name in features) for name in FEATURES}


def test_tokens_are_counted_while_the_answer_is_given(proxied: World) -> None:
    async def wait(exchange: Exchange) -> None:
        await exchange.begin()
        await exchange.tokens([72, 105])
        await asyncio.Event().wait()

    proxied.upstream.script = wait
    body = {"messages": [], "stream": True, **SCORED}
    with proxied.client() as client, client.stream("POST", CHAT, json=body):
        until(lambda: _metrics(proxied)["clairai_tokens_total"] == 2)
    until(lambda: _metrics(proxied)["clairai_streams"] == 0)
    assert _metrics(proxied)["clairai_tokens_total"] == 2


def test_a_scrape_asks_the_engine_all_it_needs_at_once(proxied: World) -> None:
    """So that one that hangs does not take longer than a scrape has."""
    proxied.upstream.waits_for = {"/health", "/metrics", "/v1/clairai/capture"}
    found = _metrics(proxied)
    assert proxied.upstream.waits_for == set()
    assert found['clairai_health{"state": "ready"}'] == 1
    assert found['clairai_capture_consumer_up{"consumer": "fs"}'] == 1
    assert found["vllm:num_requests_running"] == 0


def test_health_is_a_series_and_those_who_watch_ask_the_engine_once_a_second(
    proxied: World,
) -> None:
    assert _metrics(proxied)['clairai_health{"state": "ready"}'] == 1
    proxied.proxy.health.set_status(HealthStatus("failed", "it is gone"))
    found = _metrics(proxied)
    states = {name: found[f'clairai_health{{"state": "{name}"}}'] for name in get_args(HealthState)}
    assert states == {"starting": 0, "ready": 0, "degraded": 0, "failed": 1}
    proxied.proxy.health.set_status(None)
    assert _metrics(proxied)['clairai_health{"state": "ready"}'] == 1
    asked = proxied.upstream.num_health_checks
    began_s = time.monotonic()
    for _ in range(20):
        _metrics(proxied)
    assert proxied.upstream.num_health_checks - asked <= (time.monotonic() - began_s) / RECENT_S + 1
