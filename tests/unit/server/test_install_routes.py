"""What the routes and the check of requests answer without asking an engine."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from argparse import Namespace
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from fastapi import FastAPI, Request
from starlette.testclient import TestClient

from clairai.errors import RequestError
from clairai.local.heartbeat import VARIABLE, Activity, Heartbeat, read_heartbeats
from clairai.local.thread_switch import SWITCH_S, switch_threads_often
from clairai.plugin import Endpoint
from clairai.server.engine_rpc import NO_TAPS
from clairai.server.install_routes import report_broken_link
from clairai.server.request_check import read_completion


def _server(additional_config: dict[str, Any]) -> TestClient:
    """Stock vLLM's order of calls, with an engine that was configured so and is never reached."""
    app = FastAPI()

    @app.post("/v1/chat/completions")
    async def complete(request: Request) -> Any:
        return await request.json()

    plugin = Endpoint()
    plugin.attach_router(app)
    engine = SimpleNamespace(vllm_config=SimpleNamespace(additional_config=additional_config))
    asyncio.run(plugin.init_state(engine, app.state, Namespace()))
    return TestClient(app)


def _request(fields: Any) -> dict[str, Any]:
    return {"messages": [], "vllm_xargs": {"clairai": fields}}


@pytest.fixture
def switch_interval() -> Iterator[None]:
    before = sys.getswitchinterval()
    yield
    sys.setswitchinterval(before)


@pytest.mark.usefixtures("switch_interval")
def test_threads_of_an_api_server_switch_often_if_its_engine_has_taps_and_only_then() -> None:
    sys.setswitchinterval(0.005)
    _server({})
    assert sys.getswitchinterval() == pytest.approx(0.005)
    _server({"clairai": {"points": ["post_block.0"]}})
    assert sys.getswitchinterval() == pytest.approx(SWITCH_S)


@pytest.mark.usefixtures("switch_interval")
def test_threads_that_switch_more_often_already_are_left_alone() -> None:
    sys.setswitchinterval(SWITCH_S / 10)
    switch_threads_often()
    assert sys.getswitchinterval() < SWITCH_S / 5


@pytest.mark.parametrize(
    ("method", "path"),
    [
        ("GET", "/v1/probes"),
        ("PUT", "/v1/probes/a/b"),
        ("DELETE", "/v1/probes/a"),
        ("GET", "/v1/clairai"),
        ("GET", "/v1/steering"),
        ("POST", "/v1/steering"),
        ("GET", "/v1/steering/vectors"),
        ("GET", "/v1/steering/vectors/a/b"),
        ("PUT", "/v1/steering/vectors/a"),
        ("DELETE", "/v1/steering/vectors/a"),
    ],
)
def test_an_engine_without_taps_has_no_probes_and_no_vectors_and_says_why(
    method: str, path: str
) -> None:
    answer = _server({}).request(method, path)
    assert answer.status_code == 404
    assert answer.json()["error"]["message"] == NO_TAPS


def test_an_engine_without_taps_answers_everything_else_as_before() -> None:
    request = _request("{}") | {"clairai": 1}
    assert _server({}).post("/v1/chat/completions", json=request).json() == request


def test_a_request_with_good_fields_passes_unaltered() -> None:
    request = _request('{"stream": 5}') | {"prompt": "x" * 100_000}
    assert _server({"clairai": {}}).post("/v1/chat/completions", json=request).json() == request


@pytest.mark.parametrize(
    ("request_body", "reason"),
    [
        (_request('{"bogus": 1}'), "unknown clairai request field 'bogus'"),
        (_request('{"stream": 0}'), "stream must be a whole number"),
        (_request("not JSON"), "not JSON"),
        (_request(5), "must be an object"),
        ({"clairai": {"probes": "all"}}, "vLLM itself does not read"),
    ],
)
def test_a_request_with_bad_fields_is_refused_with_the_reason(
    request_body: dict[str, Any], reason: str
) -> None:
    answer = _server({"clairai": {}}).post("/v1/chat/completions", json=request_body)
    assert answer.status_code == 400
    assert reason in answer.json()["error"]["message"]
    assert answer.json()["error"]["code"] == "request"


@pytest.mark.parametrize("body", [b"", b"clairai", b'{"clairai', b"\xff clairai", b'["clairai"]'])
def test_a_body_that_vllm_will_refuse_is_left_to_vllm(body: bytes) -> None:
    assert read_completion(body) is None


def test_fields_are_checked_anywhere_in_the_body() -> None:
    with pytest.raises(RequestError):
        read_completion(json.dumps({"a": [{}] * 9} | _request('{"bogus": 1}')).encode())


def test_the_plugin_module_imports_nothing_that_could_fail() -> None:
    program = (
        "import sys, clairai.plugin\n"
        "heavy = {'torch', 'vllm', 'fastapi', 'numpy', 'msgspec'} & set(sys.modules)\n"
        "sys.exit(repr(heavy) if heavy else 0)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, timeout=100)
    assert done.returncode == 0, done.stderr.decode()


class Link:
    """The connection to an engine core as the watch sees it: `broken` says how it ends."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *, broken: bool) -> None:
        self.broken = broken
        monkeypatch.setattr("clairai.compat.core_link.has_link_broken", self.wait)

    async def wait(self, client: Any) -> bool:
        assert id(client) == id(self)
        return self.broken


@pytest.mark.parametrize("is_broken", [True, False])
def test_only_a_broken_connection_to_the_core_is_told_to_the_launcher(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, is_broken: bool
) -> None:
    tmp_path.chmod(0o700)
    heartbeat = Heartbeat.open("api-server", {VARIABLE: str(tmp_path)})
    assert heartbeat is not None
    asyncio.run(report_broken_link(Link(monkeypatch, broken=is_broken), heartbeat))
    (found,) = read_heartbeats(tmp_path)
    assert found.activity is (Activity.CUT_OFF if is_broken else Activity.LOOP)


def test_completions_are_found_first_and_other_routes_keep_their_order() -> None:
    async def answer() -> None: ...

    app = FastAPI()
    for path in ("/a", "/v1/completions", "/b", "/v1/chat/completions", "/{any:path}"):
        app.add_api_route(path, answer, methods=["POST"])
    paths = [route.path for route in app.routes]  # type: ignore[attr-defined]
    Endpoint().attach_router(app)
    found = [route.path for route in app.routes]  # type: ignore[attr-defined]
    assert found[:2] == ["/v1/completions", "/v1/chat/completions"]
    others = [path for path in paths if path not in found[:2]]
    assert found[2 : 2 + len(others)] == others


@pytest.mark.usefixtures("switch_interval")
def test_vllm_reads_its_environment_once_if_its_engine_has_taps_and_only_then(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    calls: list[str] = []
    envs = SimpleNamespace(enable_envs_cache=lambda: calls.append("enabled"))
    monkeypatch.setitem(sys.modules, "vllm.envs", envs)
    _server({})
    assert not calls
    _server({"clairai": {"points": ["post_block.0"]}})
    assert calls == ["enabled"]
