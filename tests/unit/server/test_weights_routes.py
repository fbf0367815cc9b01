"""The routes under /v1/weights: verify, pause, load and resume, in this order."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import msgspec
import numpy as np
import pytest

from clairai.errors import WeightsBusyError
from clairai.server import weights_routes
from clairai.weights.manifest import Manifest, encode_manifest
from clairai.weights.pack import HostPacker, TensorSpec, open_sources
from tests.support.api_server import toy_server
from tests.support.probes import probe
from tests.support.toy_publisher import SECOND, running_publisher
from tests.support.weights import SHAPES
from tests.support.weights_target import Target, offer_of, said, target


@pytest.fixture
def served(tmp_path: Path) -> Iterator[Target]:
    with target(tmp_path) as made:
        yield made


def _commit(served: Target, *, drain: str = "wait") -> tuple[int, dict[str, object]]:
    manifest = served.planned()
    packed = served.pack(manifest)
    with served.connected() as sock:
        assert said(sock, offer_of(manifest, packed), packed.fds) == ""
        summed: Manifest = msgspec.structs.replace(manifest, tensors=packed.tensors)
        path = f"/v1/weights/commit?drain={drain}"
        answer = served.client.post(path, content=encode_manifest(summed))
    packed.close()
    return answer.status_code, answer.json()


def test_the_state_and_the_tensors_are_described(served: Target) -> None:
    state = served.client.get("/v1/weights").json()
    assert state == {
        "version": 0,
        "label": "",
        "digest": "",
        "epoch": served.llm.epoch,
        "device": "cpu",
        "devices": ["cpu"],
        "ranks": [{"epoch": served.llm.epoch, "rank": 0, "has_bank": True}],
        "bank_version": 0,
        "num_tensors": len(SHAPES),
        "is_torn": False,
    }
    listed = served.client.get("/v1/weights/tensors").json()["data"]
    assert {one["name"]: tuple(one["shape"]) for one in listed} == dict(SHAPES)


@pytest.mark.parametrize("drain", ["wait", "abort"])
def test_a_commit_waits_for_requests_loads_and_resumes(served: Target, drain: str) -> None:
    status, answer = _commit(served, drain=drain)
    assert (status, answer["version"]) == (200, 1)
    assert not {"probe_rows", "vector_rows"} & {key for key, value in answer.items() if value}
    assert served.told == [f"pause {drain} True", "resume"]


def test_probes_alone_pause_nothing(tmp_path: Path) -> None:
    with running_publisher(tmp_path) as step_publisher:
        step_publisher.install(step_publisher.bank.add([probe("p", point=SECOND)]))
        with target(tmp_path, step_publisher) as served:
            manifest = served.planned(described=[TensorSpec("probe::p", "F32", (3,))])
            held = open_sources({"probe::p": np.ones(3, np.float32)}, ExitStack())
            packed = HostPacker(held, manifest).pack(0)
            with served.connected() as sock:
                assert said(sock, offer_of(manifest, packed), packed.fds) == ""
                summed = msgspec.structs.replace(manifest, tensors=packed.tensors)
                assert served.post("commit", encode_manifest(summed)) == ""
            packed.close()
            assert served.told == []
            assert step_publisher.bank.probes[0].direction_D.tolist() == [1.0, 1.0, 1.0]


def test_half_loaded_weights_keep_the_engine_paused_until_a_whole_set_comes(served: Target) -> None:
    served.llm.fail_after = 2
    status, answer = _commit(served)
    assert status == 500
    assert "half-way" in str(answer)
    assert served.told == ["pause wait True"], "it stays paused"
    assert served.client.get("/v1/weights").json()["is_torn"]
    served.told.clear()
    served.llm.fail_after = None
    assert _commit(served)[0] == 200
    assert served.told == ["pause wait True", "resume"]


def test_requests_that_do_not_end_keep_the_old_weights(
    served: Target, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def never(*_: object) -> None:
        await asyncio.Event().wait()

    monkeypatch.setattr("clairai.server.engine_rpc.EngineRpc.pause", never)
    monkeypatch.setattr(weights_routes, "DRAIN_S", 0.01)
    status, answer = _commit(served)
    assert status == 409
    assert "still run" in str(answer)
    assert served.told == ["resume"]
    assert served.is_untouched()


def _busy(served: Target, times: int) -> None:
    """So often the core finds a request that was preempted, or an answer of several."""
    left = iter(range(times))

    def guard(_: bytes) -> None:
        if next(left, None) is not None:
            raise WeightsBusyError("planted")

    served.llm.core_control._check_weights = guard


def test_preempted_requests_run_before_the_commit(served: Target) -> None:
    _busy(served, 2)
    status, answer = _commit(served)
    assert (status, answer["version"]) == (200, 1)
    assert served.told == ["pause wait True", "resume"] * 3


def test_preempted_requests_that_never_end_keep_the_old_weights(
    served: Target, monkeypatch: pytest.MonkeyPatch
) -> None:
    _busy(served, 1 << 30)
    monkeypatch.setattr(weights_routes, "DRAIN_S", 0.05)
    status, answer = _commit(served)
    assert status == 409
    assert answer["error"]["code"] in ("weights-busy", "weights")  # type: ignore[index]
    assert served.told[-1] == "resume"
    assert served.is_untouched()


@pytest.mark.parametrize("route", ["check", "plan", "commit"])
def test_a_wrong_manifest_never_reaches_the_engine(
    served: Target, monkeypatch: pytest.MonkeyPatch, route: str
) -> None:
    def reached(*_: object) -> None:
        raise AssertionError("the engine was asked")

    monkeypatch.setattr(served.llm, "collective_rpc", reached)
    assert "no manifest" in served.post(route, b'{"version": 1, "code": "x"}')


def test_an_engine_that_accepts_no_weights_says_how_to_start_it(tmp_path: Path) -> None:
    with toy_server(tmp_path) as plain:
        answer = plain.client.get("/v1/weights")
    assert answer.status_code == 409
    assert "--weight-transfer-config" in answer.json()["error"]["message"]
    assert answer.json()["error"]["code"] == "weights-off"
