"""A real router in front of two proxies: what a client gets is what a proxy alone would send."""

from __future__ import annotations

import socket
import ssl
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest

pytest.importorskip("vllm_router", reason="vllm-router: `make integrations` has it")

from clairai.proxy.observe.metrics import Metrics
from tests.http.answers import (
    CHAT,
    TEXT,
    asking,
    chunks,
    collect_event_scores,
    collect_scores,
    events,
    expected,
    without_ours,
)
from tests.http.fake import answering
from tests.http.world import World, world
from tests.support.ring_engine import until

pytestmark = pytest.mark.timeout(180)

HELLO = [72, 101, 108, 108, 111]
NAMES = ("east", "west")
REPLICA = "X-Clairai-Replica"
SCORED = {"X-Clairai-Scores": "all"}
PLAIN = {"model": "toy", "messages": [{"role": "user", "content": "Hi"}]}
START_S = 60.0


@dataclass(frozen=True)
class Routed:
    """Two proxies, by name, and the router in front of them."""

    url: str
    worlds: dict[str, World]

    def client(self, **more: Any) -> httpx.Client:
        unused = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)  # there is no TLS here
        return httpx.Client(base_url=self.url, timeout=30, trust_env=False, verify=unused, **more)


@contextmanager
def _routed(folder: Path, policy: str) -> Iterator[Routed]:
    with ExitStack() as stack:
        worlds: dict[str, World] = {}
        for name in NAMES:
            (folder / name).mkdir(mode=0o700)  # as every folder of a ring
            made = world(
                folder / name,
                script=answering(HELLO),
                metrics=Metrics(replica=name),
                replica=name,
            )
            worlds[name] = stack.enter_context(made)
        addresses = [one.url for one in worlds.values()]
        yield Routed(stack.enter_context(_router(addresses, folder / "log", policy)), worlds)


@pytest.fixture(scope="module")
def routed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Routed]:
    """Requests go to both in turn."""
    with _routed(tmp_path_factory.mktemp("routed"), "round_robin") as made:
        yield made


@contextmanager
def _router(addresses: list[str], log: Path, policy: str) -> Iterator[str]:
    """The router's own command, with its usual settings."""
    port, metrics_port = _free_ports()
    command = [
        *(sys.executable, "-m", "vllm_router.launch_router", "--worker-urls", *addresses),
        *("--policy", policy, "--host", "127.0.0.1", "--port", str(port)),
        *("--prometheus-port", str(metrics_port), "--health-check-interval-secs", "1"),
    ]
    with log.open("wb") as output, subprocess.Popen(command, stdout=output, stderr=output) as ran:
        try:
            until(lambda: _listens(port) or ran.poll() is not None, timeout_s=START_S)
            assert ran.poll() is None, log.read_text()[-4000:]
            yield f"http://127.0.0.1:{port}"
        finally:
            ran.terminate()


def _free_ports() -> tuple[int, int]:
    with socket.create_server(("127.0.0.1", 0)) as a, socket.create_server(("127.0.0.1", 0)) as b:
        return a.getsockname()[1], b.getsockname()[1]


def _listens(port: int) -> bool:
    try:
        socket.create_connection(("127.0.0.1", port), timeout=1).close()
    except OSError:
        return False
    return True


def test_a_scored_stream_comes_through_byte_for_byte_with_every_score(routed: Routed) -> None:
    body = {"model": "toy", **asking()}
    seen = set()
    with routed.client() as client:
        for _ in range(4):
            answer = client.post(CHAT, json=body)
            (one,) = collect_scores(chunks(answer.content)).values()
            assert (one.text, one.scores, one.lost) == ("Hello", expected(HELLO), 0)
            name = answer.headers[REPLICA]
            with routed.worlds[name].client() as alone:
                # How many tokens a chunk of scores holds depends on when its rows came.
                assert without_ours(answer.content) == without_ours(
                    alone.post(CHAT, json=body).content
                )
            seen.add(name)
    assert seen == set(NAMES), "both have answered"


@pytest.mark.parametrize("path", [CHAT, TEXT])
def test_an_answer_that_is_not_streamed_has_its_scores(routed: Routed, path: str) -> None:
    asked = {"messages": [{"role": "user", "content": "Hi"}]} if path == CHAT else {"prompt": "Hi"}
    with routed.client() as client:
        answer = client.post(path, json={"model": "toy", **asked, "clairai": {}}).json()
    (one,) = collect_scores([answer]).values()
    assert (one.text, one.scores) == ("Hello", expected(HELLO))


def test_a_named_stream_comes_through(routed: Routed) -> None:
    with routed.client() as client:
        raw = client.post(CHAT, json={"model": "toy", **asking(events="named")}).content
    (one,) = collect_event_scores(events(raw)).values()
    assert one.scores == expected(HELLO)
    assert events(raw)[-1].name == "done"


@pytest.mark.parametrize("is_streamed", [True, False])
def test_a_refusal_keeps_its_status_its_code_and_its_reason(
    routed: Routed, is_streamed: bool
) -> None:
    body = {"model": "toy", **asking(probes=["absent"]), "stream": is_streamed}
    with routed.client() as client:
        refused = client.post(CHAT, json=body)
    assert refused.status_code == 400
    error = refused.json()["error"]
    assert (error["code"], error["param"]) == ("probe", "clairai.probes")
    assert error["message"] == "no probe is named 'absent'; GET /v1/probes lists them"


def test_health_is_the_routers_and_that_of_one_replica_behind_it(routed: Routed) -> None:
    with routed.client() as client:
        assert client.get("/readiness").json()["healthy_workers"] == len(NAMES)
        ready = [client.get("/health/ready") for _ in range(2)]
    assert [one.json() for one in ready] == [{"ready": True, "reason": None}] * 2
    assert {one.headers[REPLICA] for one in ready} == set(NAMES)
    for name, one in routed.worlds.items():
        with one.client() as alone:
            assert alone.get("/health").json()["replica"] == name
            assert f'clairai_replica_info{{replica="{name}"}} 1.0' in alone.get("/metrics").text


def test_scores_by_id_are_at_the_replica_that_the_answer_names(tmp_path: Path) -> None:
    with _routed(tmp_path, "round_robin") as routed, routed.client(headers=SCORED) as client:
        answer = client.post(CHAT, json=PLAIN)
        name, path = answer.headers[REPLICA], f"/v1/scores/{answer.json()['id']}"
        (other,) = set(NAMES) - {name}
        through = [client.get(path) for _ in range(2)]  # one at each
        assert {one.headers[REPLICA]: one.status_code for one in through} == {name: 200, other: 404}
        with routed.worlds[name].client() as alone:
            assert alone.get(path).json()["choices"][0]["token_ids"] == HELLO


def test_scores_by_id_are_found_through_a_router_that_keeps_sessions(tmp_path: Path) -> None:
    with _routed(tmp_path, "consistent_hash") as routed:
        for session in ("alice", "bob", "carol", "dave"):
            with routed.client(headers={**SCORED, "X-Session-ID": session}) as client:
                answers = [client.post(CHAT, json=PLAIN) for _ in range(3)]
                assert len({one.headers[REPLICA] for one in answers}) == 1
                found = client.get(f"/v1/scores/{answers[-1].json()['id']}")
            assert (found.status_code, found.headers[REPLICA]) == (
                200,
                answers[0].headers[REPLICA],
            )


def test_a_replica_that_is_gone_is_left_out(tmp_path: Path) -> None:
    """Its proxy lives and says 503; the router asks /health and sends everything to the other."""
    with _routed(tmp_path, "round_robin") as routed, routed.client() as client:
        routed.worlds["east"].stop_upstream()
        until(lambda: client.get("/readiness").json()["healthy_workers"] == 1, timeout_s=60)
        for _ in range(4):
            answer = client.post(CHAT, json={"model": "toy", **asking()})
            assert answer.headers[REPLICA] == "west"
            (one,) = collect_scores(chunks(answer.content)).values()
            assert one.scores == expected(HELLO)
