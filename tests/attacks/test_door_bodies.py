"""Hostile bodies of completion requests: understood or refused, by the proxy and in vLLM."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from clairai.proxy.proxy_settings import Limits
from tests.http.answers import CHAT, asking
from tests.http.world import World, world
from tests.support.api_server import PATHS, ToyServer, steering_server

STEER = {"steer": [{"vector": "calm", "scale": 2.0}]}
ENCODINGS = ("utf-16", "utf-16-le", "utf-16-be", "utf-32", "utf-32-le", "utf-32-be", "utf-8-sig")
DIGITS = b"9" * 5000


@pytest.fixture(scope="module")
def w(tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    with world(tmp_path_factory.mktemp("w")) as made:
        yield made


@pytest.fixture
def server(runtime: Path) -> Iterator[ToyServer]:
    with steering_server(runtime) as made:
        yield made


def refusal(w: World, content: bytes, path: str = CHAT, **headers: str) -> str:
    """The reason of the refusal; upstream has not been asked."""
    w.upstream.forget()
    with w.client() as client:
        answer = client.post(path, content=content, headers=headers)
    assert 400 <= answer.status_code < 500, answer.text
    assert w.upstream.seen == []
    return str(answer.json()["error"]["message"])


@pytest.mark.attack(200)
@pytest.mark.parametrize("encoding", ENCODINGS)
def test_a_body_in_another_encoding_is_refused_by_the_proxy(w: World, encoding: str) -> None:
    text = json.dumps({**asking(), "clairai": STEER})
    assert "UTF-8" in refusal(w, text.encode(encoding))
    assert "UTF-8" in refusal(w, json.dumps({"prompt": "a"}).encode(encoding), "/tokenize")


@pytest.mark.attack(201)
@pytest.mark.parametrize("encoding", ENCODINGS)
def test_a_body_in_another_encoding_is_refused_by_the_api_server(
    server: ToyServer, encoding: str
) -> None:
    body = {"messages": [], "vllm_xargs": {"clairai": json.dumps(STEER)}}
    for path in PATHS:
        answer = server.client.post(path, content=json.dumps(body).encode(encoding))
        assert answer.status_code == 400
        assert "UTF-8" in answer.text
    assert server.bodies == []
    assert server.client.post(PATHS[0], json=body).json()["clairai"]["steering"]


@pytest.mark.attack(202)
@pytest.mark.parametrize("name", ["clairai", "steering_vectors", "cl\\u0061irai"])
def test_fields_on_a_route_that_ignores_them_are_refused(server: ToyServer, name: str) -> None:
    raw = b'{"prompt":"a","%s":{}}' % name.encode()
    for path in ("/tokenize", "/inference/v1/generate", "/generative_scoring", "/v1/systemone"):
        answer = server.client.post(path, content=raw, headers={"Content-Type": "application/json"})
        assert (answer.status_code, "does not read" in answer.text) == (400, True)
    form = server.client.post("/v1/audio/transcriptions", files={"clairai": "{}"})
    assert form.status_code == 400
    mentioned = {"prompt": "about clairai", "deeper": {"clairai": 1}}
    assert server.client.post("/tokenize", json=mentioned).status_code == 404  # vLLM's own answer


@pytest.mark.attack(203)
@pytest.mark.parametrize(
    "raw",
    [
        b'{"messages":[],"clairai":{},"vllm_xargs":{"a":1,"\\u0061":2}}',
        b'{"messages":[],"clairai":{},"cl\\u0061irai":{"probes":["x"]}}',
        b'{"messages":"\\ud800","clairai":{},"clairai":{"probes":["x"]}}',
        b'{"messages":[],"n":1,"clairai":{},"n":1000}',
    ],
)
def test_a_key_that_is_there_twice_is_refused_however_it_is_written(w: World, raw: bytes) -> None:
    assert "twice" in refusal(w, raw)


@pytest.mark.attack(204)
@pytest.mark.parametrize(
    "raw",
    [
        b'{"messages":[],"vllm_xargs":{},"vllm_xargs":{"clairai":"{}"}}',
        b'{"messages":[],"vllm_xargs":{"clairai":"{}","cl\\u0061irai":"{\\"steer\\":[]}"}}',
        b'{"messages":NaN,"vllm_xargs":{"clairai":"{}"}}',
    ],
)
def test_the_api_server_and_vllm_never_read_a_body_differently(
    server: ToyServer, raw: bytes
) -> None:
    assert server.client.post(PATHS[0], content=raw).status_code == 400
    assert server.bodies == []


@pytest.mark.attack(205)
@pytest.mark.parametrize(
    "raw",
    [
        b'{"messages":[],"clairai":{},"n":%s}' % DIGITS,
        b'{"messages":[],"clairai":{},"n":1e999}',
        b'{"messages":[],"clairai":{},"n":-1e999}',
        b'{"messages":[],"clairai":{},"echo":%s}' % DIGITS,
        b'{"messages":[],"clairai":{"prompt_scores":%s}}' % DIGITS,
        b'{"messages":[],"clairai":{"steer":[{"vector":"calm","scale":1e400}]}}',
        b'{"messages":[],"clairai":{"stop":[{"probe":"token","threshold":%s}]}}' % DIGITS,
        b'{"messages":[],"clairai":{"stop":[{"probe":"token","tokens":1e999}]}}',
        b'{"messages":[],"clairai":{"capture":{"tags":%s}}}' % DIGITS,
        b'{"messages":[],"clairai":{"capture":"yes"}}',
        b'{"messages":[],"steering_vectors":{"post_block.0":[1e400]}}',
    ],
)
def test_a_number_that_no_type_holds_is_refused_with_a_reason(w: World, raw: bytes) -> None:
    with w.client() as client:
        answer = client.post(CHAT, content=raw)
    assert answer.status_code in (400, 409), answer.text  # some are the engine's to refuse
    assert answer.json()["error"]["message"]


@pytest.mark.attack(206)
@pytest.mark.parametrize("given", ["1000", 100.0, True, "1e3", [1000], 1e30])
def test_n_is_bounded_however_it_is_written(w: World, given: Any) -> None:
    """vLLM's lax parser takes all of the first three for whole numbers."""
    assert "whole number" in refusal(w, json.dumps({**asking(), "n": given}).encode())


@pytest.mark.attack(207)
@pytest.mark.parametrize(
    "content",
    [
        b'{"prompt":[' + b"0," * 4_000_000 + b"0]}",
        b'{"prompt":[' + b'"",' * 2_000_000 + b"0]}",
        b'{"clairai":{},' + b",".join(b'"%06d":0' % i for i in range(600_000)) + b"}",
        b'{"clairai":{},"vllm_xargs":{' + b",".join(b'"%d":0' % i for i in range(5000)) + b"}}",
        b'{"prompt":' + b"[" * 4_000_000,
        b'{"prompt":"' + b'\\"' * 1_000_000 + b'",' + b'"a":[' * 65,
    ],
    ids=["numbers", "strings", "keys", "xargs", "depth", "escapes"],
)
def test_a_body_of_too_many_parts_is_refused_before_it_is_parsed(w: World, content: bytes) -> None:
    assert "the body " in refusal(w, content)


@pytest.mark.attack(208)
def test_a_client_that_floods_waits_and_another_does_not(tmp_path: Path) -> None:
    bounds = Limits(client_json_rate=1, client_json_burst=1 << 20, json_burst=2 << 20)
    large = json.dumps({"messages": "a" * 600_000}).encode()
    other = httpx.HTTPTransport(local_address="127.0.0.2")
    with world(tmp_path, limits=bounds) as w, w.client() as client:
        assert client.post(CHAT, content=large).status_code == 200
        refused = client.post(CHAT, content=large)
        assert refused.status_code == 429
        assert int(refused.headers["retry-after"]) > 60
        assert len(w.upstream.seen) == 1
        with w.client(transport=other) as quiet:
            assert quiet.post(CHAT, content=large).status_code == 200
        assert client.post(CHAT, content=b'{"messages":[]}').status_code == 200  # it still fits
