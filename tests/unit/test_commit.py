"""What the host tells the GPU of a step is bounded, and a GPU that has stopped is noticed."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from clairai.errors import EngineGoneError
from clairai.ring.layout import RingHeader, RingShape
from clairai.tap import commit
from clairai.tap.brief import Brief, Form
from clairai.tap.commit import DeviceOutlet
from clairai.tap.commit_kernel import BRIEF_HEAD, DONE_WORD
from clairai.tap.ledger import NUM_BRIEFS
from clairai.tap.outlet import Inputs, Step
from clairai.tap.rows import Batch, Mark, RowBook, StepRows
from clairai.tap.tables import Tables

MAX_REQUESTS, MAX_TOKENS = 4, 8


class StoppedGpu:
    """Takes every launch and runs none of them, until it is told to."""

    def __init__(self) -> None:
        self.briefs: list[Brief] = []
        self.grids: list[list[tuple[int, int]]] = []

    def prepare(self, brief: Brief, inputs: Inputs) -> None:
        self.prepared = (brief, inputs)

    def begin(self) -> None:
        pass

    def __call__(self, brief: Brief, inputs: Inputs, form: Form) -> None:
        del inputs
        self.briefs.append(brief)
        self.grids.append(list(form.grids))

    def again(self, ledger: int, step: int) -> bool:
        del ledger, step
        return False

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
