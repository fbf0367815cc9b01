"""Routes of vLLM's own through the proxy: passed on as they are, and no way round its checks."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web
from prometheus_client.parser import text_string_to_metric_families

from clairai.proxy.access_keys import AccessKey
from clairai.proxy.observe.metrics import Metrics
from clairai.proxy.routes import VLLM_ROUTES, Route
from tests.http.fake import Exchange
from tests.http.world import World, world

READER = "a-key-that-only-reads"
KEYS = (AccessKey.of(READER, name="reader", rights=("read",)),)
OURS = {"stream": 7, "owner": "somebody", "steer": [{"vector": "calm"}]}


def test_an_answer_comes_back_byte_for_byte(w: World) -> None:
    sent = b'{"model" : "m",  "messages":[{"role":"user","content":"Hi"}], "max_tokens":1.0e1}'

    async def script(_: Exchange) -> web.StreamResponse:
        return web.Response(body=b'{"type" : "message"}', headers={"X-Extra": "kept"})

    w.upstream.script = script
    with w.client() as client:
        headers = {"Content-Type": "application/json"}
        answer = client.post("/v1/messages?beta=true", content=sent, headers=headers)
    assert (answer.content, answer.headers["x-extra"]) == (b'{"type" : "message"}', "kept")
    assert w.upstream.last.raw == sent
    assert w.upstream.last.http.query_string == "beta=true"


def test_a_stream_of_another_kind_comes_back_byte_for_byte(w: World) -> None:
    frames = b'event: message_start\ndata: {"a" : 1}\n\nevent: message_stop\ndata: {}\n\n'

    async def script(exchange: Exchange) -> None:
        await exchange.send(frames)

    w.upstream.script = script
    with w.client() as client:
        assert client.post("/v1/messages", json={"stream": True}).content == frames


@pytest.mark.parametrize("path", ["/v1/messages", "/v1/responses"])
def test_a_stream_that_breaks_off_ends_with_an_event_that_its_clients_read(
    w: World, path: str
) -> None:
    async def script(exchange: Exchange) -> None:
        await exchange.send(b"event: first\ndata: {}\n\n" * 3)
        exchange.die()

    w.upstream.script = script
    with w.client() as client:
        raw = client.post(path, json={"stream": True, "messages": [], "input": "a"}).text
    *_, last = raw.rstrip().split("\n\n")
    name, data = last.split("\n")
    assert name == "event: error"
    told = json.loads(data.removeprefix("data: "))
    assert (told["type"], told["error"]["message"]) == (
        "error",
        "the engine ended in the middle of the answer",
    )
    if path == "/v1/responses":
        assert (told["code"], told["sequence_number"]) == ("engine-gone", 3)


def test_a_get_is_passed_on_and_its_id_is_quoted(w: World) -> None:
    with w.client() as client:
        assert client.get("/version").json() == {"version": "0.32.0"}
        missing = client.get("/v1/responses/resp_%2e%2e%2fmodels")
    assert missing.status_code == 404
    assert "%2F" in missing.json()["error"]["message"] or ".." not in missing.text


def test_a_route_that_the_server_does_not_have_is_its_404(w: World) -> None:
    with w.client() as client:
        answer = client.post("/rerank", json={"query": "a", "documents": ["b"]})
    assert answer.status_code == 404
    assert answer.json()["error"]["message"] == "Not Found"


@pytest.mark.attack(816)
@pytest.mark.parametrize("path", ["/v1/messages", "/v1/embeddings", "/inference/v1/generate"])
@pytest.mark.parametrize(
    "body",
    [
        {"clairai": OURS},
        {"steering_vectors": {}},
        {"vllm_xargs": {"clairai": json.dumps(OURS)}},
        {"vllm_xargs": {"prefill_steering_vectors": "{}"}},
        {"sampling_params": {"extra_args": {"clairai": OURS}}},
        {"requests": [{"body": {"vllm_xargs": {"clairai": "{}"}}}]},
    ],
)
def test_fields_of_ours_reach_the_engine_by_no_other_route(
    w: World, path: str, body: dict[str, Any]
) -> None:
    with w.client() as client:
        plain = client.post(path, json={"a": 1, **body})
        escaped = json.dumps(body).replace("clairai", "\\u0063lairai")
        sent = escaped.replace("steering_v", "steering\\u005fv").encode()
        hidden = client.post(path, content=sent, headers={"Content-Type": "application/json"})
    for answer in (plain, hidden):
        assert answer.status_code == 400
        assert "this route does not read" in answer.json()["error"]["message"]
    assert not w.upstream.seen


@pytest.mark.attack(817)
@pytest.mark.parametrize(
    "name", ["vllm_xargs", "clairai", "decode_steering_vectors"], ids=lambda name: str(name)
)
def test_forms_carry_no_fields_of_ours(w: World, name: str) -> None:
    files = {"file": ("a.wav", b"RIFF....", "audio/wav")}
    with w.client() as client:
        answer = client.post(
            "/v1/audio/transcriptions", files=files, data={"model": "m", name: '{"clairai": "{}"}'}
        )
    assert answer.status_code == 400
    assert not w.upstream.seen


def test_a_form_is_passed_on_with_its_file(w: World) -> None:
    sound = bytes(range(256)) * 512
    with w.client() as client:
        files = {"file": ("a.wav", sound, "audio/wav")}
        client.post("/v1/audio/transcriptions", files=files, data={"model": "clairai"})
    assert sound in w.upstream.last.raw


def test_our_words_in_a_clients_text_are_its_own(w: World) -> None:
    async def script(_: Exchange) -> web.StreamResponse:
        return web.json_response({"seen": True})

    w.upstream.script = script
    content = {"input": {"clairai": "a word", "text": "steering_vectors"}}
    with w.client() as client:
        assert client.post("/v1/messages", json={"messages": [content]}).json() == {"seen": True}


@pytest.mark.attack(818)
def test_what_changes_the_engine_for_everybody_needs_admin(tmp_path: Path) -> None:
    with world(tmp_path, keys=KEYS) as w, w.client() as client:
        headers = {"Authorization": f"Bearer {READER}"}
        statuses = {
            (route.method, route.path): _ask(client, route, headers)
            for route in VLLM_ROUTES
            if route.right == "admin"
        }
    assert len(statuses) > 20
    assert set(statuses.values()) == {403}


def _ask(client: Any, route: Route, headers: dict[str, str]) -> int:
    more: dict[str, Any] = {"json": {}} if route.body == "json" else {}
    return int(client.request(route.method, route.path, headers=headers, **more).status_code)


def test_an_error_without_a_reason_gets_one(w: World) -> None:
    async def script(exchange: Exchange) -> web.StreamResponse:
        return exchange.refuse(500, "")

    w.upstream.script = script
    with w.client() as client:
        body: dict[str, Any] = {"messages": []}
        answers = [client.post("/v1/chat/completions", json=body)]
        answers.append(client.post("/v1/chat/completions", json={**body, "clairai": {}}))
    ids = [one.http.headers["X-Request-Id"] for one in w.upstream.seen]
    for answer, request_id in zip(answers, ids, strict=True):
        assert answer.status_code == 500
        message = answer.json()["error"]["message"]
        assert "gave no reason" in message
        assert request_id in message


def test_a_scrape_has_our_series_and_vllms(tmp_path: Path) -> None:
    with world(tmp_path, metrics=Metrics()) as w, w.client() as client:
        both = client.get("/metrics").text
        w.stop_upstream()
        alone = client.get("/metrics").text
    names = [{one.name for one in text_string_to_metric_families(text)} for text in (both, alone)]
    assert {"clairai_streams", "vllm:num_requests_running"} <= names[0]
    assert names[1] == names[0] - {"vllm:num_requests_running"}
