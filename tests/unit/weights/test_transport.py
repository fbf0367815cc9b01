"""The transport is chosen by where tensors and engine are, and the reason is reported."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

from clairai.errors import EngineGoneError, WeightsError
from clairai.library.http_client import ServerClient
from clairai.weights.manifest import CPU
from clairai.weights.pack import TensorSource, TensorSpec
from clairai.weights.socket_client import BufferClient
from clairai.weights.transport import (
    HostTransport,
    HttpTransport,
    Transport,
    TransportChooser,
    choose_memories,
    choose_memory,
)
from clairai.wire.weights_messages import WeightsState
from tests.support.cuda import UUIDS, install
from tests.support.weights import ToyLlm, engine

FIRST, SECOND = (uuid.hex() for uuid in UUIDS)
SERVER = ServerClient("http://127.0.0.1:1")


def on(*devices: str) -> list[TensorSource]:
    spec = TensorSpec("w", "F32", (1,))
    return [TensorSource(spec, torch.device(device), lambda: torch.zeros(1)) for device in devices]


@pytest.fixture
def llm(tmp_path: Path) -> Iterator[ToyLlm]:
    with engine(tmp_path) as running:
        yield running


def state(llm: ToyLlm, device: str = CPU) -> WeightsState:
    found = llm.updater.state()
    return msgspec.structs.replace(found, device=device, devices=(device,))


def choose(llm: ToyLlm, folder: Path, found: list[TensorSource], **given: Any) -> Transport:
    """Choose a transport and close it again."""
    device = given.pop("device", CPU)
    asked = {"server": SERVER, "runtime_dir": str(folder), "through": "auto", **given}
    made = TransportChooser(**asked).choose(found, state(llm, device))
    made.close()
    return made


@pytest.mark.parametrize(
    ("found", "engine", "device", "why"),
    [
        (on("cpu"), CPU, "cpu", "no GPU"),
        (on("cpu"), FIRST, "cpu", "in host memory"),
        (on("cuda:0"), FIRST, "cuda:0", "own GPU"),
        (on("cuda:1"), SECOND, "cuda:1", "own GPU"),
        (on("cpu", "cuda:1"), SECOND, "cuda:1", "own GPU"),
        (on("cuda:0", "cuda:1"), SECOND, "cuda:1", "own GPU"),
        (on("cuda:1"), FIRST, "cpu", f"on GPU {SECOND}, the engine is on {FIRST}"),
        (on("cuda:1"), CPU, "cpu", "no GPU"),
    ],
)
def test_the_memory_is_chosen_by_where_tensors_and_engine_are(
    monkeypatch: pytest.MonkeyPatch, found: list[TensorSource], engine: str, device: str, why: str
) -> None:
    install(monkeypatch)
    home, said = choose_memory(found, engine)
    assert home == torch.device(device)
    assert why in said


@pytest.mark.parametrize(
    ("found", "engine", "num_visible", "devices", "why"),
    [
        (on("cuda:0"), (FIRST, SECOND), 2, ("cuda:0", "cuda:1"), "sees the GPUs of all ranks"),
        (on("cuda:1"), (SECOND, FIRST), 2, ("cuda:1", "cuda:0"), "sees the GPUs of all ranks"),
        (on("cuda:0"), (FIRST, SECOND), 1, (), f"GPU {SECOND} of a rank cannot be seen"),
        (on("cpu"), (FIRST, SECOND), 2, (), "in host memory"),
        (on("cpu"), (CPU, CPU), 0, (), "no GPU"),
    ],
)
def test_the_memory_of_several_ranks_is_that_of_their_gpus_if_all_are_seen(
    monkeypatch: pytest.MonkeyPatch,
    found: list[TensorSource],
    engine: tuple[str, ...],
    num_visible: int,
    devices: tuple[str, ...],
    why: str,
) -> None:
    install(monkeypatch)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: num_visible)
    homes, said = choose_memories(found, engine)
    assert homes == tuple(map(torch.device, devices))
    assert why in said


def test_on_one_machine_the_socket_is_used(llm: ToyLlm, tmp_path: Path) -> None:
    made = choose(llm, tmp_path, on("cpu"))
    assert (made.kind, made.reason) == ("host", "the engine has no GPU")
    assert isinstance(made, HostTransport)


def test_without_the_socket_http_is_used(llm: ToyLlm, tmp_path: Path) -> None:
    made = choose(llm, tmp_path / "elsewhere", on("cpu"))
    assert made.kind == "http"
    assert "socket is not here" in made.reason
    assert isinstance(made, HttpTransport)


def test_a_requested_transport_is_used_although_there_is_a_faster_one(
    llm: ToyLlm, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    install(monkeypatch)
    monkeypatch.setattr(BufferClient, "is_same_process", False)
    gpu = {"device": FIRST}
    assert choose(llm, tmp_path, on("cuda:0"), **gpu).kind == "device"
    assert choose(llm, tmp_path, on("cuda:0"), through="device", **gpu).kind == "device"
    for through in ("host", "http"):
        made = choose(llm, tmp_path, on("cuda:0"), through=through, **gpu)
        assert (made.kind, made.reason) == (through, "it was asked for")


def test_an_engine_in_this_process_opens_no_handle(
    llm: ToyLlm, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    install(monkeypatch)
    made = choose(llm, tmp_path, on("cuda:0"), device=FIRST)
    assert made.kind == "host"
    assert "in this process" in made.reason


@pytest.mark.parametrize(
    ("given", "elsewhere", "kind", "reason"),
    [
        ({"through": "device"}, False, WeightsError, "the engine has no GPU"),
        ({"through": "host"}, True, EngineGoneError, "own machine"),
        ({"server": None}, True, EngineGoneError, "own machine"),
        ({"server": None, "through": "http"}, False, WeightsError, "address of a server"),
        ({"through": "pigeon"}, False, WeightsError, "auto, device, host, http"),
    ],
)
def test_a_requested_transport_that_is_impossible_is_refused(
    llm: ToyLlm, tmp_path: Path, given: Any, elsewhere: bool, kind: Any, reason: str
) -> None:
    folder = tmp_path / "elsewhere" if elsewhere else tmp_path
    with pytest.raises(kind, match=reason):
        choose(llm, folder, on("cpu"), **given)
    BufferClient(tmp_path, llm.epoch).close()  # the refused sender has released the socket
