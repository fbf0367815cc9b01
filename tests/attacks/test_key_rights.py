"""Keys with too few rights: on every route, in every field, and against others' runs."""

from __future__ import annotations

import json
import logging
import re
import secrets
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from clairai.proxy.access_keys import RIGHTS, AccessKey, Right, find_key
from clairai.proxy.observe.log_lines import AccessLog
from clairai.proxy.observe.metrics import Metrics
from clairai.proxy.routes import ROUTES, Route
from tests.http.answers import CHAT, asking, events
from tests.http.fake import Exchange, answering
from tests.http.test_guard import call
from tests.http.test_steering import whole
from tests.http.world import World, world

SECRETS = {name: f"key-of-{name}-0123456789" for name in (*RIGHTS, "alice", "bob")}
KEYS = (
    *(AccessKey.of(SECRETS[right], name=right, rights=[right]) for right in RIGHTS),
    AccessKey.of(SECRETS["alice"], name="alice", rights=["read", "steer", "capture"]),
    AccessKey.of(SECRETS["bob"], name="bob", rights=["read", "steer", "capture"]),
)
VECTORS: dict[str, Any] = {"steering_vectors": {"post_block": {"1": [0.5]}}}
RULE = {"probe": "token", "threshold": 1.0, "steer": [{"vector": "calm"}]}


def bearer(name: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {SECRETS[name]}"}


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    folder = tmp_path_factory.mktemp("k")
    with world(folder, keys=KEYS, observers=(AccessLog(),), metrics=Metrics()) as made:
        yield made


@pytest.fixture
def w(served: World) -> World:
    served.upstream.forget()
    return served


def ask(w: World, name: str, body: dict[str, Any], path: str = CHAT) -> httpx.Response:
    with w.client() as client:
        return client.post(path, json=body, headers=bearer(name))


@pytest.mark.attack(306)
@pytest.mark.parametrize("right", RIGHTS)
@pytest.mark.parametrize("route", ROUTES, ids=lambda route: route.handler)
def test_a_key_with_one_right_gets_through_where_the_table_says(
    w: World, route: Route, right: Right
) -> None:
    answer = call(w, route, **bearer(right))
    is_let_in = route.right in ("public", right) or right == "admin"
    assert (answer.status_code == 403) == (not is_let_in)
    assert answer.status_code != 401
    if not is_let_in:
        error = answer.json()["error"]
        assert error["code"] == "forbidden"
        assert f"`{route.right}`" in error["message"]
        assert f"key {right} " in error["message"]
        assert SECRETS[right] not in answer.text
        assert w.upstream.seen == []


@pytest.mark.attack(307)
@pytest.mark.parametrize(
    ("body", "right"),
    [
        (whole(clairai={"steer": [{"vector": "calm", "scale": 1}]}), "steer"),
        (whole(clairai={"stop": [RULE]}), "steer"),
        (whole(**VECTORS), "steer"),
        (whole(decode_steering_vectors=VECTORS["steering_vectors"]), "steer"),
        (whole(clairai={"capture": True}), "capture"),
        (whole(clairai={"capture": {}}), "capture"),
        (whole(vllm_xargs={"clairai": '{"steer": [{"vector": "calm"}]}'}), "steer"),
        (whole(vllm_xargs={"clairai": '{"capture": true}'}), "capture"),
        (whole(vllm_xargs={"clairai": '{"c\\u0061pture": {}}'}), "capture"),
        (whole(vllm_xargs={"steering_vectors": json.dumps(VECTORS["steering_vectors"])}), "steer"),
    ],
)
def test_a_field_without_its_right_is_refused_wherever_it_stands(
    w: World, body: dict[str, Any], right: str
) -> None:
    answer = ask(w, "read", body)
    assert (answer.status_code, answer.json()["error"]["code"]) == (403, "forbidden")
    assert f"`{right}`" in answer.json()["error"]["message"]
    assert w.upstream.seen == []


def test_a_key_with_read_gets_scores_and_may_ask_not_to_be_captured(w: World) -> None:
    rule = {"probe": "token", "threshold": 1.0}
    asked: list[dict[str, Any]] = [{}, {"capture": False}, {"stop": [rule]}]
    for fields in asked:
        assert ask(w, "read", whole(clairai=fields)).status_code == 200


@pytest.mark.attack(308)
def test_a_run_of_another_key_cannot_be_resumed_stopped_or_steered(w: World) -> None:
    w.upstream.script = answering([72, 105])
    answer = ask(w, "alice", asking(events="named"))
    assert events(answer.content)[-1].name == "done"
    run = f"/v1/runs/{answer.headers['x-clairai-run']}"
    tries = (("GET", run), ("DELETE", run), ("POST", f"{run}/steering"))
    with w.client() as client:
        for method, path in tries:
            body: dict[str, Any] | None = {"steer": []} if method == "POST" else None
            foreign = client.request(method, path, json=body, headers=bearer("bob"))
            unknown = re.sub("[0-9a-f]{32}", secrets.token_hex(16), path)
            missing = client.request(method, unknown, json=body, headers=bearer("bob"))
            assert (foreign.status_code, foreign.text) == (404, missing.text)
        for owner in ("alice", "admin"):
            assert events(client.get(run, headers=bearer(owner)).content)[-1].name == "done"
    assert w.upstream.steering.asked == []


@pytest.mark.attack(309)
@pytest.mark.parametrize(
    "given",
    [
        *(
            "",
            "Bearer",
            "Bearer default",
            "Bearer alice",
            "Basic %s",
            "%s",
            "Bearer %sx",
        ),
        *("Bearer %s,%s", "Bearer %s %s", "Token %s", "Bearer " + "0" * 64, "Bearer \u00e9"),
    ],
)
def test_a_key_that_is_nearly_right_is_wrong(w: World, given: str) -> None:
    header = given.replace("%s", SECRETS["admin"]).encode("latin-1")
    with w.client() as client:
        answer = client.get("/v1/models", headers={b"Authorization": header})
    assert (answer.status_code, answer.json()["error"]["code"]) == (401, "invalid_api_key")
    assert SECRETS["admin"] not in answer.text


@pytest.mark.attack(310)
def test_the_digest_of_a_key_is_no_key(w: World) -> None:
    for key in KEYS:
        with w.client() as client:
            header = {"Authorization": f"Bearer {key.digest.hex()}"}
            assert client.get("/v1/models", headers=header).status_code == 401


@pytest.mark.attack(311)
@pytest.mark.parametrize("token", [SECRETS["read"], SECRETS["bob"], "wrong", ""])
def test_every_key_is_compared_in_constant_time_whichever_is_right(
    monkeypatch: pytest.MonkeyPatch, token: str
) -> None:
    compared: list[tuple[bytes, bytes]] = []
    real = secrets.compare_digest

    def compare(one: bytes, other: bytes) -> bool:
        compared.append((one, other))
        return real(one, other)

    monkeypatch.setattr(secrets, "compare_digest", compare)
    find_key(token, KEYS)
    assert [other for _, other in compared] == [key.digest for key in KEYS]
    assert {len(one) for pair in compared for one in pair} == {32}


@pytest.mark.attack(312)
def test_no_key_is_shown_in_answers_logs_or_metrics(
    w: World, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    shown = [repr(KEYS), repr(w.proxy.settings)]
    shown += [call(w, route, **bearer(name)).text for route in ROUTES for name in SECRETS]
    shown.append(ask(w, "alice", whole(clairai={"nonsense": 1})).text)
    shown += [record.getMessage() for record in caplog.records]
    digests = [text for key in KEYS for text in (key.digest.hex(), repr(key.digest))]
    hidden = [*SECRETS.values(), *digests]
    assert [key for key in hidden if any(key in text for text in shown)] == []


@pytest.mark.attack(313)
def test_the_key_of_a_client_never_reaches_the_engine(w: World) -> None:
    seen: list[str] = []

    async def script(exchange: Exchange) -> Any:
        seen.append(repr(sorted(exchange.headers.items())))
        return await answering([72])(exchange)

    w.upstream.script = script
    assert ask(w, "alice", whole()).status_code == 200
    assert ask(w, "alice", whole(clairai={})).status_code == 200
    assert len(seen) == 2
    assert SECRETS["alice"] not in "".join(seen)
