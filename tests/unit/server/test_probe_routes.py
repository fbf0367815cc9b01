"""What GET /v1/probes says of probes with and without metadata."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
from fastapi import FastAPI
from starlette.testclient import TestClient

from clairai.engine.worker_control import answer_control
from clairai.server import install_routes
from clairai.wire import control_messages
from tests.support import toy_publisher as toy


@pytest.fixture
def server(runtime: Path) -> Iterator[TestClient]:
    """The routes in front of a real station; only vLLM's way between them is left out."""
    with toy.running_publisher(runtime) as step_publisher:

        async def collective_rpc(_: str, args: tuple[bytes]) -> list[bytes]:
            return [answer_control(step_publisher, args[0])]

        app = FastAPI()
        install_routes.attach(app)
        install_routes.connect(SimpleNamespace(collective_rpc=collective_rpc), app.state)
        yield TestClient(app)


def test_a_probe_is_listed_with_all_its_metadata(server: TestClient) -> None:
    shape = control_messages.Histogram(0.0, 1.0, (9, 3, 1, 0, 0, 0, 2, 5))
    told = toy.file_of("a", description="Words.", auroc=0.9, histogram=shape, calibration=(0, 1))
    assert server.put("/v1/probes/a", content=told).status_code == 201
    listed = server.get("/v1/probes").json()
    assert (listed["version"], listed["capacity"]) == (1, toy.CAPACITY)
    (probe,) = listed["data"]
    assert len(probe.pop("digest")) == 32
    assert probe == {
        "name": "a",
        "point": str(toy.SECOND),
        "activation": "none",
        "threshold": None,
        "calibration": [0.0, 1.0],
        "description": "Words.",
        "auroc": 0.9,
        "histogram": {"low": 0.0, "high": 1.0, "counts": list(shape.counts)},
    }


def test_a_probe_without_metadata_is_listed_with_nulls(server: TestClient) -> None:
    server.put("/v1/probes/a", content=toy.file_of("a"))
    (probe,) = server.get("/v1/probes").json()["data"]
    assert [probe[key] for key in ("description", "auroc", "histogram")] == [None, None, None]
