"""Engines that fail or say nothing: every wait ends, with an error that says what is wrong."""

from __future__ import annotations

import threading
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest

from clairai.proxy.proxy_settings import Timeouts
from tests.http.answers import CHAT, asking
from tests.http.fake import Exchange
from tests.http.world import PATIENT, World, world
from tests.support.ring_engine import until

HURRIED = replace(PATIENT, control=0.3)
STEP_S = 2.0  # between two looks at what must not move with them
ASKS: dict[str, dict[str, Any]] = {
    "steering": {"steer": [{"vector": "calm"}]},
    "a stop rule": {"stop": [{"probe": "token", "above": 1.0}]},
    "a capture": {"capture": {}},
    "a probe": {"probes": ["new"]},
    "texts of tokens": {"prompt_scores": True},
}


@pytest.mark.attack(430)
@pytest.mark.parametrize("status", [500, 503])
@pytest.mark.parametrize("what", ASKS)
def test_a_request_that_needs_a_dead_engine_is_told_so_and_not_that_it_cannot(
    tmp_path: Path, what: str, status: int
) -> None:
    with world(tmp_path) as w, w.client() as client:
        assert client.get("/health").json()["status"] == "ready"
        w.upstream.control_status = status
        answer = client.post(CHAT, json={**asking(), "clairai": ASKS[what]})
    assert answer.status_code in (502, 503)
    assert answer.json()["error"]["code"] == "engine-gone"
    assert not w.upstream.seen  # and it was not sent, unsteered


@pytest.mark.attack(431)
@pytest.mark.parametrize("path", ["/v1/models", "/v1/probes", "/v1/steering", "/v1/captures"])
def test_a_control_request_to_a_silent_engine_ends(tmp_path: Path, path: str) -> None:
    with world(tmp_path, timeouts=HURRIED) as w, w.client() as client:
        until(lambda: client.get("/health").json()["status"] == "ready")
        w.upstream.control_status = 0
        answer = client.get(path)
    assert (answer.status_code, answer.json()["error"]["code"]) == (502, "engine-gone")


@pytest.mark.attack(432)
def test_a_completion_that_needs_a_silent_engine_ends(tmp_path: Path) -> None:
    with world(tmp_path, timeouts=HURRIED) as w, w.client() as client:
        until(lambda: client.get("/health").json()["status"] == "ready")
        w.upstream.control_status = 0
        answer = client.post(CHAT, json={**asking(), "clairai": ASKS["steering"]})
    assert (answer.status_code, answer.json()["error"]["code"]) == (502, "engine-gone")


async def _say_one_token(exchange: Exchange) -> None:
    await exchange.begin()
    await exchange.tokens([72])
    await exchange.forever()


async def _say_nothing(exchange: Exchange) -> None:
    await exchange.forever()


@pytest.mark.parametrize("is_scored", [True, False])
def test_answers_that_the_launcher_ends_are_errors_and_nothing_is_held(
    w: World, is_scored: bool
) -> None:
    w.upstream.script = _say_one_token
    body = asking() if is_scored else {"messages": [], "stream": True}
    parts = w.growing(body)
    raw = next(part for part in parts if b'"content":"H"' in part)
    w.proxy.end_answers()
    *_, raw = [raw, *parts]
    assert b'"code":"engine-gone"' in raw.split(b"\n\n")[-2]
    assert b"[DONE]" not in raw
    until(lambda: w.proxy.counts().streams == 0)
    assert w.proxy.upstream.num_waiting == 0


def test_a_named_run_that_the_launcher_ends_has_an_error_event(w: World) -> None:
    w.upstream.script = _say_one_token
    parts = w.growing(asking(events="named"))
    raw = next(part for part in parts if b"event: token" in part)
    w.proxy.end_answers()
    *_, raw = [raw, *parts]
    assert b"event: error" in raw
    assert b"engine-gone" in raw


@pytest.mark.parametrize("is_scored", [True, False])
def test_whole_answers_that_the_launcher_ends_are_refused(w: World, is_scored: bool) -> None:
    w.upstream.script = _say_nothing
    body = {**(asking() if is_scored else {"messages": []}), "stream": False}
    answers: list[httpx.Response] = []

    def ask() -> None:
        with w.client() as client:
            client.get("/health")
            answers.append(client.post(CHAT, json=body))

    asked = threading.Thread(target=ask)
    asked.start()
    w.upstream.wait_for(lambda: w.upstream.seen)
    w.proxy.end_answers()
    asked.join(60)
    assert answers[0].status_code == 502
    assert answers[0].json()["error"]["code"] == "engine-gone"


def test_requests_after_that_reach_the_next_engine(w: World) -> None:
    w.proxy.end_answers()
    with w.client() as client:
        assert client.post(CHAT, json=asking()).status_code == 200


def test_a_core_that_does_not_answer_shows_in_health_with_its_time(tmp_path: Path) -> None:
    """Without a launcher: vLLM's own /health does not ask the core."""
    with world(tmp_path) as w, w.client() as client:
        ready = client.get("/health").json()
        assert ready["status"] == "ready"
        w.upstream.control_status = 503
        degraded = client.get("/health").json()
        until(lambda: time.time() > degraded["since"] + STEP_S)
        later = client.get("/health").json()
        w.upstream.control_status = None
        again = client.get("/health").json()
    assert degraded["status"] == "degraded"
    assert degraded["reason"].startswith("the engine core does not answer")
    assert later["since"] == pytest.approx(degraded["since"], abs=STEP_S / 2)
    assert degraded["since"] >= ready["since"]
    assert again["status"] == "ready"


@pytest.mark.attack(433)
def test_streams_of_a_core_that_does_not_answer_for_too_long_end(tmp_path: Path) -> None:
    timeouts: Timeouts = replace(PATIENT, stall=0.4)
    with world(tmp_path, script=_say_one_token, timeouts=timeouts) as w:
        parts = w.growing({"messages": [], "stream": True})
        raw = next(part for part in parts if b'"content":"H"' in part)
        w.upstream.control_status = 503
        *_, raw = [raw, *parts]
    assert b'"code":"engine-gone"' in raw.split(b"\n\n")[-2]


def test_a_silent_stream_of_a_core_that_answers_goes_on(tmp_path: Path) -> None:
    """A long prompt is silence, and is legal."""
    asked = 0
    may_end = threading.Event()

    async def script(exchange: Exchange) -> None:
        await exchange.begin()
        await exchange.end_when(may_end)
        await exchange.tokens([72], finish="stop")
        await exchange.end()

    with world(tmp_path, script=script, timeouts=replace(PATIENT, stall=0.1)) as w:
        original = w.proxy.health.silent_s

        async def count() -> float:
            nonlocal asked
            asked += 1
            if asked == 8:  # many times the limit
                may_end.set()
            return await original()

        w.proxy.health.silent_s = count  # type: ignore[method-assign]
        *_, raw = w.growing({"messages": [], "stream": True})
    assert b"[DONE]" in raw
