"""Takes probes and vectors that are small; gives them over in one question, checked as ever."""

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

from clairai import wire_weights
from clairai.errors import ClairaiError, ProbeError, UnsupportedError, WeightsError
from clairai.steer.desk import Desk
from clairai.steer.registry import Limits, Registry
from clairai.steer.vector import Vector
from clairai.tap.station import Station
from clairai.weights import Sender
from clairai.weights.pack import Packer
from clairai.weights.port import Port
from clairai.weights.sources import items
from clairai.weights.ways import InProcess
from clairai.weights.whole import bank
from clairai.wire import Refusal
from tests.unit import toy_station
from tests.unit.toy_banks import banked, probes, rows
from tests.unit.toy_weights import ToyLlm, engine, plan, spoil_what_is_packed, weights


@pytest.fixture
def station(runtime: Path) -> Iterator[Station]:
    with banked(runtime) as made:
        yield made


@pytest.fixture
def llm(station: Station, tmp_path: Path) -> Iterator[ToyLlm]:
    with engine(tmp_path, station, Desk(None, probes(), bank=lambda: station.columns)) as running:
        yield running


def kinds(llm: ToyLlm) -> list[str]:
    """Of the questions so far."""
    return [type(question).__name__ for question in llm.asked]


@pytest.fixture
def sender(llm: ToyLlm, tmp_path: Path) -> Sender:
    return Sender(llm, runtime_dir=str(tmp_path))


def held(station: Station) -> Any:
    return np.stack([one.direction_D for one in station.columns.probes]).tolist()


def test_a_bank_goes_in_one_question_and_by_no_socket(
    station: Station, llm: ToyLlm, sender: Sender, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Port, "__init__", _forbidden)
    told: list[tuple[int, int]] = []
    for times in (1, 2, 3):
        before = station.columns.version
        llm.messages.clear()
        sent = sender.send(
            bank(station.columns.names, times * rows()), progress=lambda *said: told.append(said)
        )
        assert kinds(llm) == ["DescribeWeights", "CommitWeights"][times > 1 :]
        assert held(station) == (times * rows()).tolist()
        assert (sent.version, sent.bank_version) == (0, before + 1)
        assert (sent.home, sent.why) == ("host", "the engine has no GPU")
        assert (sent.num_tensors, sent.nbytes) == (1, rows().nbytes)
        assert 0 < sent.packed_s < sent.seconds
    assert told == [(2 << 20, 2 << 20)] * 3
    assert llm.intake.lent is None, "who comes by vLLM's own routes has lent nothing"


def _forbidden(*_: object) -> None:
    raise AssertionError("a socket was opened")


def test_the_engine_has_the_digest_of_what_came_whichever_way(
    station: Station, llm: ToyLlm, sender: Sender
) -> None:
    new = {f"probe::{name}": row for name, row in zip("abcd", rows(), strict=True)}
    lent = sender.send(new)
    assert "PlanWeights" not in kinds(llm)
    sender._may_lend = False
    brought = sender.send(new)
    assert "PlanWeights" in kinds(llm)
    assert lent.digest == brought.digest
    assert lent.num_tensors == brought.num_tensors == 4
    by_name = {one.name: one.direction_D.tolist() for one in station.columns.probes}
    assert by_name == dict(zip("abcd", rows().tolist(), strict=True))


def test_a_vector_goes_so_too(tmp_path: Path) -> None:
    registry = Registry(toy_station.POINTS, toy_station.WIDTH, Limits(rows=8, programs=8))
    registry.put([Vector("v", {toy_station.SECOND: np.ones(3, np.float32)})], "add")
    with engine(tmp_path, None, Desk(registry, ())) as llm:
        new_LD = np.array([[1, 2, 3]], np.float32)
        sent = Sender(llm, runtime_dir=str(tmp_path)).send({"steer::v": new_LD})
        assert sent.vectors_version == registry.version
        assert registry.vector("v").rows[toy_station.SECOND].tolist() == [1, 2, 3]


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
def test_what_is_refused_leaves_the_bank_and_the_next_is_taken(
    station: Station,
    llm: ToyLlm,
    sender: Sender,
    change: Callable[[Any], Any],
    kind: type[ClairaiError],
    reason: str,
) -> None:
    names, before = station.columns.names, toy_station.state_of(station)
    with pytest.raises(kind, match=reason):
        sender.send(bank(names, change(rows())))
    assert toy_station.state_of(station) == before
    with pytest.raises(WeightsError, match="nothing named"):
        sender.send(bank(names[::-1], rows()))
    assert toy_station.state_of(station) == before
    sender.send(bank(names, rows()))
    assert held(station) == rows().tolist()
    assert "PlanWeights" not in kinds(llm)


def test_what_changes_between_packing_and_reading_is_refused(
    station: Station, sender: Sender, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = toy_station.state_of(station)
    spoil_what_is_packed(monkeypatch)
    with pytest.raises(WeightsError, match="another checksum"):
        sender.send(bank(station.columns.names, rows()))
    assert toy_station.state_of(station) == before


def test_what_a_sender_writes_later_changes_nothing(station: Station, sender: Sender) -> None:
    sender.send(bank(station.columns.names, rows()))
    assert sender._shelf is not None
    sender._shelf.room(1 << 20)[:] = 0xA5
    assert held(station) == rows().tolist()


def test_a_hand_over_that_is_under_way_stays(station: Station, llm: ToyLlm, sender: Sender) -> None:
    manifest = plan(epoch=llm.epoch)
    packed = Packer(items(weights(1), ExitStack()), manifest).pack(0)
    llm.planned(manifest)
    offer = wire_weights.Offer(manifest.transfer, 0, manifest.buffers[0], packed.home)
    llm.intake.receiver._dock.land(offer, (os.dup(packed.fds[0]),))
    sender.send(bank(station.columns.names, rows()))
    assert held(station) == rows().tolist()
    committed = llm.committed(msgspec.structs.replace(manifest, tensors=packed.tensors))
    assert committed.version == 1
    assert torch.equal(llm.model["model.norm.weight"], weights(1)["model.norm.weight"])
    packed.close()


def test_an_engine_that_cannot_read_it_gets_it_by_the_socket_from_then_on(
    station: Station, llm: ToyLlm, sender: Sender, monkeypatch: pytest.MonkeyPatch
) -> None:
    def unreachable(_: object) -> int:
        raise UnsupportedError("planted")

    monkeypatch.setattr("clairai.weights.dock.open_lent", unreachable)
    for times in (1, 2):
        sender.send(bank(station.columns.names, times * rows()))
        assert held(station) == (times * rows()).tolist()
    brought = ["PlanWeights", "CommitWeights"]
    once = ["DescribeWeights", "CommitWeights", "DescribeWeights"]
    assert kinds(llm) == [*once, *brought, *brought]


def test_memory_of_a_question_that_was_not_answered_is_not_filled_again(
    station: Station, llm: ToyLlm, sender: Sender, monkeypatch: pytest.MonkeyPatch
) -> None:
    names, late = station.columns.names, []

    def unanswered(_: InProcess, manifest: bytes, lent: wire_weights.Lent) -> Any:
        late.append(wire_weights.CommitWeights(manifest, lent))
        raise TimeoutError

    with monkeypatch.context() as patched:
        patched.setattr(InProcess, "commit_lent", unanswered)
        with pytest.raises(TimeoutError):
            sender.send(bank(names, rows()))
    sender.send(bank(names, 2 * rows()))
    refused = llm.ask(late[0])  # the engine comes to it now
    assert isinstance(refused, Refusal)
    assert refused.code == "unsupported"
    assert held(station) == (2 * rows()).tolist()


def test_an_engine_that_was_started_anew_is_found(
    station: Station, llm: ToyLlm, sender: Sender, tmp_path: Path
) -> None:
    sender.send(bank(station.columns.names, rows()))
    llm.intake.close()
    with engine(tmp_path, station) as second:
        sender._way = InProcess(second)
        sender.send(bank(station.columns.names, 2 * rows()))
        assert held(station) == (2 * rows()).tolist()


def test_two_at_once_by_one_sender_are_both_taken_whole(station: Station, sender: Sender) -> None:
    names, failed = station.columns.names, list[BaseException]()

    def send_many(scale: int) -> None:
        try:
            for _ in range(20):
                sender.send(bank(names, scale * rows()))
        except BaseException as error:  # an assertion of another thread is seen by nobody
            failed.append(error)

    before = station.columns.version
    threads = [threading.Thread(target=send_many, args=(scale,)) for scale in (1, 2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failed == []
    assert station.columns.version == before + 40
    assert held(station) in [(scale * rows()).tolist() for scale in (1, 2)]
