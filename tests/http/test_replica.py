"""A proxy with a name says it in every response, in its health and in its metrics."""

from __future__ import annotations

from pathlib import Path

import pytest

from clairai.errors import ConfigError
from clairai.proxy.observe.metrics import Metrics
from clairai.proxy.proxy_settings import ProxySettings
from tests.http.answers import CHAT, asking
from tests.http.world import World, world

HEADER = "X-Clairai-Replica"


def test_every_response_names_the_replica_refusals_too(tmp_path: Path) -> None:
    with world(
        tmp_path, replica="east-1", metrics=Metrics(replica="east-1"), api_key="k" * 16
    ) as w:
        with w.client(headers={"Authorization": "Bearer " + "k" * 16}) as client:
            said = [
                client.post(CHAT, json=asking()),
                client.post(CHAT, json=asking(probes=["absent"])),
                client.get("/no/such/route"),
                client.get("/v1/scores/absent"),
                client.get("/"),
            ]
            metrics, health = client.get("/metrics").text, client.get("/health").json()
        with w.client() as client:
            said.append(client.get("/v1/probes"))
    assert [one.status_code for one in said] == [200, 400, 404, 404, 200, 401]
    assert {one.headers[HEADER] for one in said} == {"east-1"}
    assert health["replica"] == "east-1"
    assert 'clairai_replica_info{replica="east-1"} 1.0' in metrics


def test_a_proxy_without_a_name_says_none(w: World) -> None:
    with w.client() as client:
        answer = client.get("/health")
    assert HEADER not in answer.headers
    assert answer.json()["replica"] is None


@pytest.mark.parametrize("name", ["", "a b", "a\nb", "ä", "x" * 65, 'a"'])
def test_a_name_that_no_header_or_label_can_carry_is_refused(name: str) -> None:
    with pytest.raises(ConfigError, match="name of a replica"):
        ProxySettings("http://127.0.0.1:8000", replica=name)
