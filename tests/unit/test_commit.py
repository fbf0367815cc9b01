"""What the host tells the GPU of a step is bounded, and a GPU that has stopped is noticed."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from clairai.errors import EngineGoneError
from clairai.ring.layout import RingHeader, RingShape
from clairai.tap import commit
from clairai.tap import gpu_launch as launching
from clairai.tap.brief import Brief, Form
from clairai.tap.commit import DeviceOutlet
from clairai.tap.commit_kernel import BRIEF_HEAD, DONE_WORD
from clairai.tap.gpu_launch import GpuLaunch
from clairai.tap.launch import Launch as Launched
from clairai.tap.ledger import NUM_BRIEFS, Ledger
from clairai.tap.lineup import Lineup
from clairai.tap.outlet import Inputs, Step
from clairai.tap.rows import Batch, Mark, RowBook, StepRows
from clairai.tap.tables import Tables

MAX_REQUESTS, MAX_TOKENS = 4, 8


class StoppedGpu:
    """Takes every launch and runs none of them, until it is told to."""

    def __init__(self) -> None:
        self.briefs: list[Brief] = []
        self.grids: list[list[tuple[int, int]]] = []

    def prepare(self, briefs: Sequence[Brief], inputs: Inputs) -> None:
        self.prepared = (briefs, inputs)

    def begin(self) -> None:
        pass

    def __call__(self, brief: Brief, inputs: Inputs, form: Form, ledger: int) -> None:
        del inputs, ledger
        self.briefs.append(brief)
        self.grids.append(list(form.grids))

    def note(self, ledger: int, step: int) -> bool:
        del ledger, step
        return False

    def noted(self) -> None: ...

    def capture(self, num_tokens: int) -> None: ...

    def follow(self, stream: int) -> None: ...

    def flush(self) -> None:
        for brief in self.briefs:
            brief.memory[DONE_WORD] = brief.memory[9]


def outlet(launch: StoppedGpu) -> DeviceOutlet:
    tables = Tables(["a"], width=4, capacity=4, max_tokens=MAX_TOKENS, device="cpu")
    header = RingHeader(0xABCD_0000_1234_5678, RingShape(slots=8, slot_bytes=4096, ahead=2))
    return DeviceOutlet(launch, header, tables, MAX_REQUESTS)


def rows_of(num_requests: int, num_tokens: int = 1) -> StepRows:
    book = RowBook()
    req_ids = [f"r{index}" for index in range(num_requests)]
    for index, req_id in enumerate(req_ids):
        book.open(req_id, Mark(2**64 - 1 - index, 3), 5)
    counts_R = np.full(num_requests, num_tokens, np.int32)
    return book.step(Batch(req_ids, counts_R, np.zeros(num_requests, np.int32)))


def step_of(rows: StepRows, number: int = 1) -> Step:
    return Step(number, rows, 9, Inputs(torch.zeros(MAX_TOKENS), torch.zeros(MAX_TOKENS)))


def test_a_gpu_that_has_stopped_is_waited_for_and_then_said_to_have_stopped(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(commit, "STUCK_S", 0.01)
    launch = StoppedGpu()
    sending = outlet(launch)
    for _ in range(NUM_BRIEFS):
        sending.send(step_of(rows_of(2)))
    with pytest.raises(EngineGoneError, match="has not published a step"):
        sending.send(step_of(rows_of(2)))


def test_a_gpu_that_goes_on_gets_its_briefs_in_turn() -> None:
    launch = StoppedGpu()
    sending = outlet(launch)
    for _ in range(3 * NUM_BRIEFS):
        sending.send(step_of(rows_of(2)))
        launch.flush()
    assert sending.published == 3 * NUM_BRIEFS
    assert len(set(map(id, launch.briefs))) == NUM_BRIEFS
    assert launch.briefs[: 2 * NUM_BRIEFS] == launch.briefs[NUM_BRIEFS:]


def test_more_requests_or_tokens_than_there_is_room_for_are_an_error_and_not_cut() -> None:
    sending = outlet(StoppedGpu())
    sending.send(step_of(rows_of(MAX_REQUESTS, 2)))
    with pytest.raises(ValueError, match="broadcast"):
        sending.send(step_of(rows_of(MAX_REQUESTS + 1)))
    with pytest.raises(ValueError, match="broadcast"):
        sending.send(step_of(rows_of(1, MAX_TOKENS + 1)))


def test_a_brief_says_what_the_top_of_the_kernel_says_it_says() -> None:
    launch = StoppedGpu()
    sending = outlet(launch)
    sending.send(step_of(rows_of(3), number=41))
    sending.send(step_of(rows_of(2, 4), number=42))
    words = launch.briefs[1].memory.tolist()
    # events, rows, first seq, step, epoch and bank, columns, rows per record, requests
    assert words[:8] == [0, 8, 1, 42, 0x1234_5678 | 9 << 32, 0, 167, 2]
    assert words[9:BRIEF_HEAD] == [2, 0, 0, 0, 0, 0, 0]
    streams, choices = words[BRIEF_HEAD:][:2], words[BRIEF_HEAD + MAX_REQUESTS :][:2]
    assert [stream % 2**64 for stream in streams] == [2**64 - 1, 2**64 - 2]
    assert choices == [3, 3]
    assert launch.grids == [[(1, 1)], [(1, 1)]]


def test_what_has_to_be_ready_before_the_first_request_is_asked_for_once() -> None:
    launch = StoppedGpu()
    inputs = step_of(rows_of(1)).inputs
    outlet(launch).prepare(inputs)
    assert launch.prepared[1] is inputs


class ToyKernel:
    """A kernel's cells, and what it was asked to launch."""

    def __init__(self) -> None:
        names = ("brief_ptr", "positions_ptr", "token_ids_ptr")
        self.cells = {name: ctypes.c_uint64(0) for name in names}
        self.asked: list[tuple[Any, ...]] = []

    def launch(self, grid: tuple[int, int, int], **own: int) -> Launched:
        self.asked.append((grid, own))
        return Launched(7, grid, 32, 0, (ctypes.c_void_p * 1)(), ())


class ToyScorer:
    """Due for steps of at most 4 tokens."""

    def __init__(self, kernel: ToyKernel) -> None:
        self._kernel = kernel

    def is_due(self, num_tokens: int) -> bool:
        return num_tokens <= 4

    def launch_for(self, num_tokens: int) -> Launched:
        return self._kernel.launch((9, 9, 9), T=num_tokens)


def gpu_launch(kernel: ToyKernel, used: list[Lineup]) -> GpuLaunch:
    """As it is after prepare(), but for the GPU."""
    made = GpuLaunch.__new__(GpuLaunch)
    launches = SimpleNamespace(use=used.append, run=lambda *_: None)
    vars(made).update(
        _launches=launches, _score=ToyScorer(kernel), _commit=kernel, _lineups={},
        _brief=kernel.cells["brief_ptr"], _form=None, _inputs=None, _is_scored=False,
    )  # fmt: skip
    return made


def form_of(number: int, num_requests: int, num_tokens: int = 1) -> Form:
    shape = RingShape(slots=8, slot_bytes=4096, ahead=2)
    return Form.of(number, rows_of(num_requests, num_tokens), bank=1, num_columns=0, shape=shape)


def test_steps_of_one_kind_are_laid_out_once_whichever_requests_they_are_of() -> None:
    kernel, used = ToyKernel(), list[Lineup]()
    launch = gpu_launch(kernel, used)
    briefs = [Brief(one, MAX_REQUESTS, MAX_TOKENS) for one in Ledger().sheets]
    inputs = step_of(rows_of(1)).inputs
    forms = [form_of(1, 2), form_of(2, 3), form_of(3, 2), form_of(4, 3, 2), form_of(5, 2)]
    for form, brief in zip(forms, briefs, strict=False):
        launch(brief, inputs, form, 0)
        launch(brief, inputs, form, 0)
    assert len(used) == 5  # once for each form
    assert used[0] is used[2] is used[4]
    assert len({id(lineup) for lineup in used}) == 3
    scored = [own["T"] for _, own in kernel.asked if "T" in own]
    assert scored == [2, 3]  # and none for the 6 tokens of the fourth
    assert [len(lineup.launches) for lineup in used] == [2, 2, 2, 1, 2]
    assert kernel.cells["positions_ptr"].value == inputs.positions_T.data_ptr()


def test_kinds_of_steps_are_forgotten_before_they_are_too_many(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(launching, "MAX_LINEUPS", 2)
    launch = gpu_launch(ToyKernel(), [])
    brief, inputs = Brief(Ledger().sheets[0], MAX_REQUESTS, MAX_TOKENS), step_of(rows_of(1)).inputs
    for number, num_requests in enumerate((1, 2, 3, 1), 1):
        launch(brief, inputs, form_of(number, num_requests), 0)
        assert len(launch._lineups) <= 2
