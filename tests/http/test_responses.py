"""OpenAI's Responses API through the proxy: scores in the response, and by its id."""

from __future__ import annotations

import json
import threading
from pathlib import Path
from typing import Any

import msgspec
import pytest
from aiohttp import web

from clairai.proxy import schema as models
from tests.http.answers import expected
from tests.http.fake import PROMPT, Exchange, responding
from tests.http.test_scores_by_id import HEADER, fetch, rows
from tests.http.vllm_wire import response_event
from tests.http.world import HURRIED, World, world

PATH = "/v1/responses"
HELLO = [72, 101, 108, 108, 111]


def asking(**more: Any) -> dict[str, Any]:
    return {"input": "Hi", **more}


def events(raw: bytes) -> list[dict[str, Any]]:
    frames = [frame.split(b"\ndata: ") for frame in raw.split(b"\n\n") if frame]
    made = [json.loads(data) for _, data in frames]
    assert [f"event: {data['type']}".encode() for data in made] == [name for name, _ in frames]
    return made


@pytest.mark.parametrize("is_streamed", [True, False])
def test_a_response_has_the_scores_of_its_tokens(w: World, is_streamed: bool) -> None:
    w.upstream.script = responding(HELLO)
    with w.client() as client:
        body = asking(stream=is_streamed, clairai={"prompt_scores": True})
        raw = client.post(PATH, json=body).content
    made = events(raw)[-1]["response"] if is_streamed else json.loads(raw)
    msgspec.convert(made["probe_scores"], models.ProbeScores)
    msgspec.convert(made["prompt_scores"], models.PromptScores)
    assert rows(made) == expected(HELLO)
    assert made["prompt_scores"]["token_ids"] == PROMPT
    assert (made["input_messages"], made["output_messages"]) == (None, None)
    kept = fetch(w, "resp_1").json()
    assert (kept["status"], kept["choices"][0]["finish_reason"]) == ("done", "stop")
    assert rows(kept["choices"][0]) == expected(HELLO)


@pytest.mark.parametrize("is_streamed", [True, False])
def test_with_the_header_a_response_is_as_without_scores(w: World, is_streamed: bool) -> None:
    w.upstream.script = responding(HELLO, status="incomplete")
    body = asking(stream=is_streamed)
    with w.client() as client, w.direct() as direct:
        quiet, alone = client.post(PATH, json=body, headers=HEADER), direct.post(PATH, json=body)
    assert quiet.content == alone.content
    kept = fetch(w, "resp_1").json()
    assert rows(kept["choices"][0]) == expected(HELLO)
    assert kept["choices"][0]["finish_reason"] == "length"


def test_without_our_fields_a_response_passes_byte_for_byte(w: World) -> None:
    w.upstream.script = responding(HELLO)
    with w.client() as client, w.direct() as direct:
        raw = client.post(PATH, json=asking(stream=True)).content
        assert raw == direct.post(PATH, json=asking(stream=True)).content
    assert not w.upstream.last.is_scored


def test_messages_that_the_client_asked_for_stay(w: World) -> None:
    w.upstream.script = responding(HELLO)
    with w.client() as client:
        body = asking(clairai={}, enable_response_messages=True)
        made = client.post(PATH, json=body).json()
    assert made["output_messages"][0]["tokens"] == HELLO
    assert rows(made) == expected(HELLO)


def test_events_do_not_wait_for_the_last_one(tmp_path: Path) -> None:
    is_seen = threading.Event()

    async def script(exchange: Exchange) -> None:
        delta = response_event("response.output_text.delta", 0, {"delta": "H"})
        await exchange.send(delta)
        await exchange.end_when(is_seen)
        await responding([72, 105])(exchange)

    with world(tmp_path, script=script) as w:
        for raw in w.growing(asking(stream=True, clairai={}), PATH):
            if b'"delta":"H"' in raw:
                is_seen.set()
    assert rows(events(raw)[-1]["response"]) == expected([72, 105])


def test_rows_that_do_not_come_are_lost_and_counted(tmp_path: Path) -> None:
    async def script(exchange: Exchange) -> web.StreamResponse | None:
        exchange.ring = None
        return await responding(HELLO)(exchange)

    with world(tmp_path, script=script, timeouts=HURRIED) as w, w.client() as client:
        made = client.post(PATH, json=asking(clairai={})).json()
    assert made["probe_scores"]["lost"] == 4
    assert len(made["probe_scores"]["scores"]) == 5


def _without_tokens(exchange: Exchange) -> None:
    """As an engine of another kind: it has the flag, and tells messages without tokens."""
    exchange.body["enable_response_messages"] = False


@pytest.mark.parametrize("is_streamed", [True, False])
def test_an_engine_that_does_not_tell_the_tokens_is_said_so(w: World, is_streamed: bool) -> None:
    async def script(exchange: Exchange) -> web.StreamResponse | None:
        _without_tokens(exchange)
        return await responding(HELLO)(exchange)

    w.upstream.script = script
    with w.client() as client:
        answer = client.post(PATH, json=asking(stream=is_streamed, clairai={}))
    if is_streamed:
        error = events(answer.content)[-1]
        assert error["type"] == "error"
    else:
        error = answer.json()["error"]
        assert answer.status_code == 502
    assert error["code"] == "unsupported"
    assert "does not tell the tokens" in error["message"]


def test_a_stream_that_breaks_off_ends_with_an_error_event(w: World) -> None:
    async def script(exchange: Exchange) -> None:
        await exchange.send(response_event("response.output_text.delta", 0, {"delta": "H"}))

    w.upstream.script = script
    with w.client() as client:
        raw = client.post(PATH, json=asking(stream=True, clairai={})).content
    error = events(raw)[-1]
    assert (error["type"], error["code"]) == ("error", "engine-gone")


def test_a_response_that_upstream_does_not_confirm_as_steered_is_refused(tmp_path: Path) -> None:
    with world(tmp_path, script=responding(HELLO)) as w, w.client() as client:
        body = asking(clairai={"stop": [{"probe": "token", "threshold": 1}]})

        async def script(exchange: Exchange) -> web.StreamResponse | None:
            exchange.echo = None
            return await responding(HELLO)(exchange)

        w.upstream.script = script
        whole = client.post(PATH, json=body)
        streamed = client.post(PATH, json={**body, "stream": True})
    assert (whole.status_code, whole.json()["error"]["code"]) == (502, "unsupported")
    assert events(streamed.content)[-1]["code"] == "unsupported"


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        ({"background": True}, "in the background is not scored"),
        ({"tools": [{"type": "web_search_preview"}]}, "calls tools on the server"),
        ({"clairai": {"events": "named"}}, "named events are for chats"),
        ({"request_id": "x" * 300}, "request_id may have 256"),
    ],
)
def test_what_cannot_be_scored_is_refused(w: World, body: dict[str, Any], reason: str) -> None:
    with w.client() as client:
        answer = client.post(PATH, json=asking(**{"clairai": {}, **body}))
    assert answer.status_code == 400
    assert reason in answer.json()["error"]["message"]
    assert not w.upstream.seen


def test_functions_that_the_client_runs_are_scored(w: World) -> None:
    w.upstream.script = responding(HELLO)
    tools = [{"type": "function", "name": "f", "parameters": {}}]
    with w.client() as client:
        made = client.post(PATH, json=asking(tools=tools, clairai={})).json()
    assert rows(made) == expected(HELLO)
