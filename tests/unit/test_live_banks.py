"""Takes banks of many probes; gives each its new direction, and no other probe's."""

from __future__ import annotations

import pickle
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from clairai import wire
from clairai.errors import ProbeError, WeightsError
from clairai.offline import ProbeBank
from clairai.points import Point
from clairai.probe.columns import Columns
from clairai.probe.model import Probe, redirected
from clairai.steer.desk import Desk
from clairai.tap.station import Station
from clairai.weights import Sender
from clairai.weights.whole import bank, bank_name
from tests.unit.toy_banks import banked, probes, rows
from tests.unit.toy_station import (
    FIRST,
    SECOND,
    WIDTH,
    forward,
    new_request,
)
from tests.unit.toy_weights import ToyLlm, engine

NAMES = ("a", "b", "c", "d")


def columns() -> Columns:
    return Columns.empty((FIRST, SECOND), 2, WIDTH, "org/toy").add(probes())


@pytest.fixture
def station(runtime: Path) -> Iterator[Station]:
    with banked(runtime) as made:
        yield made


@pytest.fixture
def llm(station: Station, tmp_path: Path) -> Iterator[ToyLlm]:
    with engine(tmp_path, station, Desk(None, probes())) as running:
        yield running


def send(llm: ToyLlm, tmp_path: Path, named: Any) -> Any:
    return Sender(llm, runtime_dir=str(tmp_path)).send(named)


def test_a_whole_bank_comes_as_one_tensor_each_row_to_its_own_probe(
    station: Station, llm: ToyLlm, tmp_path: Path
) -> None:
    before = {one.name: one for one in station.columns.probes}
    order = station.columns.names
    assert sorted(order) == list(NAMES)
    new_PD = rows()
    sent = send(llm, tmp_path, bank(order, torch.from_numpy(new_PD)))
    assert (sent.num_tensors, sent.version) == (1, 0)
    assert sent.bank_version == station.columns.version
    for name, row_D in zip(order, new_PD, strict=True):
        (one,) = (held for held in station.columns.probes if held.name == name)
        known = llm.desk._probes[name]
        assert one.direction_D.tolist() == known.direction_D.tolist() == row_D.tolist()
        assert (one.bias, one.point) == (before[name].bias, before[name].point)
        assert one.digest == Probe(name, one.point, row_D, one.bias, "relu").digest == known.digest


@pytest.mark.parametrize("order", [("b", "a", "c", "d"), ("a", "b", "c"), ("a", "b", "c", "e")])
def test_rows_of_a_bank_that_is_another_by_now_come_to_nobody(
    station: Station, llm: ToyLlm, tmp_path: Path, order: tuple[str, ...]
) -> None:
    before = station.columns
    with pytest.raises(WeightsError, match="nothing named"):
        send(llm, tmp_path, bank(order, rows(len(order))))
    assert station.columns is before


def test_a_bank_of_the_same_probes_with_other_directions_has_the_same_name(
    station: Station, llm: ToyLlm, tmp_path: Path
) -> None:
    """A trainer need not look before each step."""
    order = station.columns.names
    for _ in range(2):
        send(llm, tmp_path, bank(order, rows()))
    assert bank_name(order) == bank_name(station.columns.names)


def test_a_whole_bank_and_a_probe_of_it_contradict_each_other(
    station: Station, llm: ToyLlm, tmp_path: Path
) -> None:
    before = station.columns
    both = bank(before.names, rows()) | {"probe::a": np.ones(WIDTH, np.float32)}
    with pytest.raises(WeightsError, match="send it alone"):
        send(llm, tmp_path, both)
    assert station.columns is before


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_one_bad_number_keeps_the_whole_old_bank(
    station: Station, llm: ToyLlm, tmp_path: Path, bad: float
) -> None:
    before, new_PD = station.columns, rows()
    new_PD[2, 1] = bad
    with pytest.raises(ProbeError, match=f"probe {before.names[2]}: direction holds NaN"):
        send(llm, tmp_path, bank(before.names, new_PD))
    assert station.columns is before


@pytest.mark.parametrize(
    ("names", "shape"), [(("a", "a"), (2, 3)), (("a", "b"), (3, 3)), (("a",), ())]
)
def test_a_bank_that_contradicts_itself_is_refused_at_once(
    names: tuple[str, ...], shape: tuple[int, ...]
) -> None:
    with pytest.raises(WeightsError, match="a row for each"):
        bank(names, np.zeros(shape, np.float32))


def test_a_redirected_probe_is_the_one_that_would_have_been_made() -> None:
    old = Probe(
        *("p", Point("post_block", 1), np.ones(4, np.float32), 0.5, "sigmoid", 0.25),
        calibration=(0.0, 1.0),
        model="m",
        description="what it sees",
    )
    assert old.digest  # known before: the new one must not have it
    row_D = np.array([1, 2, 3, 4], np.float32)
    (new,) = redirected([old], row_D[None])
    made = Probe(
        *("p", Point("post_block", 1), row_D, 0.5, "sigmoid", 0.25),
        calibration=(0.0, 1.0),
        model="m",
        description="what it sees",
    )
    assert new == made
    assert new.digest == made.digest != old.digest
    row_D[:] = 0
    assert new.direction_D.tolist() == [1, 2, 3, 4], "a copy"
    assert pickle.loads(pickle.dumps(new)) == new  # noqa: S301
    with pytest.raises(ValueError, match="read-only"):
        new.direction_D[0] = 1


def test_a_direction_of_one_number_is_good_and_one_of_zeros_is_not() -> None:
    old = probes()[:2]
    same_PD = np.full((2, WIDTH), 2.5, np.float32)
    assert [one.direction_D[0] for one in redirected(old, same_PD)] == [2.5, 2.5]
    same_PD[1] = 0
    with pytest.raises(ProbeError, match=f"probe {old[1].name}: direction is all zeros"):
        redirected(old, same_PD)


@pytest.mark.parametrize(
    "wrong_PD",
    [rows(3), rows(4).astype(np.float64), rows(4)[0], rows(4, WIDTH + 1)],
    ids=["too few", "of another type", "one row", "too wide"],
)
def test_rows_that_are_not_one_for_each_probe_are_refused(wrong_PD: Any) -> None:
    with pytest.raises(ProbeError, match="directions"):
        columns().redirect(NAMES, wrong_PD)


def test_a_probe_that_is_not_there_cannot_be_redirected() -> None:
    with pytest.raises(ProbeError, match="no probe named"):
        columns().redirect(("a", "x"), rows(2))


def test_a_bank_is_put_into_words_once_and_lets_go_of_its_numbers(station: Station) -> None:
    version = station.columns.version
    described = station._banks[version]
    assert station.bank(version) is station.bank(version)
    assert described._columns is None
    assert station.bank(version + 1) is None


def test_a_bank_that_scored_nothing_is_forgotten_and_nobody_puts_it_into_words(
    station: Station, llm: ToyLlm
) -> None:
    names, first = station.columns.names, station.columns.version
    described = station._banks[first]
    ProbeBank(llm).redirect(names, rows())
    assert station.bank(first) is None
    assert described._bank is None
    assert not station._settling
    station.serve()
    station.begin([new_request(1)], [])
    forward(station, 1, start=0, count=1)
    scored = station.columns.version
    ProbeBank(llm).redirect(names, 2 * rows())
    station.reweigh(7)
    told = station.bank(scored)
    assert told is not None, "a record has its version"
    assert [info.name for info in told.probes] == list(names)
    assert sorted(station._banks) == [scored, station.columns.version]


def test_python_gives_many_probes_other_directions_at_once(station: Station, llm: ToyLlm) -> None:
    new_PD = rows(2)
    before = station.columns.version
    assert ProbeBank(llm).redirect(("d", "a"), new_PD) == before + 1 == station.columns.version
    held = {one.name: one.direction_D.tolist() for one in station.columns.probes}
    known = {name: one.direction_D.tolist() for name, one in llm.desk._probes.items()}
    assert held == known
    assert (held["d"], held["a"]) == (new_PD[0].tolist(), new_PD[1].tolist())
    new_PD[:] = 0
    assert held["a"] == station.columns.probes[0].direction_D.tolist(), "a copy"


def test_the_tables_have_what_the_bank_says(station: Station, llm: ToyLlm) -> None:
    ProbeBank(llm).redirect(station.columns.names, rows())
    for (site, slot), one in zip(station.columns.slots(), station.columns.probes, strict=True):
        written_D = station.tables.weights_SHDK[site, 0, :, slot]
        assert written_D.tolist() == one.direction_D.tolist()


@pytest.mark.parametrize(
    ("names", "given"),
    [
        (("a", "a"), rows(2)),
        (("a", "x"), rows(2)),
        (("a",), rows(2)),
        (("a",), rows(1, WIDTH + 1)),
        (("a",), rows(1).astype(np.float64)),
        (("a",), np.full((1, WIDTH), np.nan, np.float32)),
    ],
    ids=["twice", "unknown", "too many rows", "too wide", "of another type", "NaN"],
)
def test_what_python_gives_wrongly_changes_nothing(
    station: Station, llm: ToyLlm, names: tuple[str, ...], given: Any
) -> None:
    before = station.columns
    with pytest.raises(ProbeError):
        ProbeBank(llm).redirect(names, given)
    assert station.columns is before
    assert llm.desk._probes == {one.name: one for one in probes()}


@pytest.mark.parametrize(("names", "nbytes"), [((), 0), (("a",), 5), (("a", "b"), 12)])
def test_bytes_that_are_no_rows_are_refused(
    llm: ToyLlm, names: tuple[str, ...], nbytes: int
) -> None:
    refused = llm.ask(wire.RedirectProbes(names, memoryview(bytes(nbytes))))
    assert isinstance(refused, wire.Refusal)
    assert refused.code == "probe"
