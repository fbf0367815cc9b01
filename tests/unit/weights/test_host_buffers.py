"""Small transfers go through memory that is used again, and are copied safely."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from clairai.engine.core_control import CoreControl
from clairai.engine.steer.steering_registry import SteeringLimits, SteeringRegistry
from clairai.errors import WeightsError
from clairai.library.probe_bank import ProbeBank
from clairai.local.shared_buffer import BufferCopier, SharedBuffer
from clairai.weights import Sender
from clairai.weights.checksum import checksum
from clairai.weights.engine_client import LlmEngine
from clairai.weights.host_buffers import MAX_COPIED_BYTES, CopiedBuffer
from clairai.weights.manifest import PlannedTensor, bank
from clairai.weights.socket_client import BufferClient
from clairai.wire.weights_messages import BufferOffer, WeightsState
from tests.support import toy_publisher
from tests.support.probes import probe
from tests.support.weights import ToyLlm, damage_packed_buffers, engine, weights


def is_serving(llm: ToyLlm, seed: int) -> bool:
    return all(torch.equal(llm.model[name], each) for name, each in weights(seed).items())


def offers(monkeypatch: pytest.MonkeyPatch) -> list[tuple[BufferOffer, int]]:
    """The offers that are made, and the memory of each."""
    seen: list[tuple[BufferOffer, int]] = []
    original = BufferClient.begin_offer

    def offer(self: BufferClient, made: BufferOffer, fds: tuple[int, ...]) -> None:
        seen.append((made, os.fstat(fds[0]).st_ino))
        original(self, made, fds)

    monkeypatch.setattr(BufferClient, "begin_offer", offer)
    return seen


def test_a_sender_fills_the_same_memory_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = offers(monkeypatch)
    with engine(tmp_path) as llm:
        sender = Sender(llm, runtime_dir=str(tmp_path))
        for seed in (1, 2, 3):
            sender.send(weights(seed))
            assert is_serving(llm, seed)
    assert [made.home for made, _ in seen] == ["copied"] * 3
    assert len({inode for _, inode in seen}) == 1


def test_a_large_buffer_is_mapped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen = offers(monkeypatch)
    monkeypatch.setattr("clairai.weights.sender.MAX_COPIED_BYTES", 1 << 20)
    with engine(tmp_path) as llm:
        Sender(llm, runtime_dir=str(tmp_path)).send(weights(1))
        assert is_serving(llm, 1)
    assert [made.home for made, _ in seen] == ["host"]


def test_what_a_sender_writes_after_it_was_read_changes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    commit, sender = LlmEngine.commit, None

    def overwritten(self: LlmEngine, manifest: bytes) -> Any:
        assert sender is not None
        sender._shared._buffer.view(1 << 20)[:] = 0xA5
        return commit(self, manifest)

    monkeypatch.setattr(LlmEngine, "commit", overwritten)
    with engine(tmp_path) as llm:
        sender = Sender(llm, runtime_dir=str(tmp_path))
        sender.send(weights(1))
        assert is_serving(llm, 1)


def test_what_changes_between_packing_and_reading_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    damage_packed_buffers(monkeypatch)
    with engine(tmp_path) as llm:
        with pytest.raises(WeightsError, match="another checksum"):
            Sender(llm, runtime_dir=str(tmp_path)).send(weights(1))
        assert is_serving(llm, 0)


def test_a_sender_that_knows_the_engine_does_not_ask_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked, state = [], LlmEngine.state

    def counted(self: LlmEngine) -> WeightsState:
        asked.append(1)
        return state(self)

    monkeypatch.setattr(LlmEngine, "state", counted)
    with engine(tmp_path) as llm:
        sender = Sender(llm, runtime_dir=str(tmp_path))
        sender.send(weights(1))
        sender.send(weights(2))
        assert len(asked) == 1
        with pytest.raises(WeightsError):
            sender.send({"no such": torch.zeros(1)})
        sender.send(weights(3))
        assert len(asked) == 2, "asked again after a refusal"


def test_a_restarted_engine_is_found(tmp_path: Path) -> None:
    with engine(tmp_path) as first:
        sender = Sender(first, runtime_dir=str(tmp_path))
        sender.send(weights(1))
    with engine(tmp_path) as second:
        sender._engine = LlmEngine(second)
        sender.send(weights(2))
        assert is_serving(second, 2)


def test_a_shared_buffer_grows_and_a_wrong_size_is_refused() -> None:
    buffer, copier = SharedBuffer(), BufferCopier()
    buffer.view(10)[:] = 1
    room_N = buffer.view(5000)
    assert room_N[:10].tolist() == [1] * 10
    ten = [PlannedTensor("t", "U8", (10,), 0, 0, 10)]
    with pytest.raises(WeightsError, match="has 5000 bytes, 5001 were announced"):
        CopiedBuffer(copier, os.dup(buffer.fds[0]), 5001, ten)
    copied = CopiedBuffer(copier, os.dup(buffer.fds[0]), 5000, ten)
    room_N[:10] = 2
    assert copied.bytes_N.tolist() == [1] * 10
    assert copied.checksums(ten) == [checksum(bytes([1] * 10))]
    with pytest.raises(WeightsError, match="not a memfd"):
        CopiedBuffer(copier, os.open("/dev/zero", os.O_RDONLY), 10, ten)
    assert MAX_COPIED_BYTES >= 512 * 8192 * 4, "a bank of 512 of a wide model fits"


def test_a_core_beside_its_worker_sees_the_bank_and_is_sent_no_rows(tmp_path: Path) -> None:
    with toy_publisher.running_publisher(tmp_path) as step_publisher:
        first = probe("p", point=toy_publisher.SECOND)
        step_publisher.install(step_publisher.bank.add([first]))
        registry = SteeringRegistry(
            toy_publisher.POINTS, toy_publisher.WIDTH, SteeringLimits(rows=8, programs=8)
        )
        core_control = CoreControl(registry, (first,), bank=lambda: step_publisher.bank)
        with engine(tmp_path, step_publisher, core_control) as llm:
            rows_PD = np.array([[7, 8, 9]], np.float32)
            Sender(llm, runtime_dir=str(tmp_path)).send(bank(("p",), rows_PD))
            assert step_publisher.bank.directions_PD is not None
            assert core_control._probes["p"] is step_publisher.bank.probes[0]
            assert core_control._probes["p"].direction_D.tolist() == [7.0, 8.0, 9.0]
            ProbeBank(llm).redirect(("p",), 2 * rows_PD)
        assert core_control._probes["p"].direction_D.tolist() == [14.0, 16.0, 18.0]
        assert registry._snapshot.probes == {"p": step_publisher.bank.probes[0]}
        assert step_publisher.bank.probes[0].bias == first.bias
