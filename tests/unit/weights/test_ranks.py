"""All ranks of an engine load a transfer, or none does."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch

from clairai.errors import EngineGoneError, WeightsError, WeightsRoomError, WeightsTornError
from clairai.weights import Sender
from clairai.weights.manifest import Manifest, for_rank
from clairai.weights.room import LoadNeeds
from clairai.wire import ring_messages, weights_messages
from tests.support import toy_publisher
from tests.support.probes import probe
from tests.support.weights import ToyLlm, ToyRanks, plan, weights

TIGHT = LoadNeeds(host_nbytes=1 << 60)


@pytest.fixture
def llm(tmp_path: Path) -> Iterator[ToyRanks]:
    with closing(ToyRanks(tmp_path, 3)) as made:
        yield made


@pytest.fixture
def sender(llm: ToyRanks, tmp_path: Path) -> Sender:
    return Sender(llm, runtime_dir=str(tmp_path))


def served(llm: ToyRanks) -> list[int | None]:
    """The seed of the weights that each rank has; None: of none that was sent."""
    return [_seed_of(rank) for rank in llm.ranks]


def _seed_of(rank: ToyLlm) -> int | None:
    for seed in range(5):
        if all(torch.equal(rank.model[name], given) for name, given in weights(seed).items()):
            return seed
    return None


def test_every_rank_has_a_socket_of_its_own_and_all_have_one_epoch(llm: ToyRanks) -> None:
    states = [rank.updater.state() for rank in llm.ranks]
    assert len({state.epoch for state in states}) == 1
    assert len({state.socket for state in states}) == 3
    assert all(Path(state.socket).is_socket() for state in states)


def test_all_ranks_load_what_is_sent_once(llm: ToyRanks, sender: Sender) -> None:
    assert sender.send(weights(1)).version == 1
    assert served(llm) == [1, 1, 1]
    assert sender.send(iter(weights(2).items())).version == 2
    assert served(llm) == [2, 2, 2]


def test_tensors_of_an_iterator_may_share_their_memory(llm: ToyRanks, tmp_path: Path) -> None:
    """As an FSDP trainer may gather them; buffers of one tensor, of some, of all."""

    def gather(seed: int) -> Iterator[tuple[str, torch.Tensor]]:
        memory_N = torch.empty(50 * 16)
        for name, tensor in weights(seed).items():
            gathered = memory_N[: tensor.numel()].view(tensor.shape)
            gathered.copy_(tensor)
            yield name, gathered
        memory_N.fill_(float("nan"))

    for seed, buffer_bytes in ((1, 1), (2, 2000), (3, 1 << 20)):
        sender = Sender(llm, runtime_dir=str(tmp_path), buffer_bytes=buffer_bytes)
        assert sender.send(gather(seed)).num_tensors == len(weights(0))
        assert served(llm) == [seed] * 3
    with pytest.raises(WeightsError, match="the iterator has no tensor"):
        sender.send(iter(()))


@pytest.mark.parametrize("rank", [0, 1, 2])
def test_a_rank_without_room_keeps_all_at_the_old_weights(
    llm: ToyRanks, sender: Sender, rank: int
) -> None:
    sender.send(weights(1))
    llm.ranks[rank].needs = TIGHT
    with pytest.raises(
        WeightsRoomError, match=f"rank {rank}: new weights" if rank else "^new weights"
    ):
        sender.send(weights(2))
    assert served(llm) == [1, 1, 1]
    llm.ranks[rank].needs = LoadNeeds()
    assert sender.send(weights(2)).version == 2


def test_a_rank_that_refuses_when_all_has_come_keeps_all_at_the_old_weights(
    llm: ToyRanks, sender: Sender, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Memory was there for the plan, and is taken when the ranks are prepared."""
    prepare = llm.ranks[2].updater.prepare

    def without_room(raw: bytes) -> str:
        llm.ranks[2].needs = TIGHT
        return prepare(raw)

    monkeypatch.setattr(llm.ranks[2].updater, "prepare", without_room)
    with pytest.raises(WeightsRoomError, match="rank 2: "):
        sender.send(weights(1))
    assert served(llm) == [0, 0, 0]
    monkeypatch.undo()
    llm.ranks[2].needs = LoadNeeds()
    assert sender.send(weights(1)).version == 1


@pytest.mark.parametrize("rank", [0, 1, 2])
def test_a_rank_that_stops_half_way_leaves_an_engine_that_only_a_whole_set_repairs(
    llm: ToyRanks, sender: Sender, rank: int
) -> None:
    llm.ranks[rank].fail_after = 2
    with pytest.raises(WeightsTornError, match="2 of 3 ranks have the new weights"):
        sender.send(weights(1))
    assert [one.updater.is_torn for one in llm.ranks] == [True] * 3
    llm.ranks[rank].fail_after = None
    assert sender.send(weights(2)).version > 1
    assert served(llm) == [2, 2, 2]
    assert [one.updater.is_torn for one in llm.ranks] == [False] * 3


def test_all_ranks_count_on_from_one_version_however_often_loads_failed(
    llm: ToyRanks, sender: Sender
) -> None:
    for rank in (1, 1, 2):
        llm.ranks[rank].fail_after = 2
        with pytest.raises(WeightsTornError):
            sender.send(weights(1))
        llm.ranks[rank].fail_after = None
        versions = [one.updater.served.version for one in llm.ranks]
        assert len(set(versions)) == 1, versions
    assert sender.send(weights(2)).version == versions[0] + 1


@pytest.fixture
def pipeline(tmp_path: Path) -> Iterator[ToyRanks]:
    """Three ranks that score, each with a probe `p`."""
    with ExitStack() as opened:
        runtimes = [tmp_path / str(rank) for rank in range(3)]
        publishers = []
        for runtime in runtimes:
            runtime.mkdir(mode=0o700)
            one = opened.enter_context(toy_publisher.running_publisher(runtime, weights=0))
            one.install(one.bank.add([probe("p", point=toy_publisher.SECOND)]))
            publishers.append(one)
        yield opened.enter_context(closing(ToyRanks(tmp_path, 3, publishers=publishers)))


def directions(llm: ToyRanks) -> list[list[float]]:
    return [one.step_publisher.bank.probes[0].direction_D.tolist() for one in llm.ranks]


def test_probes_come_to_every_rank_that_scores(pipeline: ToyRanks, tmp_path: Path) -> None:
    sender = Sender(pipeline, runtime_dir=str(tmp_path))
    new_D = np.array([4.0, 5.0, 6.0], np.float32)
    alone = sender.send({"probe::p": new_D})  # in shared memory
    assert directions(pipeline) == [[4.0, 5.0, 6.0]] * 3
    sent = Sender(pipeline, runtime_dir=str(tmp_path), through="host").send(
        iter({"probe::p": 2 * new_D}.items())  # over the sockets
    )
    assert directions(pipeline) == [[8.0, 10.0, 12.0]] * 3
    both = sender.send(weights(1) | {"probe::p": -new_D})
    assert directions(pipeline) == [[-4.0, -5.0, -6.0]] * 3
    assert served(pipeline) == [1, 1, 1]
    assert (alone.version, sent.version, both.version) == (0, 0, 1)
    assert {one.step_publisher.bank.version for one in pipeline.ranks} == {both.bank_version}


@pytest.mark.parametrize("rank", [0, 2])
def test_a_load_that_fails_on_one_rank_changes_the_probes_of_none(
    pipeline: ToyRanks, tmp_path: Path, rank: int
) -> None:
    sender = Sender(pipeline, runtime_dir=str(tmp_path))
    before = directions(pipeline)
    pipeline.ranks[rank].fail_after = 2
    with pytest.raises(WeightsTornError, match="2 of 3 ranks"):
        sender.send(weights(1) | {"probe::p": np.ones(3, np.float32)})
    assert directions(pipeline) == before
    assert len({one.step_publisher.bank.version for one in pipeline.ranks}) == 1
    pipeline.ranks[rank].fail_after = None
    sender.send(weights(2))
    assert served(pipeline) == [2, 2, 2]
    assert len({one.step_publisher.weights for one in pipeline.ranks}) == 1


@pytest.mark.parametrize("rank", [0, 1, 2])
def test_a_refusal_names_its_rank_although_the_last_one_replies_first(
    pipeline: ToyRanks, tmp_path: Path, rank: int
) -> None:
    pipeline.ranks[rank].needs = TIGHT
    with pytest.raises(
        WeightsRoomError, match=f"rank {rank}: new weights" if rank else "^new weights"
    ):
        Sender(pipeline, runtime_dir=str(tmp_path)).send(weights(2))


def test_a_rank_that_raises_is_a_refusal(
    llm: ToyRanks, sender: Sender, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(_: bytes) -> str:
        raise OSError("planted")

    monkeypatch.setattr(llm.ranks[1].updater, "prepare", fail)
    with pytest.raises(WeightsError, match=r"rank 1: .*OSError"):
        sender.send(weights(1))
    assert served(llm) == [0, 0, 0]


def test_a_rank_that_is_gone_is_said(
    llm: ToyRanks, sender: Sender, monkeypatch: pytest.MonkeyPatch
) -> None:
    answer = llm.ranks[1].answer

    def die(message: bytes) -> bytes:
        if b"apply_weights" in message:
            llm.close()  # vLLM ends all ranks when one has ended
            raise RuntimeError("cancelled")
        return answer(message)

    monkeypatch.setattr(llm.ranks[1], "answer", die)
    with pytest.raises(EngineGoneError, match="a rank has ended"):
        sender.send(weights(1))


def test_a_plan_that_one_rank_refuses_replaces_no_plan_of_another_sender(llm: ToyRanks) -> None:
    first, second = plan(epoch=llm.epoch), plan(epoch=llm.epoch)
    assert isinstance(llm.planned(first), weights_messages.WeightsPlanned)
    llm.ranks[2].needs = TIGHT
    assert isinstance(llm.planned(second), ring_messages.Refusal)
    for rank in llm.ranks:
        assert rank.updater.receiver._tracker.peek(first.transfer).plan.transfer == first.transfer


def test_the_questions_of_the_core_are_not_for_others(llm: ToyRanks) -> None:
    for message in (
        weights_messages.ApplyWeights("0" * 32),
        weights_messages.AbandonWeights("0" * 32),
        weights_messages.InstallBanks("0" * 32),
        weights_messages.TearWeights(1, 1),
    ):
        answer = llm.ask(message)
        assert isinstance(answer, ring_messages.Refusal)
        assert answer.code == "unsupported"
    assert not any(rank.updater.is_torn for rank in llm.ranks)


def on_gpus(*devices: str) -> Manifest:
    return msgspec.structs.replace(plan(), device=devices)


def test_a_rank_sees_its_own_gpu_in_a_manifest() -> None:
    gpus = ("a" * 32, "b" * 32)
    assert [for_rank(on_gpus(*gpus), rank, 2).device for rank in range(2)] == [*gpus]
    assert for_rank(plan(), 1, 2).device == "cpu"
    with pytest.raises(WeightsError, match="buffers for 2 ranks, and the engine has 3"):
        for_rank(on_gpus(*gpus), 0, 3)


GROUPS = (frozenset({"model.layers.0.w", "model.layers.0.b"}), frozenset({"model.embed.weight"}))


def part(seed: int, *names: str) -> dict[str, Any]:
    return {name: weights(seed)[name] for name in names}


def test_whole_layers_can_come_alone_and_half_ones_cannot(tmp_path: Path) -> None:
    llm = ToyLlm(tmp_path, find_groups=lambda: GROUPS)
    sender = Sender(llm, runtime_dir=str(tmp_path))
    with closing(llm.updater):
        first = sender.send(part(1, "model.layers.0.w", "model.layers.0.b"))
        assert torch.equal(llm.model["model.layers.0.w"], weights(1)["model.layers.0.w"])
        assert torch.equal(llm.model["model.embed.weight"], weights(0)["model.embed.weight"])
        with pytest.raises(WeightsError, match=r"model.layers.0.b.* is missing: .* all 2 tensors"):
            sender.send(part(2, "model.layers.0.w", "model.embed.weight"))
        second = sender.send(part(1, "model.embed.weight", "model.norm.weight"))
        assert _seed_of(llm) == 1
        assert sender.send(weights(1)).digest == second.digest != first.digest
