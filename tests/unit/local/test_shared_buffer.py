"""Takes memory that one process fills and another copies; gives each reader what it was meant."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch

from clairai.engine.core_control import CoreControl
from clairai.engine.publish.step_publisher import StepPublisher
from clairai.errors import ProbeError, UnsupportedError, WeightsError
from clairai.library.probe_bank import ProbeBank
from clairai.local import shared_buffer
from clairai.local.shared_buffer import (
    MAX_FREE_BLOCKS,
    BufferCopier,
    ReusableBuffer,
    SharedBuffer,
)
from clairai.wire import ring_messages, weights_messages
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
    """Whose core sees the worker's bank, as on one GPU; a few bytes are lent here too."""
    monkeypatch.setattr(shared_buffer, "MIN_SHARED_BYTES", 1)
    with engine(
        tmp_path, step_publisher, CoreControl(None, probes(), bank=lambda: step_publisher.columns)
    ) as running:
        yield running


def test_rows_are_lent_and_do_not_come_in_the_message(
    step_publisher: StepPublisher, llm: ToyLlm
) -> None:
    names = step_publisher.columns.names
    for times in (1, 2, 3):
        before = step_publisher.columns.version
        assert ProbeBank(llm).redirect(names, times * rows()) == before + 1
        held = [one.direction_D.tolist() for one in step_publisher.columns.probes]
        assert held == (times * rows()).tolist()
    assert [type(each) for each in llm.asked] == [ring_messages.RedirectProbesShared] * 3
    assert {(each.rows.fd, each.rows.token) for each in llm.asked} == {
        (llm.asked[0].rows.fd, llm.asked[0].rows.token)
    }, "one memory for all, whichever ProbeBank asked"
    assert llm.core_control._probes["a"] is step_publisher.columns.by_name["a"]


def test_some_probes_in_another_order_are_lent_too(
    step_publisher: StepPublisher, llm: ToyLlm
) -> None:
    ProbeBank(llm).redirect(("d", "a"), rows(2))
    by_name = step_publisher.columns.by_name
    assert by_name["d"].direction_D.tolist() == rows(2)[0].tolist()
    assert by_name["a"].direction_D.tolist() == rows(2)[1].tolist()
    assert [type(each) for each in llm.asked] == [ring_messages.RedirectProbesShared]


@pytest.mark.parametrize(
    ("names", "given", "reason"),
    [
        (("a", "a"), rows(2), "twice"),
        (("a", "x"), rows(2), "no probe named"),
        (("a",), rows(1, WIDTH + 1), "width"),
        (("a",), np.full((1, WIDTH), np.nan, np.float32), "NaN"),
    ],
)
def test_rows_that_are_lent_are_checked_as_those_of_a_message(
    step_publisher: StepPublisher, llm: ToyLlm, names: tuple[str, ...], given: Any, reason: str
) -> None:
    before = step_publisher.columns
    with pytest.raises(ProbeError, match=reason):
        ProbeBank(llm).redirect(names, given)
    assert step_publisher.columns is before
    assert [type(each) for each in llm.asked] == [ring_messages.RedirectProbesShared], "asked once"


def test_where_the_worker_is_in_another_process_rows_come_in_the_message(
    step_publisher: StepPublisher, llm: ToyLlm
) -> None:
    llm.core_control = CoreControl(None, probes())
    for times in (1, 2):
        ProbeBank(llm).redirect(step_publisher.columns.names, times * rows())
        held = [one.direction_D.tolist() for one in step_publisher.columns.probes]
        assert held == (times * rows()).tolist()
        assert llm.core_control._probes["a"].direction_D.tolist() == held[0]
    kinds = [type(each) for each in llm.asked]
    assert kinds == [
        ring_messages.RedirectProbesShared,
        ring_messages.RedirectProbes,
        ring_messages.RedirectProbes,
    ], "it learns"


def test_what_is_small_or_very_large_comes_in_the_message() -> None:
    buffer = ReusableBuffer()
    assert [
        buffer.can_hold(n)
        for n in (0, shared_buffer.MIN_SHARED_BYTES - 1, weights_messages.MAX_SHARED_BYTES + 1)
    ] == [False] * 3
    assert buffer.can_hold(shared_buffer.MIN_SHARED_BYTES)
    assert buffer.can_hold(512 * 4096 * 4), "a bank of 512 of a wide model"


def test_without_shared_memory_rows_come_in_the_message(
    step_publisher: StepPublisher, llm: ToyLlm, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shared_buffer, "free_memory_bytes", lambda: 0)
    ProbeBank(llm).redirect(step_publisher.columns.names, rows())
    assert [type(each) for each in llm.asked] == [ring_messages.RedirectProbes]
    assert step_publisher.columns.probes[0].direction_D.tolist() == rows()[0].tolist()


def test_memory_of_a_question_that_was_not_answered_is_not_filled_again(
    step_publisher: StepPublisher, llm: ToyLlm, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = step_publisher.columns.names
    with monkeypatch.context() as patched:
        patched.setattr(CoreControl, "control", _never)
        with pytest.raises(TimeoutError):
            ProbeBank(llm).redirect(names, rows())
    late = llm.asked[0]
    ProbeBank(llm).redirect(names, 2 * rows())
    assert llm.asked[1].rows.token != late.rows.token
    refused = llm.ask(late)  # the engine comes to it now
    assert isinstance(refused, ring_messages.Refusal)
    assert refused.code == "unsupported"
    assert step_publisher.columns.probes[0].direction_D.tolist() == (2 * rows())[0].tolist()


def _never(*_: object) -> list[bytes]:
    raise TimeoutError


CHILD = """
import sys, numpy as np
from clairai.local.shared_buffer import ReusableBuffer
with ReusableBuffer().lock() as buffer:
    buffer.view(20000)[:] = np.arange(5000, dtype=np.float32).view(np.uint8)
    told = buffer.reference(20000)
    print(told.pid, told.fd, told.token, told.nbytes, flush=True)
    sys.stdin.read()
"""


def test_another_process_reads_what_was_lent_and_not_when_it_has_gone() -> None:
    command = [sys.executable, "-c", CHILD]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as child:
        assert child.stdout is not None
        pid, fd, token, nbytes = child.stdout.readline().decode().split()
        told = weights_messages.SharedBytes(int(pid), int(fd), token, int(nbytes))
        assert told.pid == child.pid != os.getpid()
        found = np.frombuffer(BufferCopier().copy_shared(told), np.float32)
        assert found.tolist() == list(range(5000))
        assert not found.flags.writeable
    with pytest.raises(UnsupportedError, match="cannot be reached"):
        BufferCopier().copy_shared(told)


def told(shelf: SharedBuffer, nbytes: int, **changes: Any) -> weights_messages.SharedBytes:
    made = weights_messages.SharedBytes(os.getpid(), shelf.fds[0], shelf.token, nbytes)
    return msgspec.structs.replace(made, **changes)


def test_memory_of_another_name_is_not_read() -> None:
    shelf, other, borrower = SharedBuffer(), SharedBuffer(), BufferCopier()
    shelf.view(10)[:] = 1
    other.view(10)[:] = 2
    for wrong in (told(shelf, 10, fd=other.fds[0]), told(shelf, 10, token="0" * 32)):
        with pytest.raises(UnsupportedError, match="other memory"):
            borrower.copy_shared(wrong)
    assert bytes(borrower.copy_shared(told(shelf, 10))) == b"\1" * 10


def test_what_lies_behind_the_end_is_not_read() -> None:
    shelf = SharedBuffer()
    shelf.view(4096)
    with pytest.raises(WeightsError, match="has 4096 bytes, 4097 were announced"):
        BufferCopier().copy_shared(told(shelf, 4097))


@pytest.mark.parametrize(
    "field",
    [{"token": "../x"}, {"token": "A" * 32}, {"pid": 0}, {"fd": -1}, {"nbytes": 1 << 40}],
    ids=str,
)
def test_a_message_that_names_no_memory_is_not_understood(field: dict[str, Any]) -> None:
    good = {"pid": 1, "fd": 1, "token": "0" * 32, "nbytes": 1}
    assert msgspec.convert(good, weights_messages.SharedBytes)
    with pytest.raises(msgspec.ValidationError):
        msgspec.convert(good | field, weights_messages.SharedBytes)


def test_a_mapping_is_kept_and_grows_and_another_memory_has_its_own() -> None:
    one, other, borrower = SharedBuffer(), SharedBuffer(), BufferCopier()
    one.view(100)[:] = 1
    first_N = borrower.copy(one.fds[0], 100)
    mapped = borrower._source_N
    one.view(100)[:] = 2
    assert borrower.copy(one.fds[0], 50).tolist() == [2] * 50
    assert borrower._source_N is mapped
    assert first_N.tolist() == [1] * 100, "a copy"
    one.view(1 << 20)[:] = 3
    assert borrower.copy(one.fds[0], 1 << 20).tolist() == [3] * (1 << 20)
    other.view(100)[:] = 4
    assert borrower.copy(other.fds[0], 100).tolist() == [4] * 100
    assert borrower.copy(one.fds[0], 100).tolist() == [3] * 100


HOLDERS: dict[str, Callable[[Any], Any]] = {
    "a view": lambda copied_N: copied_N[3:5],
    "a view of another type": lambda copied_N: copied_N.view(np.float32).reshape(2, -1)[1],
    "its bytes": lambda copied_N: copied_N.data.toreadonly()[5:],
    "an array of its bytes": lambda copied_N: np.frombuffer(copied_N.data, np.float32)[1:],
    "a tensor": lambda copied_N: torch.from_numpy(copied_N)[8:].view(torch.float32),
}


@pytest.mark.parametrize("kind", HOLDERS)
def test_memory_is_used_again_and_not_before_the_last_one_has_let_go(kind: str) -> None:
    shelf, borrower = SharedBuffer(), BufferCopier()
    shelf.view(64)[:] = 1
    copied_N = borrower.copy(shelf.fds[0], 64)
    address = copied_N.__array_interface__["data"][0]
    held = HOLDERS[kind](copied_N)
    before = bytes(np.asarray(held))
    del copied_N
    shelf.view(64)[:] = 2
    others = [borrower.copy(shelf.fds[0], 64) for _ in range(3)]
    assert bytes(np.asarray(held)) == before
    assert address not in [each.__array_interface__["data"][0] for each in others]
    del held
    gc.collect()
    again_N = borrower.copy(shelf.fds[0], 32)
    assert again_N.__array_interface__["data"][0] == address
    assert again_N.tolist() == [2] * 32


def test_a_few_blocks_are_kept_and_no_more() -> None:
    shelf, borrower = SharedBuffer(), BufferCopier()
    shelf.view(64)
    held = [borrower.copy(shelf.fds[0], 64) for _ in range(3 * MAX_FREE_BLOCKS)]
    assert len(borrower._free) == 0
    held.clear()
    assert len(borrower._free) == MAX_FREE_BLOCKS
