"""New weights through the proxy: the engine's own routes, behind the proxy's key."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from pathlib import Path

import pytest

from clairai.errors import WeightsError
from clairai.library.http_client import ServerClient
from clairai.proxy.proxy_settings import Limits
from clairai.weights.manifest import MAX_MANIFEST_BYTES, encode_manifest
from tests.http.fake_weights import COMMITTED, STATE, TENSOR, UNPLANNED
from tests.http.world import World, world
from tests.support.weights import plan

PIECE = 1 << 17
BUFFER = f"/v1/weights/buffers/{'a' * 32}/3"
PATHS = ("/v1/weights/check", "/v1/weights/plan", "/v1/weights/commit")
KEY = {"Authorization": "Bearer secret"}


def test_the_serving_weights_and_the_sendable_tensors_are_listed(w: World) -> None:
    with w.client() as client:
        assert client.get("/v1/weights").json() == STATE
        assert client.get("/v1/weights/tensors").json() == {"data": [TENSOR]}


def test_a_manifest_is_passed_on_byte_for_byte_with_its_query(w: World) -> None:
    manifest = plan()
    body = encode_manifest(manifest)
    with w.client() as client:
        planned = [client.post(path, content=body).json() for path in PATHS[:2]]
        committed = client.post(f"{PATHS[2]}?drain=abort", content=body).json()
    told = {"transfer": manifest.transfer, "nbytes": sum(manifest.buffers)}
    assert (planned, committed) == ([told, told], COMMITTED)
    paths = (*PATHS[:2], f"{PATHS[2]}?drain=abort")
    assert w.upstream.weights.asked == [(path, body) for path in paths]


def pieces(count: int) -> Iterator[bytes]:
    return (bytes([at % 251]) * PIECE for at in range(count))


@pytest.mark.parametrize("count", [0, 1, 300])
def test_a_buffer_is_passed_on_as_it_comes_and_never_held(w: World, count: int) -> None:
    """The last is larger than any body that the proxy holds."""
    assert Limits().manifest_bytes < 300 * PIECE
    with w.client() as client:
        answer = client.put(BUFFER, content=pieces(count))
    assert (answer.status_code, answer.content) == (204, b"")
    expected = hashlib.sha256(b"".join(pieces(count))).digest()
    assert w.upstream.weights.asked == [(BUFFER, expected)]


def test_a_buffer_that_the_engine_refuses_is_refused_in_its_words(w: World) -> None:
    """By our own client: it has sent a part of the body when the answer comes."""
    server = ServerClient(w.url)
    with pytest.raises(WeightsError, match="is not planned here"):
        server.put_weights(UNPLANNED, 0, pieces(300), 300 * PIECE)


@pytest.mark.parametrize("path", PATHS)
def test_a_refusal_of_the_engine_is_passed_on(w: World, path: str) -> None:
    with w.client() as client:
        answer = client.post(path, content=b'{"version": 1, "code": "x"}')
    assert answer.status_code == 400
    assert "no manifest" in answer.json()["error"]["message"]
    assert answer.json()["error"]["code"] == "weights"


@pytest.mark.parametrize("path", ["/v1/weights", "/v1/weights/tensors", BUFFER, *PATHS])
def test_weights_need_the_key(tmp_path: Path, path: str) -> None:
    method = {BUFFER: "PUT"}.get(path, "POST" if path in PATHS else "GET")
    with world(tmp_path, api_key="secret") as w, w.client() as client:
        assert client.request(method, path).status_code == 401
        assert w.upstream.weights.asked == []
        assert client.request(method, path, headers=KEY).status_code in (200, 204, 400)


@pytest.mark.parametrize("path", PATHS)
def test_a_page_of_another_site_cannot_change_weights(w: World, path: str) -> None:
    with w.client() as client:
        answer = client.post(
            path, content=encode_manifest(plan()), headers={"Origin": "http://evil.test"}
        )
    assert answer.status_code == 403
    assert w.upstream.weights.asked == []


def test_a_manifest_that_the_engine_would_not_read_is_not_read_here(tmp_path: Path) -> None:
    assert Limits().manifest_bytes == MAX_MANIFEST_BYTES
    limits = Limits(manifest_bytes=1000)
    with world(tmp_path, limits=limits) as w, w.client() as client:
        assert client.post(PATHS[1], content=bytes(1001)).status_code == 413
        assert w.upstream.weights.asked == []
