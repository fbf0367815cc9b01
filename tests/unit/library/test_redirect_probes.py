"""New directions for a whole bank: each probe gets its own row."""

from __future__ import annotations

import pickle
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from clairai.engine.core_control import CoreControl
from clairai.engine.publish.step_publisher import StepPublisher
from clairai.errors import ProbeError, WeightsError
from clairai.library.probe_bank import ProbeBank
from clairai.points import Point
from clairai.probe.bank import EngineBank
from clairai.probe.model import Probe, replace_directions
from clairai.weights import Sender
from clairai.weights.manifest import bank, bank_name
from clairai.wire import control_messages, ring_messages
from tests.support.probe_banks import banked, probes, rows
from tests.support.toy_publisher import FIRST, SECOND, WIDTH, forward, new_request
from tests.support.weights import ToyLlm, engine

NAMES = ("a", "b", "c", "d")


def columns() -> EngineBank:
    return EngineBank.empty((FIRST, SECOND), 2, WIDTH, "org/toy").add(probes())


@pytest.fixture
def step_publisher(runtime: Path) -> Iterator[StepPublisher]:
    with banked(runtime) as made:
        yield made


@pytest.fixture
def llm(step_publisher: StepPublisher, tmp_path: Path) -> Iterator[ToyLlm]:
    with engine(tmp_path, step_publisher, CoreControl(None, probes())) as running:
        yield running


def send(llm: ToyLlm, tmp_path: Path, named: Any) -> Any:
    return Sender(llm, runtime_dir=str(tmp_path)).send(named)


def test_a_whole_bank_comes_as_one_tensor_each_row_to_its_own_probe(
    step_publisher: StepPublisher, llm: ToyLlm, tmp_path: Path
) -> None:
    before = {one.name: one for one in step_publisher.bank.probes}
    order = step_publisher.bank.names
    assert sorted(order) == list(NAMES)
    new_PD = rows()
    sent = send(llm, tmp_path, bank(order, torch.from_numpy(new_PD)))
    assert (sent.num_tensors, sent.version) == (1, 0)
    assert sent.bank_version == step_publisher.bank.version
    for name, row_D in zip(order, new_PD, strict=True):
        (one,) = (held for held in step_publisher.bank.probes if held.name == name)
        known = llm.core_control._probes[name]
        assert one.direction_D.tolist() == known.direction_D.tolist() == row_D.tolist()
        assert (one.bias, one.point) == (before[name].bias, before[name].point)
        assert one.digest == Probe(name, one.point, row_D, one.bias, "relu").digest == known.digest


@pytest.mark.parametrize("order", [("b", "a", "c", "d"), ("a", "b", "c"), ("a", "b", "c", "e")])
def test_rows_for_a_bank_that_has_changed_are_refused(
    step_publisher: StepPublisher, llm: ToyLlm, tmp_path: Path, order: tuple[str, ...]
) -> None:
    before = step_publisher.bank
    with pytest.raises(WeightsError, match="nothing named"):
        send(llm, tmp_path, bank(order, rows(len(order))))
    assert step_publisher.bank is before


def test_a_bank_of_the_same_probes_with_other_directions_has_the_same_name(
    step_publisher: StepPublisher, llm: ToyLlm, tmp_path: Path
) -> None:
    """A trainer need not ask before each step."""
    order = step_publisher.bank.names
    for _ in range(2):
        send(llm, tmp_path, bank(order, rows()))
    assert bank_name(order) == bank_name(step_publisher.bank.names)


def test_a_whole_bank_and_a_probe_of_it_contradict_each_other(
    step_publisher: StepPublisher, llm: ToyLlm, tmp_path: Path
) -> None:
    before = step_publisher.bank
    both = bank(before.names, rows()) | {"probe::a": np.ones(WIDTH, np.float32)}
    with pytest.raises(WeightsError, match="send it alone"):
        send(llm, tmp_path, both)
    assert step_publisher.bank is before


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_one_bad_number_keeps_the_whole_old_bank(
    step_publisher: StepPublisher, llm: ToyLlm, tmp_path: Path, bad: float
) -> None:
    before, new_PD = step_publisher.bank, rows()
    new_PD[2, 1] = bad
    with pytest.raises(ProbeError, match=f"probe {before.names[2]}: direction holds NaN"):
        send(llm, tmp_path, bank(before.names, new_PD))
    assert step_publisher.bank is before


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
    assert old.digest  # computed before: the new probe must not inherit it
    row_D = np.array([1, 2, 3, 4], np.float32)
    (new,) = replace_directions([old], row_D[None])
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
    assert [one.direction_D[0] for one in replace_directions(old, same_PD)] == [2.5, 2.5]
    same_PD[1] = 0
    with pytest.raises(ProbeError, match=f"probe {old[1].name}: direction is all zeros"):
        replace_directions(old, same_PD)


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


def test_a_bank_is_described_once_and_then_frees_its_numbers(
    step_publisher: StepPublisher,
) -> None:
    version = step_publisher.bank.version
    described = step_publisher._banks._kept[version]
    assert step_publisher.describe_bank(version) is step_publisher.describe_bank(version)
    assert described._bank is None
    assert step_publisher.describe_bank(version + 1) is None


def test_a_bank_that_scored_nothing_is_never_described(
    step_publisher: StepPublisher, llm: ToyLlm
) -> None:
    names, first = step_publisher.bank.names, step_publisher.bank.version
    described = step_publisher._banks._kept[first]
    ProbeBank(llm).redirect(names, rows())
    assert step_publisher.describe_bank(first) is None
    assert described._message is None
    assert not step_publisher._banks._replaced
    step_publisher.serve()
    step_publisher.begin([new_request(1)], [])
    forward(step_publisher, 1, start=0, count=1)
    scored = step_publisher.bank.version
    ProbeBank(llm).redirect(names, 2 * rows())
    step_publisher.set_weights_version(7)
    told = step_publisher.describe_bank(scored)
    assert told is not None, "a record carries its version"
    assert [info.name for info in told.probes] == list(names)
    assert sorted(step_publisher._banks._kept) == [scored, step_publisher.bank.version]


def test_python_gives_many_probes_other_directions_at_once(
    step_publisher: StepPublisher, llm: ToyLlm
) -> None:
    new_PD = rows(2)
    before = step_publisher.bank.version
    assert ProbeBank(llm).redirect(("d", "a"), new_PD) == before + 1 == step_publisher.bank.version
    held = {one.name: one.direction_D.tolist() for one in step_publisher.bank.probes}
    known = {name: one.direction_D.tolist() for name, one in llm.core_control._probes.items()}
    assert held == known
    assert (held["d"], held["a"]) == (new_PD[0].tolist(), new_PD[1].tolist())
    new_PD[:] = 0
    assert held["a"] == step_publisher.bank.probes[0].direction_D.tolist(), "a copy"


def test_the_tables_have_what_the_bank_says(step_publisher: StepPublisher, llm: ToyLlm) -> None:
    ProbeBank(llm).redirect(step_publisher.bank.names, rows())
    for (site, slot), one in zip(
        step_publisher.bank.slots, step_publisher.bank.probes, strict=True
    ):
        written_D = step_publisher.tables.weights_SHDK[site, 0, :, slot]
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
def test_wrong_arguments_of_redirect_change_nothing(
    step_publisher: StepPublisher, llm: ToyLlm, names: tuple[str, ...], given: Any
) -> None:
    before = step_publisher.bank
    with pytest.raises(ProbeError):
        ProbeBank(llm).redirect(names, given)
    assert step_publisher.bank is before
    assert llm.core_control._probes == {one.name: one for one in probes()}


@pytest.mark.parametrize(("names", "nbytes"), [((), 0), (("a",), 5), (("a", "b"), 12)])
def test_bytes_that_are_not_rows_are_refused(
    llm: ToyLlm, names: tuple[str, ...], nbytes: int
) -> None:
    refused = llm.ask(control_messages.RedirectProbes(names, memoryview(bytes(nbytes))))
    assert isinstance(refused, ring_messages.Refusal)
    assert refused.code == "probe"
