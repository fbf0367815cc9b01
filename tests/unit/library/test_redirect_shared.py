"""ProbeBank.redirect: rows go through shared memory, or in the message where that is impossible."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from clairai.engine.core_control import CoreControl
from clairai.engine.publish.step_publisher import StepPublisher
from clairai.errors import ProbeError
from clairai.library.probe_bank import ProbeBank
from clairai.local import shared_buffer
from clairai.wire import control_messages, ring_messages
from tests.support.probe_banks import banked, probes, rows
from tests.support.toy_publisher import WIDTH
from tests.support.weights import ToyLlm, engine


@pytest.fixture
def step_publisher(runtime: Path) -> Iterator[StepPublisher]:
    with banked(runtime) as made:
        yield made


@pytest.fixture
def llm(
    step_publisher: StepPublisher, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[ToyLlm]:
    """Its core sees the worker's bank, as on one GPU; even a few bytes are shared here."""
    monkeypatch.setattr(shared_buffer, "MIN_SHARED_BYTES", 1)
    with engine(
        tmp_path, step_publisher, CoreControl(None, probes(), bank=lambda: step_publisher.bank)
    ) as running:
        yield running


def test_rows_go_through_shared_memory_and_not_in_the_message(
    step_publisher: StepPublisher, llm: ToyLlm
) -> None:
    names = step_publisher.bank.names
    for times in (1, 2, 3):
        before = step_publisher.bank.version
        assert ProbeBank(llm).redirect(names, times * rows()) == before + 1
        held = [one.direction_D.tolist() for one in step_publisher.bank.probes]
        assert held == (times * rows()).tolist()
    assert [type(each) for each in llm.asked] == [control_messages.RedirectProbesShared] * 3
    assert {(each.rows.fd, each.rows.token) for each in llm.asked} == {
        (llm.asked[0].rows.fd, llm.asked[0].rows.token)
    }, "one memory for all, whichever ProbeBank asked"
    assert llm.core_control._probes["a"] is step_publisher.bank.by_name["a"]


def test_some_probes_in_another_order_go_through_shared_memory_too(
    step_publisher: StepPublisher, llm: ToyLlm
) -> None:
    ProbeBank(llm).redirect(("d", "a"), rows(2))
    by_name = step_publisher.bank.by_name
    assert by_name["d"].direction_D.tolist() == rows(2)[0].tolist()
    assert by_name["a"].direction_D.tolist() == rows(2)[1].tolist()
    assert [type(each) for each in llm.asked] == [control_messages.RedirectProbesShared]


@pytest.mark.parametrize(
    ("names", "given", "reason"),
    [
        (("a", "a"), rows(2), "twice"),
        (("a", "x"), rows(2), "no probe named"),
        (("a",), rows(1, WIDTH + 1), "width"),
        (("a",), np.full((1, WIDTH), np.nan, np.float32), "NaN"),
    ],
)
def test_rows_in_shared_memory_are_checked_like_those_of_a_message(
    step_publisher: StepPublisher, llm: ToyLlm, names: tuple[str, ...], given: Any, reason: str
) -> None:
    before = step_publisher.bank
    with pytest.raises(ProbeError, match=reason):
        ProbeBank(llm).redirect(names, given)
    assert step_publisher.bank is before
    assert [type(each) for each in llm.asked] == [control_messages.RedirectProbesShared], (
        "asked once"
    )


def test_rows_go_in_the_message_if_the_worker_is_in_another_process(
    step_publisher: StepPublisher, llm: ToyLlm
) -> None:
    llm.core_control = CoreControl(None, probes())
    for times in (1, 2):
        ProbeBank(llm).redirect(step_publisher.bank.names, times * rows())
        held = [one.direction_D.tolist() for one in step_publisher.bank.probes]
        assert held == (times * rows()).tolist()
        assert llm.core_control._probes["a"].direction_D.tolist() == held[0]
    kinds = [type(each) for each in llm.asked]
    assert kinds == [
        control_messages.RedirectProbesShared,
        control_messages.RedirectProbes,
        control_messages.RedirectProbes,
    ], "it learns"


def test_without_shared_memory_rows_go_in_the_message(
    step_publisher: StepPublisher, llm: ToyLlm, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shared_buffer, "free_memory_bytes", lambda: 0)
    ProbeBank(llm).redirect(step_publisher.bank.names, rows())
    assert [type(each) for each in llm.asked] == [control_messages.RedirectProbes]
    assert step_publisher.bank.probes[0].direction_D.tolist() == rows()[0].tolist()


def test_memory_of_an_unanswered_question_is_not_filled_again(
    step_publisher: StepPublisher, llm: ToyLlm, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = step_publisher.bank.names
    with monkeypatch.context() as patched:
        patched.setattr(CoreControl, "control", _never)
        with pytest.raises(TimeoutError):
            ProbeBank(llm).redirect(names, rows())
    late = llm.asked[0]
    ProbeBank(llm).redirect(names, 2 * rows())
    assert llm.asked[1].rows.token != late.rows.token
    refused = llm.ask(late)  # the engine handles it only now
    assert isinstance(refused, ring_messages.Refusal)
    assert refused.code == "unsupported"
    assert step_publisher.bank.probes[0].direction_D.tolist() == (2 * rows())[0].tolist()


def _never(*_: object) -> list[bytes]:
    raise TimeoutError
