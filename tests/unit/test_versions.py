"""Which weights a row, a record and a request are of, as the worker's side counts them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import msgspec
import pytest
import torch

from clairai import wire
from clairai.compat import changes
from clairai.ring.attach import Reader
from clairai.tap.station import Station
from clairai.weights import Sender
from clairai.wire_weights import DescribeWeights, FindVersions, Versions
from tests.unit.tiny_probes import probe
from tests.unit.toy_station import SECOND, WIDTH, forward, new_request, running_station
from tests.unit.toy_weights import ToyLlm, engine, weights


@pytest.fixture
def station(runtime: Path) -> Iterator[Station]:
    with running_station(runtime, weights=0) as made:
        made.install(made.columns.add([probe("p", point=SECOND)]))
        yield made


@pytest.fixture
def llm(station: Station, tmp_path: Path) -> Iterator[ToyLlm]:
    """vLLM's worker, as far as its weights go: every way they change is watched."""
    with engine(tmp_path, station) as running:
        running.weight_transfer_engine = SimpleNamespace(intake=running.intake)  # type: ignore[attr-defined]
        running.reload_weights = lambda: None  # type: ignore[attr-defined]
        running.reload_weights.__name__ = "reload_weights"  # type: ignore[attr-defined]
        changes.watch(running, station)
        yield running


def sender(tmp_path: Path, llm: ToyLlm) -> Sender:
    return Sender(llm, runtime_dir=str(tmp_path))


def told(station: Station) -> list[int | None]:
    """What the records of the ring say of their weights, in order."""
    with Reader.attach(station.server.path, start="oldest") as reader:
        return [reader.bank(record.bank_version).weights for record in reader.poll()]


def step(station: Station, number: int) -> None:
    station.begin([new_request(number)], ())
    forward(station, number, start=0, count=2)


def test_records_say_which_weights_their_rows_are_of(
    station: Station, llm: ToyLlm, tmp_path: Path
) -> None:
    step(station, 1)
    sender(tmp_path, llm).send(weights(1))
    step(station, 2)
    sender(tmp_path, llm).send(weights(0))
    step(station, 3)
    assert told(station) == [0, 1, 2]


def test_a_probe_alone_is_no_new_version_of_the_weights(
    station: Station, llm: ToyLlm, tmp_path: Path
) -> None:
    sent = sender(tmp_path, llm).send({"probe::p": torch.ones(WIDTH)})
    step(station, 1)
    assert (sent.version, told(station)) == (0, [0])


def test_probes_that_come_with_weights_are_in_the_bank_that_says_so(
    station: Station, llm: ToyLlm, tmp_path: Path
) -> None:
    sent = sender(tmp_path, llm).send(weights(1) | {"probe::p": torch.ones(WIDTH)})
    bank = station.bank(station.columns.version)
    assert bank is not None
    assert (sent.bank_version, sent.version) == (bank.version, bank.weights)
    assert station.columns.probes[0].direction_D.tolist() == [1.0] * WIDTH


def test_a_request_is_of_the_weights_it_began_with(
    station: Station, llm: ToyLlm, tmp_path: Path
) -> None:
    step(station, 1)
    sender(tmp_path, llm).send(weights(1))
    step(station, 2)
    streams = (1001, 1002, 1003)
    assert llm.ask(FindVersions(streams)) == Versions((0, 1, None))


def test_weights_that_vllm_itself_has_changed_are_another_version(
    station: Station, llm: ToyLlm, tmp_path: Path
) -> None:
    sender(tmp_path, llm).send(weights(1), label="step-1")
    llm.reload_weights()  # type: ignore[attr-defined]
    step(station, 1)
    state = llm.ask(DescribeWeights())
    assert (state.version, state.label, state.digest) == (2, "", "")
    assert told(station) == [2]


def test_weights_in_pieces_are_a_version_of_their_own(
    station: Station, llm: ToyLlm, tmp_path: Path
) -> None:
    llm.fail_after = 2
    with pytest.raises(Exception, match="half-way"):
        sender(tmp_path, llm).send(weights(1))
    assert (llm.intake.served.version, station.weights, llm.intake.is_torn) == (1, 1, True)
    with pytest.raises(Exception, match="in pieces"):
        sender(tmp_path, llm).send({"probe::p": torch.ones(WIDTH)})
    assert station.weights == 1, "what was refused has changed nothing"
    llm.fail_after = None
    assert sender(tmp_path, llm).send(weights(1)).version == 2


def test_an_engine_that_takes_no_weights_says_nothing_of_them(runtime: Path) -> None:
    with running_station(runtime) as station:
        step(station, 1)
        assert told(station) == [None]
        assert station.began_with(1001) is None
        bank = msgspec.msgpack.decode(msgspec.msgpack.encode(station.columns.bank()))
        assert bank == {"type": "bank", "version": 0, "probes": []}, "as it was before"


def test_without_our_backend_changes_are_counted_all_the_same(runtime: Path) -> None:
    def update_weights() -> None:
        """Of another backend."""

    with running_station(runtime) as station:
        worker = SimpleNamespace(update_weights=update_weights)
        changes.watch(worker, station)
        worker.update_weights()
        step(station, 1)
        assert told(station) == [1]


def test_others_are_told_of_new_weights_before_the_next_step(station: Station) -> None:
    heard: list[int] = []
    station.followers.append(heard.append)
    station.reweigh(5)
    assert heard == [5]
    version, probes = station.columns.version, station.columns.bank().probes
    assert station.bank(version) == wire.Bank(version, probes, 5)
