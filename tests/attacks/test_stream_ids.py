"""Attempts to take over another request's stream id, and with it its rows, tags or answers."""

from __future__ import annotations

import gc
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from clairai.store.read import open as open_store
from clairai.wire.control_messages import ListProbes
from tests.support.capturing_server import CapturingServer, capturing_server

VICTIM = 0xABCDEF
OWN: dict[str, Any] = {"capture": {"tags": {"user": "victim"}}}
FOREIGN: dict[str, Any] = {"capture": {"tags": {"user": "attacker"}}}


@pytest.fixture
def server(runtime: Path, tmp_path: Path) -> Iterator[CapturingServer]:
    with capturing_server(runtime, {"folder": str(tmp_path / "s")}) as made:
        yield made


def ask(server: CapturingServer, n: int = 1, **clairai: Any) -> Any:
    body = {"messages": [], "n": n, "vllm_xargs": {"clairai": json.dumps(clairai)}}
    return server.client.post("/v1/chat/completions", json=body)


def captured(server: CapturingServer, stream: int, **fields: Any) -> dict[str, Any]:
    """A request that ended, whose rows are in the folder."""
    answer = ask(server, stream=stream, **fields)
    assert answer.status_code == 200
    handle: dict[str, Any] = answer.json()["clairai"]["capture"]
    assert handle["state"] == "kept"
    return handle


def refused(server: CapturingServer, why: str, **fields: Any) -> None:
    answer = ask(server, **fields)
    assert (answer.status_code, answer.json()["error"]["code"]) == (400, "request")
    assert why in answer.json()["error"]["message"]


def stored_tags(folder: Path, stream: int = VICTIM) -> Any:
    return open_store(folder / "s").request(stream).tags


@pytest.mark.attack(320)
@pytest.mark.parametrize("fields", [FOREIGN, {"capture": True}, {}], ids=["tags", "rows", "none"])
def test_a_finished_stream_is_never_used_again(
    server: CapturingServer, tmp_path: Path, fields: dict[str, Any]
) -> None:
    handle = captured(server, VICTIM, **OWN)
    before = server.client.get(f"/v1/captures/{handle['id']}").content
    server.held.clear()
    gc.collect()
    refused(server, "was used by a request that has ended", stream=VICTIM, **fields)
    assert server.client.get(f"/v1/captures/{handle['id']}").content == before
    (line,) = server.client.get("/v1/captures").json()["data"]
    assert (line["id"], line["rows"]) == (handle["id"], handle["rows"])
    assert stored_tags(tmp_path) == {"user": "victim"}


@pytest.mark.attack(321)
def test_a_running_stream_is_not_used_twice(server: CapturingServer) -> None:
    assert server.capture is not None
    server.capture.is_held = True
    assert ask(server, stream=VICTIM, **OWN).status_code == 200
    refused(server, "not finished", stream=VICTIM, **FOREIGN)
    assert server.capture.running == [(VICTIM, 0)]


@pytest.mark.attack(322)
def test_a_stream_of_the_folder_is_not_used_after_a_restart(runtime: Path, tmp_path: Path) -> None:
    setting = {"folder": str(tmp_path / "s")}
    with capturing_server(runtime, setting) as first:
        captured(first, VICTIM, **OWN)
    with capturing_server(runtime, setting) as second:
        refused(second, "the folder of captures", stream=VICTIM, **FOREIGN)
        captured(second, VICTIM + 1, **FOREIGN)
    assert stored_tags(tmp_path) == {"user": "victim"}
    assert stored_tags(tmp_path, VICTIM + 1) == {"user": "attacker"}


@pytest.mark.attack(323)
def test_a_stream_that_the_engine_made_is_not_used_again(
    server: CapturingServer, tmp_path: Path
) -> None:
    handle = ask(server, **OWN).json()["clairai"]["capture"]
    stream = int(handle["id"], 16)
    refused(server, "was used", stream=stream, **FOREIGN)
    assert stored_tags(tmp_path, stream) == {"user": "victim"}


@pytest.mark.attack(324)
def test_a_refused_attempt_uses_up_no_stream_and_hides_no_reason(server: CapturingServer) -> None:
    refused(server, "no consumer is named", stream=VICTIM, capture={"to": "nowhere"})
    captured(server, VICTIM, **OWN)
    refused(server, "was used", stream=VICTIM, **OWN)


@pytest.mark.attack(325)
def test_several_choices_are_one_request_and_end_as_one(
    server: CapturingServer, tmp_path: Path
) -> None:
    assert ask(server, n=3, stream=VICTIM, **OWN).status_code == 200
    assert open_store(tmp_path / "s").request(VICTIM).choices == (0, 1, 2)
    refused(server, "was used", stream=VICTIM, **FOREIGN)
    assert server.control(ListProbes())  # the engine goes on
