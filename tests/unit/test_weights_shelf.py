"""Takes hand-overs that are small; gives them over in memory that is used again, and stays safe."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from clairai.borrow import Borrower
from clairai.errors import WeightsError
from clairai.lent import Shelf
from clairai.offline import ProbeBank
from clairai.probe.turned import Turned
from clairai.steer.desk import Desk
from clairai.steer.registry import Limits, Registry
from clairai.weights import Sender
from clairai.weights.checksum import checksum
from clairai.weights.manifest import Tensor
from clairai.weights.port import Port
from clairai.weights.shelf import COPIED_BYTES, Copied
from clairai.weights.ways import InProcess
from clairai.weights.whole import bank
from clairai.wire_weights import Offer, WeightsState
from tests.unit import toy_station
from tests.unit.tiny_probes import probe
from tests.unit.toy_weights import ToyLlm, engine, spoil_what_is_packed, weights


def is_serving(llm: ToyLlm, seed: int) -> bool:
    return all(torch.equal(llm.model[name], each) for name, each in weights(seed).items())


def offers(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Offer, int]]:
    """What goes over, and which memory it lies in."""
    seen: list[tuple[Offer, int]] = []
    original = Port.offer

    def offer(self: Port, made: Offer, fds: tuple[int, ...]) -> None:
        seen.append((made, os.fstat(fds[0]).st_ino))
        original(self, made, fds)

    monkeypatch.setattr(Port, "offer", offer)
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


def test_what_is_large_is_mapped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen = offers(monkeypatch)
    monkeypatch.setattr("clairai.weights.sender.COPIED_BYTES", 1 << 20)
    with engine(tmp_path) as llm:
        Sender(llm, runtime_dir=str(tmp_path)).send(weights(1))
        assert is_serving(llm, 1)
    assert [made.home for made, _ in seen] == ["host"]


def test_what_a_sender_writes_after_it_was_read_changes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    commit, sender = InProcess.commit, None

    def overwritten(self: InProcess, manifest: bytes) -> Any:
        assert sender is not None
        assert sender._shelf is not None
        sender._shelf.room(1 << 20)[:] = 0xA5
        return commit(self, manifest)

    monkeypatch.setattr(InProcess, "commit", overwritten)
    with engine(tmp_path) as llm:
        sender = Sender(llm, runtime_dir=str(tmp_path))
        sender.send(weights(1))
        assert is_serving(llm, 1)


def test_what_changes_between_packing_and_reading_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    spoil_what_is_packed(monkeypatch)
    with engine(tmp_path) as llm:
        with pytest.raises(WeightsError, match="another checksum"):
            Sender(llm, runtime_dir=str(tmp_path)).send(weights(1))
        assert is_serving(llm, 0)


def test_a_sender_that_knows_the_engine_does_not_ask_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked, state = [], InProcess.state

    def counted(self: InProcess) -> WeightsState:
        asked.append(1)
        return state(self)

    monkeypatch.setattr(InProcess, "state", counted)
    with engine(tmp_path) as llm:
        sender = Sender(llm, runtime_dir=str(tmp_path))
        sender.send(weights(1))
        sender.send(weights(2))
        assert len(asked) == 1
        with pytest.raises(WeightsError):
            sender.send({"no such": torch.zeros(1)})
        sender.send(weights(3))
        assert len(asked) == 2, "after a refusal it looks again"


def test_an_engine_that_was_started_anew_is_found(tmp_path: Path) -> None:
    with engine(tmp_path) as first:
        sender = Sender(first, runtime_dir=str(tmp_path))
        sender.send(weights(1))
    with engine(tmp_path) as second:
        sender._way = InProcess(second)
        sender.send(weights(2))
        assert is_serving(second, 2)


def test_room_grows_and_what_is_cut_off_meanwhile_is_refused() -> None:
    shelf, borrower = Shelf(), Borrower()
    shelf.room(10)[:] = 1
    room_N = shelf.room(5000)
    assert room_N[:10].tolist() == [1] * 10
    ten = [Tensor("t", "U8", (10,), 0, 0, 10)]
    with pytest.raises(WeightsError, match="has 5000 bytes, 5001 were planned"):
        Copied(borrower, os.dup(shelf.fds[0]), 5001, ten)
    copied = Copied(borrower, os.dup(shelf.fds[0]), 5000, ten)
    room_N[:10] = 2
    assert copied.bytes_N.tolist() == [1] * 10
    assert copied.checksums(ten) == [checksum(bytes([1] * 10))]
    with pytest.raises(WeightsError, match="not a memfd"):
        Copied(borrower, os.open("/dev/zero", os.O_RDONLY), 10, ten)
    assert COPIED_BYTES >= 512 * 8192 * 4, "a bank of 512 of a wide model fits"


def test_a_core_beside_its_worker_sees_the_bank_and_is_sent_no_rows(tmp_path: Path) -> None:
    with toy_station.running_station(tmp_path) as station:
        first = probe("p", point=toy_station.SECOND)
        station.install(station.columns.add([first]))
        registry = Registry(toy_station.POINTS, toy_station.WIDTH, Limits(rows=8, programs=8))
        desk = Desk(registry, (first,), bank=lambda: station.columns)
        with engine(tmp_path, station, desk) as llm:
            rows_PD = np.array([[7, 8, 9]], np.float32)
            Sender(llm, runtime_dir=str(tmp_path)).send(bank(("p",), rows_PD))
            assert isinstance(station.columns.columns, Turned)
            assert desk._probes["p"] is station.columns.probes[0]
            assert desk._probes["p"].direction_D.tolist() == [7.0, 8.0, 9.0]
            ProbeBank(llm).redirect(("p",), 2 * rows_PD)
        assert desk._probes["p"].direction_D.tolist() == [14.0, 16.0, 18.0]
        assert registry._known.probes == {"p": station.columns.probes[0]}
        assert station.columns.probes[0].bias == first.bias
