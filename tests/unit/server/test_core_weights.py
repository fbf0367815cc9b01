"""New weights reach all engine cores of an engine or none, whatever one of them does.

Real: cores' control, ranks, sockets, buffers, and the API server's part. Toy: the model, and vLLM.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import numpy as np
import pytest
import torch

from clairai.compat.engine_cores import share_weight_calls
from clairai.engine.core_control import CoreControl
from clairai.errors import (
    CoresDifferError,
    UnsupportedError,
    WeightsBusyError,
    WeightsError,
    WeightsRoomError,
    WeightsTornError,
)
from clairai.library.engine_control import read_reply
from clairai.server.core_group import CoreGroup
from clairai.server.core_weights import split_manifest
from clairai.weights import Sender
from clairai.weights.manifest import Manifest, parse_manifest
from clairai.weights.room import LoadNeeds
from clairai.weights.trainer_session import take_state
from clairai.wire import control_messages, ring_messages, weights_messages
from tests.support import toy_publisher
from tests.support.probes import probe
from tests.support.weights import ToyLlm, plan, weights

TIGHT = LoadNeeds(host_nbytes=1 << 60)


class Core(ToyLlm):
    """One of several cores; `busy` says how often a request still runs in it."""

    def __init__(self, folder: Path, publisher: Any) -> None:
        control = CoreControl(None, (), guard=self._require_idle, is_one_of_several=True)
        super().__init__(folder, publisher, control)
        self.busy = 0
        self.num_begun = 0  # updates that a caller of vLLM's has begun

    def _require_idle(self, manifest: bytes) -> None:
        parse_manifest(manifest)
        if self.busy:
            self.busy -= 1
            raise WeightsBusyError("a request has begun")

    def finish_weight_update(self) -> None:
        self.num_begun -= 1

    async def call(self, message: bytes) -> list[bytes]:
        await asyncio.sleep(0)
        return self.collective_rpc("clairai_control", (message,))


class Engine:
    """What a Sender asks, of two cores behind an API server."""

    def __init__(self, folder: Path, cores: list[Core]) -> None:
        self.cores = cores
        self.group = CoreGroup([core.call for core in cores], folder)
        self.last = b""  # the manifest that was committed last

    def ask(self, control: control_messages.Control, kind: Any) -> Any:
        return read_reply(asyncio.run(self.group.ask(control)), kind)

    def state(self) -> weights_messages.WeightsState:
        found: weights_messages.WeightsState = self.ask(
            weights_messages.DescribeWeights(), weights_messages.WeightsState
        )
        return found

    def check(self, manifest: bytes) -> None:
        self.ask(weights_messages.CheckWeights(manifest), weights_messages.WeightsPlanned)

    def plan(self, manifest: bytes) -> None:
        self.ask(weights_messages.PlanWeights(manifest), weights_messages.WeightsPlanned)

    def commit(self, manifest: bytes) -> weights_messages.WeightsCommitted:
        self.last = manifest
        self.ask(weights_messages.VerifyWeights(manifest), weights_messages.WeightsPlanned)
        found: weights_messages.WeightsCommitted = self.ask(
            weights_messages.CommitWeights(manifest), weights_messages.WeightsCommitted
        )
        return found

    def served(self) -> list[int | None]:
        """The seed of the weights that each core has."""
        return [_seed_of(core) for core in self.cores]

    def directions(self) -> list[list[float]]:
        return [core.step_publisher.bank.probes[0].direction_D.tolist() for core in self.cores]

    def versions(self) -> set[tuple[int, int]]:
        return {
            (core.updater.served.version, core.step_publisher.bank.version) for core in self.cores
        }


def _seed_of(core: Core) -> int | None:
    for seed in range(5):
        if all(torch.equal(core.model[name], given) for name, given in weights(seed).items()):
            return seed
    return None


@pytest.fixture
def engine(tmp_path: Path) -> Iterator[Engine]:
    with ExitStack() as opened:
        cores = []
        for at in range(2):
            (tmp_path / str(at)).mkdir(mode=0o700)
            publisher = opened.enter_context(toy_publisher.running_publisher(tmp_path / str(at)))
            publisher.install(publisher.bank.add([probe("p", point=toy_publisher.SECOND)]))
            cores.append(Core(tmp_path, publisher))
            opened.callback(cores[-1].updater.close)
        yield Engine(tmp_path, cores)


@pytest.fixture
def sender(engine: Engine, tmp_path: Path) -> Sender:
    return Sender(engine, runtime_dir=str(tmp_path))


def test_all_cores_load_what_is_sent_once_and_have_one_version(
    engine: Engine, sender: Sender
) -> None:
    state = engine.state()
    assert [rank.epoch for rank in state.ranks] == [core.epoch for core in engine.cores]
    assert len({*state.ranks}) == 2
    assert sender.send(weights(1)).version == 1
    assert engine.served() == [1, 1]
    sent = sender.send(weights(2) | {"probe::p": np.array([4.0, 5.0, 6.0], np.float32)})
    assert (sent.version, engine.served()) == (2, [2, 2])
    assert engine.directions() == [[4.0, 5.0, 6.0]] * 2
    assert len({core.updater.served.digest for core in engine.cores}) == 1
    alone = sender.send({"probe::p": np.ones(3, np.float32)})
    assert (alone.version, engine.directions()) == (2, [[1.0, 1.0, 1.0]] * 2)


@pytest.mark.parametrize("core", [0, 1])
def test_a_core_without_room_keeps_all_at_the_old_weights(
    engine: Engine, sender: Sender, core: int
) -> None:
    engine.cores[core].needs = TIGHT
    with pytest.raises(
        WeightsRoomError, match="engine core 1: new weights" if core else "^new weights"
    ):
        sender.send(weights(1))
    assert engine.served() == [0, 0]
    engine.cores[core].needs = LoadNeeds()
    assert sender.send(weights(1)).version == 1


def test_cores_that_load_at_the_same_time_share_the_memory_of_the_machine(
    engine: Engine, sender: Sender, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("clairai.weights.room.free_memory_bytes", lambda: 1 << 30)
    for core in engine.cores:
        core.needs = LoadNeeds(host_nbytes=600 << 20)  # one of them would fit
    with pytest.raises(WeightsRoomError):
        sender.check(weights(1))


@pytest.mark.parametrize("core", [0, 1])
def test_a_core_that_refuses_when_all_has_come_keeps_all_at_the_old_weights(
    engine: Engine, sender: Sender, monkeypatch: pytest.MonkeyPatch, core: int
) -> None:
    def refuse(_: bytes) -> str:
        raise WeightsRoomError("planted")

    monkeypatch.setattr(engine.cores[core].updater, "prepare", refuse)
    with pytest.raises(WeightsRoomError, match="planted"):
        sender.send(weights(1))
    assert engine.served() == [0, 0]
    monkeypatch.undo()
    assert sender.send(weights(1)).version == 1


@pytest.mark.parametrize("core", [0, 1])
def test_a_load_that_fails_in_one_core_is_repaired_by_a_whole_set_alone(
    engine: Engine, sender: Sender, core: int
) -> None:
    before = engine.directions()
    for _ in range(2):
        engine.cores[core].fail_after = 2
        with pytest.raises(WeightsTornError, match="1 of 2 engine cores have the new weights"):
            sender.send(weights(1) | {"probe::p": np.ones(3, np.float32)})
        assert [one.updater.is_torn for one in engine.cores] == [True, True]
        assert engine.directions() == before, "the probes wait until all have loaded"
        assert len(engine.versions()) == 1, engine.versions()
    engine.cores[core].fail_after = None
    ((version, _),) = engine.versions()
    assert sender.send(weights(2)).version == version + 1
    assert engine.served() == [2, 2]
    assert not engine.state().is_torn
    added = control_messages.AddProbes((toy_publisher.file_of("q"),))
    engine.ask(added, control_messages.BankState)  # the banks have one version still


def test_a_request_that_has_begun_on_one_core_delays_the_commit_and_loses_nothing(
    engine: Engine, sender: Sender, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As weights_routes.py does it: the same commit is asked again after the next pause."""
    engine.cores[1].busy = 1
    commit, refused = engine.commit, []

    def commit_again(manifest: bytes) -> weights_messages.WeightsCommitted:
        try:
            return commit(manifest)
        except WeightsBusyError as error:
            refused.append(error)
            assert engine.served() == [0, 0]
            return commit(manifest)

    monkeypatch.setattr(engine, "commit", commit_again)
    assert sender.send(weights(1)).version == 1
    assert (len(refused), engine.served()) == (1, [1, 1])


def test_probes_that_one_core_cannot_take_end_all_changes(
    engine: Engine, sender: Sender, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(_: Any) -> Any:
        raise MemoryError("planted")

    monkeypatch.setattr(engine.cores[1].step_publisher, "install", fail)
    with pytest.raises(CoresDifferError, match="restart the engine"):
        sender.send({"probe::p": np.ones(3, np.float32)})
    monkeypatch.undo()
    with pytest.raises(CoresDifferError):
        sender.send(weights(1))
    assert engine.served() == [0, 0]


def test_a_core_of_several_takes_nothing_for_itself(engine: Engine, sender: Sender) -> None:
    sender.send(weights(1))
    for core in engine.cores:
        refused = core.ask(weights_messages.CommitWeights(engine.last))
        assert isinstance(refused, ring_messages.Refusal)
        assert (refused.code, "API server" in refused.reason) == ("unsupported", True)
        with pytest.raises(UnsupportedError, match="API server"):
            core.core_control.update_begun(None, engine.last, core.ask_ranks)


def test_a_manifest_is_split_by_the_ranks_of_the_cores() -> None:
    def state(epoch: str, *devices: str) -> weights_messages.WeightsState:
        return weights_messages.WeightsState(0, "", "", epoch, devices[0], 0, devices=devices)

    gpus = tuple(letter * 32 for letter in "abc")
    states = [state("0" * 15 + "1", *gpus[:2]), state("0" * 15 + "2", gpus[2])]
    made: Manifest = msgspec.structs.replace(plan(epoch=states[0].epoch), device=gpus)
    own = [parse_manifest(one) for one in split_manifest(made, states)]
    assert [(one.epoch, one.device) for one in own] == [
        (states[0].epoch, gpus[:2]),
        (states[1].epoch, gpus[2:]),
    ]
    with pytest.raises(WeightsError, match="buffers for 2 ranks, and the engine has 3"):
        split_manifest(msgspec.structs.replace(made, device=gpus[:2]), states)
    other = plan(epoch="f" * 16)
    assert {parse_manifest(one).epoch for one in split_manifest(other, states)} == {other.epoch}


class Trainer:
    """What a Sender asks, by the calls of vLLM's trainers: they have no answers."""

    def __init__(self, client: Any, folder: Path) -> None:
        self._client, self._folder = client, folder

    def call(self, method: str, **named: Any) -> None:
        asyncio.run(self._client.collective_rpc(method, kwargs=named))

    def state(self) -> weights_messages.WeightsState:
        session = secrets.token_hex(16)
        self.call("init_weight_transfer_engine", init_info={"session": session})
        return take_state(self._folder, session)

    def check(self, manifest: bytes) -> None:
        raise NotImplementedError

    def plan(self, manifest: bytes) -> None:
        self.call("update_weights", update_info={"plan": manifest.decode()})

    def commit(self, manifest: bytes) -> weights_messages.WeightsCommitted:
        self.call("update_weights", update_info={"manifest": manifest.decode()})
        return weights_messages.WeightsCommitted(self.state().version, "", 0, 0.0)


def test_vllms_trainers_reach_all_cores_by_the_calls_of_the_api_server(
    engine: Engine, tmp_path: Path
) -> None:
    """The state of all cores comes by a file."""
    called: list[Any] = []

    async def collective_rpc(method: str, args: Any = (), kwargs: Any = None) -> list[None]:
        del args
        called.append((method, kwargs))
        return [None]

    client = SimpleNamespace(collective_rpc=collective_rpc)
    share_weight_calls(client, engine.group)
    trainer = Trainer(client, tmp_path)
    sent = Sender(trainer, runtime_dir=str(tmp_path)).send(weights(3))
    assert (sent.version, engine.served()) == (1, [3, 3])
    assert all(one == ("init_weight_transfer_engine", {"init_info": {}}) for one in called)
    for core in engine.cores:
        core.num_begun = 1
    with pytest.raises(WeightsError, match="are missing"):
        Sender(trainer, runtime_dir=str(tmp_path)).send({"model.norm.weight": torch.ones(())})
    assert [core.num_begun for core in engine.cores] == [0, 0], "an error ends the update"
    assert engine.served() == [3, 3]
    with pytest.raises(WeightsError, match="takes a plan or a manifest"):
        trainer.call("update_weights", update_info={"names": []})
    trainer.call("finish_weight_update")
    assert called[-1] == ("finish_weight_update", {})
