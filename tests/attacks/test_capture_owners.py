"""Attempts to see, fetch or forge captures of another key."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from clairai.store.read import open as open_store
from clairai.wire.capture_messages import OWNER_HEADER
from tests.attacks.test_key_rights import KEYS, SECRETS, bearer
from tests.attacks.test_stream_ids import ask, captured
from tests.http.answers import CHAT, TEXT
from tests.http.fake_captures import ID
from tests.http.test_steering import whole
from tests.http.world import World, world
from tests.support.capturing_server import CapturingServer, capturing_server

ALICE, BOB, NOBODY = 0xA11CE, 0xB0B, 0x0B0D4


def headers(owner: str) -> dict[str, str]:
    return {OWNER_HEADER: owner}


@pytest.fixture
def server(runtime: Path, tmp_path: Path) -> Iterator[CapturingServer]:
    with capturing_server(runtime, {"folder": str(tmp_path / "s")}) as made:
        yield made


def make_captures(server: CapturingServer) -> None:
    captured(server, ALICE, capture=True, owner="alice", label="of alice")
    captured(server, BOB, capture=True, owner="bob")
    captured(server, NOBODY, capture=True)


def fetch(server: CapturingServer, stream: int, owner: str) -> Any:
    return server.client.get(f"/v1/captures/{stream:016x}", headers=headers(owner))


def listed(server: CapturingServer, **more: str) -> list[str]:
    lines = server.client.get("/v1/captures", headers=more).json()["data"]
    return sorted(line["id"] for line in lines)


def require_hidden(server: CapturingServer, owner: str, *streams: int) -> None:
    """Another's capture is answered as one that never was, byte for byte but its id."""
    for stream in streams:
        hidden, missing = fetch(server, stream, owner), fetch(server, 0xDEAD, owner)
        assert (hidden.status_code, missing.status_code) == (404, 404)
        assert hidden.text.replace(f"{stream:016x}", f"{0xDEAD:016x}") == missing.text


@pytest.mark.attack(330)
def test_captures_of_others_are_neither_listed_nor_fetched(server: CapturingServer) -> None:
    make_captures(server)
    assert listed(server, **headers("alice")) == [f"{ALICE:016x}"]
    assert listed(server, **headers("bob")) == [f"{BOB:016x}"]
    assert listed(server, **headers("eve")) == []
    assert len(listed(server)) == 3
    assert fetch(server, ALICE, "alice").status_code == 200
    require_hidden(server, "alice", BOB, NOBODY)
    require_hidden(server, "bob", ALICE, NOBODY)
    require_hidden(server, "eve", ALICE, BOB, NOBODY)


@pytest.mark.attack(331)
def test_owners_hold_after_a_restart_with_the_folder(runtime: Path, tmp_path: Path) -> None:
    setting = {"folder": str(tmp_path / "s")}
    with capturing_server(runtime, setting) as first:
        make_captures(first)
    assert open_store(tmp_path / "s").request(ALICE).owner == "alice"
    assert open_store(tmp_path / "s").request(NOBODY).owner is None
    with capturing_server(runtime, setting) as second:
        assert fetch(second, ALICE, "alice").status_code == 200
        assert second.client.get(f"/v1/captures/{NOBODY:016x}").status_code == 200
        require_hidden(second, "bob", ALICE, NOBODY)
        require_hidden(second, "alice", BOB, NOBODY)


@pytest.mark.attack(332)
def test_an_unfinished_capture_of_another_is_not_confirmed(server: CapturingServer) -> None:
    assert server.capture is not None
    server.capture.is_held = True
    assert ask(server, stream=ALICE, capture=True, owner="alice").status_code == 200
    assert fetch(server, ALICE, "alice").status_code == 409
    require_hidden(server, "bob", ALICE)


@pytest.mark.attack(333)
@pytest.mark.parametrize("owner", ["", "Alice", "a b", "a/../b", "x" * 65, "alice,bob"])
def test_an_owner_that_is_no_name_is_refused(server: CapturingServer, owner: str) -> None:
    make_captures(server)
    for path in ("/v1/captures", f"/v1/captures/{ALICE:016x}"):
        assert server.client.get(path, headers=headers(owner)).status_code == 400
    assert ask(server, stream=5, capture=True, owner=owner).status_code == 400


# Through the proxy


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    with world(tmp_path_factory.mktemp("o"), keys=KEYS) as made:
        yield made


@pytest.fixture
def w(served: World) -> World:
    served.upstream.forget()
    return served


def send(w: World, raw: bytes, path: str = CHAT, **more: str) -> httpx.Response:
    given = {"Content-Type": "application/json", **bearer("alice"), **more}
    with w.client() as client:
        return client.post(path, content=raw, headers=given)


@pytest.mark.attack(334)
@pytest.mark.parametrize(
    "forged",
    [
        {"X-Clairai-Owner": "bob"},
        {"x-clairai-owner": "bob"},
        {"X-CLAIRAI-OWNER": "admin", "Connection": "x-clairai-owner"},
        {"X-Clairai-Other": "bob"},
    ],
)
@pytest.mark.parametrize("path", ["/v1/captures", f"/v1/captures/{ID}"])
def test_no_header_of_a_client_says_who_asks(w: World, path: str, forged: dict[str, str]) -> None:
    for name, owner in (("alice", ["alice"]), ("admin", [])):
        with w.client() as client:
            assert client.get(path, headers={**forged, **bearer(name)}).status_code == 200
        (_, sent) = w.upstream.captures.asked[-1]
        got = {key: value for key, value in sent.items() if key.lower().startswith("x-clairai")}
        assert list(got.values()) == owner


@pytest.mark.attack(335)
@pytest.mark.parametrize(
    "raw",
    [
        b'{"messages":[],"clairai":{"capture":true,"owner":"bob"}}',
        b'{"messages":[],"clairai":{"capture":true,"\\u006fwner":"bob"}}',
        b'{"messages":[],"clairai":{"owner":"bob","owner":"alice"}}',
        b'{"messages":[],"vllm_xargs":{"clairai":"{\\"capture\\":true,\\"owner\\":\\"bob\\"}"}}',
        b'{"messages":[],"vllm_xargs":{"clairai":"{\\"\\\\u006fwner\\":\\"bob\\"}"}}',
        b'{"messages":[],"vllm_\\u0078args":{"cl\\u0061irai":"{\\"owner\\":\\"bob\\"}"}}',
        b'{"messages":[],"vllm_xargs":{},"vllm_xargs":{"clairai":"{\\"owner\\":\\"bob\\"}"}}',
        b'{"messages":[],"clairai":{},"vllm_xargs":{"clairai":"{\\"owner\\":\\"bob\\"}"}}',
        b'{"messages":[],"vllm_xargs":{"clairai":"{}","clairai":"{\\"owner\\":\\"bob\\"}"}}',
        b'{"messages":[],"vllm_xargs":{"clairai":{"owner":"bob"}}}',
    ],
)
def test_no_body_of_a_client_says_whose_capture_it_is(w: World, raw: bytes) -> None:
    assert send(w, raw).status_code == 400
    assert w.upstream.seen == []


def test_the_engine_learns_whose_request_it_is(w: World) -> None:
    for name in ("alice", "admin"):
        body = json.dumps(whole(clairai={"capture": True})).encode()
        assert send(w, body, **bearer(name)).status_code == 200
        assert w.upstream.last.fields["owner"] == name
        assert SECRETS[name] not in str(w.upstream.last.raw)


@pytest.mark.attack(336)
@pytest.mark.parametrize("path", [CHAT, TEXT])
@pytest.mark.parametrize(
    "fields",
    [
        {"clairai": {"stream": ALICE}},
        {"vllm_xargs": {"clairai": json.dumps({"stream": ALICE})}},
        {"vllm_xargs": {"clairai": f'{{"str\\u0065am": {ALICE}}}', "mine": 1}},
    ],
)
def test_a_stream_that_a_client_names_is_only_a_label(
    w: World, path: str, fields: dict[str, Any]
) -> None:
    streams = []
    for _ in range(3):
        assert send(w, json.dumps(whole(path, **fields)).encode(), path).status_code == 200
        sent = w.upstream.last.fields
        assert (sent["label"], sent["stream"] == ALICE) == (str(ALICE), False)
        streams.append(sent["stream"])
    assert len(set(streams)) == 3
    if "mine" in str(fields):
        assert w.upstream.last.body["vllm_xargs"]["mine"] == 1


@pytest.mark.attack(337)
@pytest.mark.parametrize("fields", [{}, {"request_id": "of-alice"}, {"clairai": {}}])
def test_no_client_chooses_the_request_id_of_the_engine(w: World, fields: dict[str, Any]) -> None:
    made = []
    for _ in range(2):
        answer = send(w, json.dumps(whole(**fields)).encode(), **{"X-Request-Id": "of-alice"})
        assert answer.headers["x-request-id"] == "of-alice"  # a label, given back
        (given,) = w.upstream.last.http.headers.getall("X-Request-Id")
        made.append(given)
    assert "of-alice" not in made
    assert len(set(made)) == 2
    assert {len(one) for one in made} == {32}


@pytest.mark.attack(338)
@pytest.mark.parametrize(
    "text",
    [
        "[" * 100,
        '{"steer":' + "[" * 100 + "]" * 100 + "}",
        '{"capture": NaN}',
        '{"label": "a\\u0000b"}',
        '{"label": "' + "x" * 200 + '"}',
        '{"stream": ' + "9" * 4000 + "}",
        '{"stream": -1}',
        '{"stream": 1, "label": "a"}',
        '{"bogus": 1}',
        "not json",
        "",
    ],
)
def test_text_in_xargs_is_judged_as_the_body_is(w: World, text: str) -> None:
    answer = send(w, json.dumps(whole(vllm_xargs={"clairai": text})).encode())
    assert (answer.status_code, answer.json()["error"]["code"]) == (400, "request")
    assert w.upstream.seen == []
