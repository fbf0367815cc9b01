"""The version of the weights in responses and model cards of a whole server."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
from fastapi import FastAPI

from clairai.engine.core_control import CoreControl
from clairai.weights.manifest import encode_manifest
from clairai.weights.receive import ServedWeights as Weights
from clairai.wire import control_messages
from tests.support.api_server import PATHS, ToyServer
from tests.support.toy_publisher import running_publisher
from tests.support.weights import ToyLlm, engine
from tests.support.weights_target import Target, offer_of, said

MODELS = {"object": "list", "data": [{"id": "toy", "max_model_len": 8}, {"id": "lora"}]}


@dataclass
class Served(ToyServer):
    """Behind it an engine that takes weights."""

    llm: ToyLlm | None = None
    folder: Path = Path()

    def add_routes(self, app: FastAPI) -> None:
        async def models() -> dict[str, Any]:
            return MODELS

        app.add_api_route("/v1/models", models, methods=["GET"])

    async def _collective_rpc(self, method: str, args: tuple[bytes] = (b"",)) -> list[bytes]:
        assert self.llm is not None
        if method == "clairai_control":
            self.asked.append(msgspec.msgpack.decode(args[0], type=control_messages.Control))
            return self.llm.collective_rpc(method, args)
        self.llm.updater.served = Weights(self.llm.updater.served.version + 1)
        return []

    def send(self, label: str = "") -> dict[str, Any]:
        """New weights, by the routes."""
        assert self.llm is not None
        target = Target(self.folder, self.llm, self.client)
        manifest = msgspec.structs.replace(target.plan(), label=label)
        assert target.post("plan", encode_manifest(manifest)) == ""
        packed = target.pack(manifest)
        with target.connected() as sock:
            assert said(sock, offer_of(manifest, packed), packed.fds) == ""
            summed = msgspec.structs.replace(manifest, tensors=packed.tensors)
            answer = self.client.post("/v1/weights/commit", content=encode_manifest(summed))
        packed.close()
        assert answer.status_code == 200
        found: dict[str, Any] = answer.json()
        return found


@pytest.fixture
def server(runtime: Path, tmp_path: Path) -> Iterator[Served]:
    with running_publisher(runtime, weights=0) as step_publisher:
        core_control = CoreControl(None, ())
        with engine(tmp_path, step_publisher, core_control) as llm:
            backend = SimpleNamespace(backend="clairai_ipc")
            yield Served(core_control, step_publisher, backend=backend, llm=llm, folder=tmp_path)


@pytest.mark.parametrize("path", PATHS)
def test_a_response_names_its_weights(server: Served, path: str) -> None:
    told = [server.ask(path).json()["clairai"]]
    server.send()
    told.append(server.ask(path).json()["clairai"])
    assert told == [{"weights": 0}, {"weights": 1}]


@pytest.mark.parametrize("path", PATHS)
def test_a_stream_names_its_weights_in_the_first_chunk(server: Served, path: str) -> None:
    server.send()
    frames = server.ask(path, stream=True).text.split("\n\n")
    chunks = [json.loads(frame.removeprefix("data: ")) for frame in frames[:-2]]
    assert [chunk.get("clairai") for chunk in chunks] == [{"weights": 1}, *[None] * len(chunks[1:])]


def test_the_response_to_a_request_without_our_fields_is_unchanged(server: Served) -> None:
    answer = server.client.post(PATHS[0], json={"messages": []})
    assert answer.json() == {"id": "1", "choices": [{"index": 0}]}


def test_every_model_card_names_its_weights(server: Served) -> None:
    sent = server.send(label="step-7")
    answer = server.client.get("/v1/models")
    about = {"version": 1, "label": "step-7", "digest": sent["digest"]}
    cards = [{**card, "clairai": {"weights": about}} for card in MODELS["data"]]  # type: ignore[dict-item]
    assert answer.json() == {"object": "list", "data": cards}
    assert int(answer.headers["content-length"]) == len(answer.content)


def test_the_worker_is_asked_at_a_change_and_not_for_each_request(server: Served) -> None:
    server.ask()
    server.asked.clear()
    for _ in range(3):
        server.ask(stream=True)
    server.client.get("/v1/models")
    assert server.asked == []


def test_weights_changed_by_another_route_are_noticed(server: Served) -> None:
    told = [server.ask().json()["clairai"]]
    asyncio.run(server.engine_client.collective_rpc("reload_weights"))
    told.append(server.ask().json()["clairai"])
    assert told == [{"weights": 0}, {"weights": 1}]


def test_an_engine_that_has_ended_spoils_no_response(
    server: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def gone(*_: object, **__: object) -> None:
        raise RuntimeError("the engine is dead")

    monkeypatch.setattr(server.engine_client, "collective_rpc", gone)
    answer = server.ask()
    assert (answer.status_code, answer.json()) == (200, {"id": "1", "choices": [{"index": 0}]})


def test_weights_of_an_interrupted_commit_are_named_too(
    server: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    told = [server.ask().json()["clairai"]]
    assert server.llm is not None
    answering = server.llm.collective_rpc

    def lost(method: str, args: tuple[bytes]) -> list[bytes]:
        replies = answering(method, args)
        if b"commit_weights" in args[0]:
            raise RuntimeError("the answer was lost")
        return replies

    with monkeypatch.context() as patched:
        patched.setattr(server.llm, "collective_rpc", lost)
        with pytest.raises(RuntimeError, match="was lost"):
            server.send()
    told.append(server.ask().json()["clairai"])
    assert told == [{"weights": 0}, {"weights": 1}]
