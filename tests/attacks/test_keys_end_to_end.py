"""Two clients with keys of their own: the proxy in front of the engine's own routes and folder.

Real: proxy, routes, request check, admission, resolver, collector, folder. Toy: the model.
"""

from __future__ import annotations

import asyncio
import json
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
import uvicorn

from clairai.proxy.proxy_settings import ProxySettings
from clairai.store.read import open as open_store
from tests.attacks.test_key_rights import KEYS, bearer
from tests.http.answers import CHAT
from tests.http.world import HURRIED, proxy_of
from tests.support.capturing_server import capturing_server
from tests.support.ring_engine import until


@contextmanager
def serving(app: Any) -> Iterator[str]:
    """The app on a port of its own."""
    listener = socket.create_server(("127.0.0.1", 0))
    server = uvicorn.Server(uvicorn.Config(app, log_config=None, lifespan="off", ws="none"))
    run = lambda: asyncio.run(server.serve(sockets=[listener]))  # noqa: E731
    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    try:
        until(lambda: server.started)
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"
    finally:
        server.should_exit = True
        thread.join(20)
        listener.close()


@contextmanager
def service(runtime: Path, folder: Path) -> Iterator[httpx.Client]:
    with (
        capturing_server(runtime, {"folder": str(folder)}) as engine,
        serving(engine.client.app) as upstream,
        proxy_of(ProxySettings(upstream, keys=KEYS, runtime_dir=runtime, timeouts=HURRIED)) as (
            url,
            _,
        ),
        httpx.Client(base_url=url, timeout=20, trust_env=False) as client,
    ):
        yield client


def capture(client: httpx.Client, name: str, **fields: Any) -> dict[str, Any]:
    body = {"messages": [], "clairai": {"capture": {"tags": {"user": name}}, **fields}}
    answer = client.post(CHAT, json=body, headers=bearer(name))
    assert answer.status_code == 200, answer.text
    found: dict[str, Any] = answer.json()["clairai"]
    assert found["capture"]["state"] == "kept"
    return found


def listed(client: httpx.Client, name: str) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = client.get("/v1/captures", headers=bearer(name)).json()["data"]
    return found


@pytest.mark.attack(340)
def test_a_client_cannot_take_over_the_capture_of_another(runtime: Path, tmp_path: Path) -> None:
    folder = tmp_path / "s"
    with service(runtime, folder) as client:
        victim = capture(client, "alice", label="mine")["capture"]["id"]
        path = f"/v1/captures/{victim}"
        before = client.get(path, headers=bearer("alice"))
        assert before.status_code == 200
        for fields in (
            {"clairai": {"stream": int(victim, 16), "capture": {"tags": {"user": "bob"}}}},
            {
                "vllm_xargs": {
                    "clairai": json.dumps(
                        {"stream": int(victim, 16), "capture": {"tags": {"user": "bob"}}}
                    )
                }
            },
        ):
            forged = {"messages": [], "request_id": victim, **fields}
            taken = {"X-Request-Id": victim, "X-Clairai-Owner": "alice", **bearer("bob")}
            answer = client.post(CHAT, json=forged, headers=taken)
            assert answer.status_code == 200
            assert answer.json()["clairai"]["label"] == str(int(victim, 16))
            assert answer.json()["clairai"]["capture"]["id"] != victim
        assert client.get(path, headers=bearer("alice")).content == before.content
        assert client.get(path, headers=bearer("bob")).status_code == 404
        assert [(line["id"], line["owner"], line["label"]) for line in listed(client, "alice")] == [
            (victim, "alice", "mine")
        ]
        assert {line["owner"] for line in listed(client, "bob")} == {"bob"}
        assert len(listed(client, "admin")) == 3
    assert open_store(folder).request(int(victim, 16)).tags == {"user": "alice"}


@pytest.mark.attack(341)
def test_captures_keep_their_owners_when_everything_was_restarted(
    runtime: Path, tmp_path: Path
) -> None:
    with service(runtime, tmp_path / "s") as client:
        victim = capture(client, "alice")["capture"]["id"]
    with service(runtime, tmp_path / "s") as client:
        path = f"/v1/captures/{victim}"
        statuses = {
            name: client.get(path, headers=bearer(name)).status_code
            for name in ("alice", "bob", "admin", "read")
        }
        assert statuses == {"alice": 200, "bob": 404, "admin": 200, "read": 403}


@pytest.mark.attack(342)
def test_ids_through_the_proxy_are_never_alike_and_not_in_a_row(
    runtime: Path, tmp_path: Path
) -> None:
    with service(runtime, tmp_path / "s") as client:
        made = [int(capture(client, "alice", stream=7)["capture"]["id"], 16) for _ in range(8)]
    assert len(set(made)) == len(made)
    gaps = [abs(one - other) for i, one in enumerate(made) for other in made[:i]]
    assert min(gaps) > 2**32
    assert max(made) > 2**60
