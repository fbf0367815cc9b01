"""Small probes and vectors go in one question, and are checked like any transfer."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch

from clairai.engine.core_control import CoreControl
from clairai.engine.publish.step_publisher import StepPublisher
from clairai.engine.steer.steering_registry import SteeringLimits, SteeringRegistry
from clairai.errors import ClairaiError, ProbeError, UnsupportedError, WeightsError
from clairai.vector.model import Vector
from clairai.weights import Sender
from clairai.weights.engine_client import LlmEngine
from clairai.weights.manifest import bank
from clairai.weights.pack import HostPacker, open_sources
from clairai.weights.socket_client import BufferClient
from clairai.wire import weights_messages
from clairai.wire.ring_messages import Refusal
from tests.support import toy_publisher
from tests.support.probe_banks import banked, probes, rows
from tests.support.weights import ToyLlm, damage_packed_buffers, engine, plan, weights


@pytest.fixture
def step_publisher(runtime: Path) -> Iterator[StepPublisher]:
    with banked(runtime) as made:
        yield made


@pytest.fixture
def llm(step_publisher: StepPublisher, tmp_path: Path) -> Iterator[ToyLlm]:
    with engine(
        tmp_path, step_publisher, CoreControl(None, probes(), bank=lambda: step_publisher.bank)
    ) as running:
        yield running


def kinds(llm: ToyLlm) -> list[str]:
    """The types of the questions so far."""
    return [type(question).__name__ for question in llm.asked]


@pytest.fixture
def sender(llm: ToyLlm, tmp_path: Path) -> Sender:
    return Sender(llm, runtime_dir=str(tmp_path))


def held(step_publisher: StepPublisher) -> Any:
    return np.stack([one.direction_D for one in step_publisher.bank.probes]).tolist()


def test_a_bank_goes_in_one_question_without_the_socket(
    step_publisher: StepPublisher, llm: ToyLlm, sender: Sender, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(BufferClient, "__init__", _forbidden)
    told: list[tuple[int, int]] = []
    for times in (1, 2, 3):
        before = step_publisher.bank.version
        llm.messages.clear()
        sent = sender.send(
            bank(step_publisher.bank.names, times * rows()),
            progress=lambda *said: told.append(said),
        )
        assert kinds(llm) == ["DescribeWeights", "CommitWeights"][times > 1 :]
        assert held(step_publisher) == (times * rows()).tolist()
        assert (sent.version, sent.bank_version) == (0, before + 1)
        assert (sent.home, sent.why) == ("host", "the engine has no GPU")
        assert (sent.num_tensors, sent.nbytes) == (1, rows().nbytes)
        assert 0 < sent.packed_s < sent.seconds
    assert told == [(2 << 20, 2 << 20)] * 3
    assert llm.updater.banks.shared is None, "vLLM's own routes share nothing"


def _forbidden(*_: object) -> None:
    raise AssertionError("a socket was opened")


def test_the_digest_is_the_same_through_shared_memory_and_the_socket(
    step_publisher: StepPublisher, llm: ToyLlm, sender: Sender
) -> None:
    new = {f"probe::{name}": row for name, row in zip("abcd", rows(), strict=True)}
    lent = sender.send(new)
    assert "PlanWeights" not in kinds(llm)
    sender._shared.is_readable = False
    brought = sender.send(new)
    assert "PlanWeights" in kinds(llm)
    assert lent.digest == brought.digest
    assert lent.num_tensors == brought.num_tensors == 4
    by_name = {one.name: one.direction_D.tolist() for one in step_publisher.bank.probes}
    assert by_name == dict(zip("abcd", rows().tolist(), strict=True))


def test_a_vector_goes_in_one_question_too(tmp_path: Path) -> None:
    registry = SteeringRegistry(
        toy_publisher.POINTS, toy_publisher.WIDTH, SteeringLimits(rows=8, programs=8)
    )
    registry.put([Vector("v", {toy_publisher.SECOND: np.ones(3, np.float32)})], "add")
    with engine(tmp_path, None, CoreControl(registry, ())) as llm:
        new_LD = np.array([[1, 2, 3]], np.float32)
        sent = Sender(llm, runtime_dir=str(tmp_path)).send({"steer::v": new_LD})
        assert sent.vectors_version == registry.version
        assert registry.vector("v").rows[toy_publisher.SECOND].tolist() == [1, 2, 3]


@pytest.mark.parametrize(
    ("change", "kind", "reason"),
    [
        (lambda rows_PD: rows_PD * np.nan, ProbeError, "NaN"),
        (lambda rows_PD: rows_PD * 0, ProbeError, "all zeros"),
        (lambda rows_PD: rows_PD[:, :-1], WeightsError, "has shape"),
        (lambda rows_PD: rows_PD.astype(np.float64), WeightsError, "dtype"),
    ],
    ids=["nan", "zeros", "width", "dtype"],
)
def test_a_refused_bank_changes_nothing_and_the_next_one_is_accepted(
    step_publisher: StepPublisher,
    llm: ToyLlm,
    sender: Sender,
    change: Callable[[Any], Any],
    kind: type[ClairaiError],
    reason: str,
) -> None:
    names, before = step_publisher.bank.names, toy_publisher.state_of(step_publisher)
    with pytest.raises(kind, match=reason):
        sender.send(bank(names, change(rows())))
    assert toy_publisher.state_of(step_publisher) == before
    with pytest.raises(WeightsError, match="nothing named"):
        sender.send(bank(names[::-1], rows()))
    assert toy_publisher.state_of(step_publisher) == before
    sender.send(bank(names, rows()))
    assert held(step_publisher) == rows().tolist()
    assert "PlanWeights" not in kinds(llm)


def test_what_changes_between_packing_and_reading_is_refused(
    step_publisher: StepPublisher, sender: Sender, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = toy_publisher.state_of(step_publisher)
    damage_packed_buffers(monkeypatch)
    with pytest.raises(WeightsError, match="another checksum"):
        sender.send(bank(step_publisher.bank.names, rows()))
    assert toy_publisher.state_of(step_publisher) == before


def test_what_a_sender_writes_later_changes_nothing(
    step_publisher: StepPublisher, sender: Sender
) -> None:
    sender.send(bank(step_publisher.bank.names, rows()))
    sender._shared._buffer.view(1 << 20)[:] = 0xA5
    assert held(step_publisher) == rows().tolist()


def test_a_transfer_under_way_is_left_alone(
    step_publisher: StepPublisher, llm: ToyLlm, sender: Sender
) -> None:
    manifest = plan(epoch=llm.epoch)
    packed = HostPacker(open_sources(weights(1), ExitStack()), manifest).pack(0)
    llm.planned(manifest)
    offer = weights_messages.BufferOffer(manifest.transfer, 0, manifest.buffers[0], packed.home)
    llm.updater.receiver._tracker.accept_offer(offer, (os.dup(packed.fds[0]),))
    sender.send(bank(step_publisher.bank.names, rows()))
    assert held(step_publisher) == rows().tolist()
    committed = llm.committed(msgspec.structs.replace(manifest, tensors=packed.tensors))
    assert committed.version == 1
    assert torch.equal(llm.model["model.norm.weight"], weights(1)["model.norm.weight"])
    packed.close()


def test_an_engine_that_cannot_read_shared_memory_gets_the_socket_from_then_on(
    step_publisher: StepPublisher, llm: ToyLlm, sender: Sender, monkeypatch: pytest.MonkeyPatch
) -> None:
    def unreachable(_: object) -> int:
        raise UnsupportedError("planted")

    monkeypatch.setattr("clairai.weights.pending_transfer.open_shared", unreachable)
    for times in (1, 2):
        sender.send(bank(step_publisher.bank.names, times * rows()))
        assert held(step_publisher) == (times * rows()).tolist()
    brought = ["PlanWeights", "CommitWeights"]
    once = ["DescribeWeights", "CommitWeights", "DescribeWeights"]
    assert kinds(llm) == [*once, *brought, *brought]


def test_memory_of_an_unanswered_question_is_not_filled_again(
    step_publisher: StepPublisher, llm: ToyLlm, sender: Sender, monkeypatch: pytest.MonkeyPatch
) -> None:
    names, late = step_publisher.bank.names, []

    def unanswered(_: LlmEngine, manifest: bytes, lent: weights_messages.SharedBytes) -> Any:
        late.append(weights_messages.CommitWeights(manifest, lent))
        raise TimeoutError

    with monkeypatch.context() as patched:
        patched.setattr(LlmEngine, "commit_shared", unanswered)
        with pytest.raises(TimeoutError):
            sender.send(bank(names, rows()))
    sender.send(bank(names, 2 * rows()))
    refused = llm.ask(late[0])  # the engine handles it only now
    assert isinstance(refused, Refusal)
    assert refused.code == "unsupported"
    assert held(step_publisher) == (2 * rows()).tolist()


def test_a_restarted_engine_is_found(
    step_publisher: StepPublisher, llm: ToyLlm, sender: Sender, tmp_path: Path
) -> None:
    sender.send(bank(step_publisher.bank.names, rows()))
    llm.updater.close()
    with engine(tmp_path, step_publisher) as second:
        sender._engine = LlmEngine(second)
        sender.send(bank(step_publisher.bank.names, 2 * rows()))
        assert held(step_publisher) == (2 * rows()).tolist()


def test_two_concurrent_sends_of_one_sender_both_arrive_whole(
    step_publisher: StepPublisher, sender: Sender
) -> None:
    names, failed = step_publisher.bank.names, list[BaseException]()

    def send_many(scale: int) -> None:
        try:
            for _ in range(20):
                sender.send(bank(names, scale * rows()))
        except BaseException as error:  # pytest does not see the assertions of other threads
            failed.append(error)

    before = step_publisher.bank.version
    threads = [threading.Thread(target=send_many, args=(scale,)) for scale in (1, 2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failed == []
    assert step_publisher.bank.version == before + 40
    assert held(step_publisher) in [(scale * rows()).tolist() for scale in (1, 2)]
