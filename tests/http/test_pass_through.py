"""Without our key the proxy passes everything on, byte for byte."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any
from urllib.parse import quote

import pytest
from aiohttp import web

from tests.http import vllm_wire
from tests.http.answers import CHAT, TEXT, asking, chunks
from tests.http.fake import Exchange, answering
from tests.http.world import World, world

ODD_BODY = b'{"messages" : [],\n "stream":true, "temperature":1.0e0, "odd":"\\u0048\\/", "odd":2}'


@pytest.mark.parametrize("path", [CHAT, TEXT])
@pytest.mark.parametrize("raw", [ODD_BODY, b'["clairai"]', b'{"a":{"clairai":1}}', b"clairai"])
def test_a_request_without_our_key_arrives_byte_by_byte(w: World, path: str, raw: bytes) -> None:
    async def script(exchange: Exchange) -> web.StreamResponse:
        return exchange.refuse(400, "seen")

    w.upstream.script = script
    with w.client() as client:
        headers = {"Content-Type": "application/json", "X-Request-Id": "r", "Cookie": "session=1"}
        answer = client.post(path, content=raw, headers=headers)
        assert (answer.status_code, answer.headers["x-request-id"]) == (400, "r")
    sent = {name.lower(): value for name, value in w.upstream.last.headers.items()}
    assert w.upstream.last.raw == raw
    assert sent["content-type"] == "application/json"
    assert re.fullmatch("[0-9a-f]{32}", sent["x-request-id"])
    assert "cookie" not in sent


@pytest.mark.parametrize("size", [1, 7, 1 << 16])
def test_an_answer_without_our_key_is_returned_byte_for_byte(w: World, size: int) -> None:
    odd = b': hm\r\n\r\ndata: {"a" : 1}\r\n\r\nevent: x\ndata: 1\ndata: 2\n\ndata: [DONE]\n\nrest'

    async def script(exchange: Exchange) -> None:
        for at in range(0, len(odd), size):
            await exchange.send(odd[at : at + size])

    w.upstream.script = script
    with w.client() as client:
        assert client.post(CHAT, json={"stream": True}).content == odd


def test_every_field_of_a_scored_request_reaches_upstream_as_it_was(w: World) -> None:
    raw = (
        b'{"messages":[{"role":"user","content":"Hi"}],"temperature":1.0e0,"big":123456789012345678901,'
        b'"vllm_xargs":{"mine":[1.50,"x"]},"clairai":{"probes":["token"]},"nested":{"clairai":1}}'
    )
    with w.client() as client:
        answer = client.post(CHAT, content=raw, headers={"Content-Type": "application/json"})
    assert answer.status_code == 200
    got = w.upstream.last.raw
    assert b'"temperature":1.0e0,"big":123456789012345678901' in got
    assert b'"vllm_xargs":{"mine":[1.50,"x"],"clairai":"{\\"stream\\":' in got
    assert b'"nested":{"clairai":1}' in got
    assert b'"return_token_ids":true' in got
    assert b'"clairai":{"probes"' not in got


def test_two_requests_never_have_the_same_stream(w: World) -> None:
    with w.client() as client:
        for _ in range(20):
            client.post(CHAT, json=asking())
    streams = {exchange.stream for exchange in w.upstream.seen}
    assert len(streams) == 20
    assert max(streams) > 2**48


def test_what_a_browser_may_read_is_not_upstreams_to_say(w: World) -> None:
    with w.client() as client:
        answer = client.get("/v1/models", headers={"Origin": "http://elsewhere"})
    assert answer.json()["data"][0]["id"] == vllm_wire.MODEL
    assert answer.headers["x-extra"] == "kept"
    assert not [name for name in answer.headers if name.startswith("access-control")]
    assert "server" not in answer.headers


@pytest.mark.parametrize("path", ["/tokenize", "/detokenize"])
def test_tokens_are_upstreams_to_count(w: World, path: str) -> None:
    with w.client() as client:
        assert client.post(path, json={"a": 1}).json() == {"path": path, "got": {"a": 1}}


@pytest.mark.parametrize("name", ["french", "dir/french", "a b", "%2e", "é"])
def test_probes_are_put_and_removed_by_their_whole_name(w: World, name: str) -> None:
    with w.client() as client:
        path = f"/v1/probes/{quote(name)}"
        assert client.put(path, content=b"\x00file").status_code == 200
        assert client.delete(path).status_code == 200
    assert w.upstream.probes == [("PUT", name, b"\x00file"), ("DELETE", name, b"")]


def test_a_name_that_climbs_is_refused_before_it_is_passed_on(w: World) -> None:
    with w.client() as client:
        assert client.delete("/v1/probes/..%2fmodels").status_code == 400
    assert w.upstream.probes == []


@pytest.mark.parametrize("clairai", [None, {}])
@pytest.mark.parametrize(("status", "message"), [(400, "bad temperature"), (404, "no model")])
def test_an_error_of_upstream_keeps_its_status_and_body(
    w: World, clairai: dict[str, Any] | None, status: int, message: str
) -> None:
    async def script(exchange: Exchange) -> web.StreamResponse:
        return exchange.refuse(status, message)

    w.upstream.script = script
    body = {"messages": [], "stream": True} | ({} if clairai is None else {"clairai": clairai})
    with w.client() as client:
        answer = client.post(CHAT, json=body)
    assert answer.status_code == status
    assert answer.json()["error"]["message"] == message


def test_the_clients_key_goes_upstream_only_if_the_proxy_has_none(w: World, tmp_path: Path) -> None:
    bearer = {"Authorization": "Bearer the-clients"}
    with w.client() as client:
        client.post(CHAT, json=asking(), headers=bearer)
    assert w.upstream.last.headers["Authorization"] == "Bearer the-clients"
    keys: dict[str, Any] = {"api_key": "the-clients", "upstream_api_key": "engines"}
    with world(tmp_path, upstream_key="engines", **keys) as guarded, guarded.client() as client:
        assert client.post(CHAT, json=asking(), headers=bearer).status_code == 200
        assert guarded.upstream.last.headers["Authorization"] == "Bearer engines"


def test_a_key_that_only_guards_the_proxy_stays_there(tmp_path: Path) -> None:
    with world(tmp_path, api_key="ours") as w, w.client() as client:
        client.post(CHAT, json=asking(), headers={"Authorization": "Bearer ours"})
        assert "Authorization" not in w.upstream.last.headers


def test_an_engine_that_refuses_the_proxys_key_is_not_the_clients_fault(tmp_path: Path) -> None:
    with world(tmp_path, upstream_api_key="old", upstream_key="new") as w, w.client() as client:
        answer = client.post(CHAT, json=asking())
    assert answer.status_code == 502
    assert "key" in answer.json()["error"]["message"]


def test_an_engine_on_a_unix_socket_is_as_good(tmp_path: Path) -> None:
    with world(tmp_path, upstream_is_socket=True) as w, w.client() as client:
        w.upstream.script = answering([72, 105])
        assert len(chunks(client.post(CHAT, json=asking()).content)) == 3
