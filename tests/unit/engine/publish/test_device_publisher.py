"""What the host tells the GPU of a step is bounded, and a GPU that has stopped is noticed."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from clairai.engine.kernel_launch import KernelLaunch as Launched
from clairai.engine.publish import device_publisher
from clairai.engine.publish import gpu_launcher as launching
from clairai.engine.publish.device_publisher import DevicePublisher
from clairai.engine.publish.gpu_launcher import GpuLauncher
from clairai.engine.publish.launch_list import LaunchList
from clairai.engine.publish.publish_kernel import DONE_WORD, HEAD_WORDS
from clairai.engine.publish.publisher import FinishedStep
from clairai.engine.publish.step_header import NUM_HEADERS, StepCounters, StepHeader, StepShape
from clairai.engine.publish.step_rows import RowBuilder, StepRows
from clairai.engine.score.score_tables import ScoreTables
from clairai.engine.step import ForwardInputs, RequestMark, StepBatch
from clairai.errors import EngineGoneError
from clairai.ring.layout import RingHeader, RingShape

MAX_REQUESTS, MAX_TOKENS = 4, 8


class StoppedGpu:
    """Takes every launch and runs none of them, until it is told to."""

    def __init__(self) -> None:
        self.step_headers: list[StepHeader] = []
        self.grids: list[list[tuple[int, int]]] = []

    def prepare(self, step_headers: Sequence[StepHeader], inputs: ForwardInputs) -> None:
        self.prepared = (step_headers, inputs)

    def begin(self) -> None:
        pass

    def __call__(
        self, step_header: StepHeader, inputs: ForwardInputs, form: StepShape, ledger: int
    ) -> None:
        del inputs, ledger
        self.step_headers.append(step_header)
        self.grids.append(list(form.grids))

    def note(self, ledger: int, step: int) -> bool:
        del ledger, step
        return False

    def noted(self) -> None: ...

    def capture(self, num_tokens: int) -> None: ...

    def follow(self, stream: int) -> None: ...

    def flush(self) -> None:
        for step_header in self.step_headers:
            step_header.memory[DONE_WORD] = step_header.memory[9]


def publisher(launch: StoppedGpu) -> DevicePublisher:
    tables = ScoreTables(["a"], width=4, capacity=4, max_tokens=MAX_TOKENS, device="cpu")
    header = RingHeader(0xABCD_0000_1234_5678, RingShape(slots=8, slot_bytes=4096, ahead=2))
    return DevicePublisher(launch, header, tables, MAX_REQUESTS)


def rows_of(num_requests: int, num_tokens: int = 1) -> StepRows:
    book = RowBuilder()
    req_ids = [f"r{index}" for index in range(num_requests)]
    for index, req_id in enumerate(req_ids):
        book.open(req_id, RequestMark(2**64 - 1 - index, 3), 5)
    counts_R = np.full(num_requests, num_tokens, np.int32)
    return book.step(StepBatch(req_ids, counts_R, np.zeros(num_requests, np.int32)))


def step_of(rows: StepRows, number: int = 1) -> FinishedStep:
    return FinishedStep(
        number, rows, 9, ForwardInputs(torch.zeros(MAX_TOKENS), torch.zeros(MAX_TOKENS))
    )


def test_a_gpu_that_has_stopped_is_waited_for_and_then_said_to_have_stopped(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(device_publisher, "GPU_TIMEOUT_S", 0.01)
    launch = StoppedGpu()
    sending = publisher(launch)
    for _ in range(NUM_HEADERS):
        sending.send(step_of(rows_of(2)))
    with pytest.raises(EngineGoneError, match="has not published a step"):
        sending.send(step_of(rows_of(2)))


def test_a_gpu_that_goes_on_gets_its_briefs_in_turn() -> None:
    launch = StoppedGpu()
    sending = publisher(launch)
    for _ in range(3 * NUM_HEADERS):
        sending.send(step_of(rows_of(2)))
        launch.flush()
    assert sending.published == 3 * NUM_HEADERS
    assert len(set(map(id, launch.step_headers))) == NUM_HEADERS
    assert launch.step_headers[: 2 * NUM_HEADERS] == launch.step_headers[NUM_HEADERS:]


def test_more_requests_or_tokens_than_there_is_room_for_are_an_error_and_not_cut() -> None:
    sending = publisher(StoppedGpu())
    sending.send(step_of(rows_of(MAX_REQUESTS, 2)))
    with pytest.raises(ValueError, match="broadcast"):
        sending.send(step_of(rows_of(MAX_REQUESTS + 1)))
    with pytest.raises(ValueError, match="broadcast"):
        sending.send(step_of(rows_of(1, MAX_TOKENS + 1)))


def test_a_brief_says_what_the_top_of_the_kernel_says_it_says() -> None:
    launch = StoppedGpu()
    sending = publisher(launch)
    sending.send(step_of(rows_of(3), number=41))
    sending.send(step_of(rows_of(2, 4), number=42))
    words = launch.step_headers[1].memory.tolist()
    # events, rows, first seq, step, epoch and bank, columns, rows per record, requests
    assert words[:8] == [0, 8, 1, 42, 0x1234_5678 | 9 << 32, 0, 167, 2]
    assert words[9:HEAD_WORDS] == [2, 0, 0, 0, 0, 0, 0]
    streams, choices = words[HEAD_WORDS:][:2], words[HEAD_WORDS + MAX_REQUESTS :][:2]
    assert [stream % 2**64 for stream in streams] == [2**64 - 1, 2**64 - 2]
    assert choices == [3, 3]
    assert launch.grids == [[(1, 1)], [(1, 1)]]


def test_what_has_to_be_ready_before_the_first_request_is_asked_for_once() -> None:
    launch = StoppedGpu()
    inputs = step_of(rows_of(1)).inputs
    publisher(launch).prepare(inputs)
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


def gpu_launch(kernel: ToyKernel, used: list[LaunchList]) -> GpuLauncher:
    """As it is after prepare(), but for the GPU."""
    made = GpuLauncher.__new__(GpuLauncher)
    launches = SimpleNamespace(use=used.append, run=lambda *_: None)
    vars(made).update(
        _launches=launches, _score=ToyScorer(kernel), _commit=kernel, _lineups={},
        _brief=kernel.cells["brief_ptr"], _form=None, _inputs=None, _is_scored=False,
    )  # fmt: skip
    return made


def form_of(number: int, num_requests: int, num_tokens: int = 1) -> StepShape:
    shape = RingShape(slots=8, slot_bytes=4096, ahead=2)
    return StepShape.of(
        number, rows_of(num_requests, num_tokens), bank=1, num_columns=0, shape=shape
    )


def test_steps_of_one_kind_are_laid_out_once_whichever_requests_they_are_of() -> None:
    kernel, used = ToyKernel(), list[LaunchList]()
    launch = gpu_launch(kernel, used)
    step_headers = [StepHeader(one, MAX_REQUESTS, MAX_TOKENS) for one in StepCounters().sheets]
    inputs = step_of(rows_of(1)).inputs
    forms = [form_of(1, 2), form_of(2, 3), form_of(3, 2), form_of(4, 3, 2), form_of(5, 2)]
    for form, step_header in zip(forms, step_headers, strict=False):
        launch(step_header, inputs, form, 0)
        launch(step_header, inputs, form, 0)
    assert len(used) == 5  # once for each form
    assert used[0] is used[2] is used[4]
    assert len({id(launch_list) for launch_list in used}) == 3
    scored = [own["T"] for _, own in kernel.asked if "T" in own]
    assert scored == [2, 3]  # and none for the 6 tokens of the fourth
    assert [len(launch_list.launches) for launch_list in used] == [2, 2, 2, 1, 2]
    assert kernel.cells["positions_ptr"].value == inputs.positions_T.data_ptr()


def test_kinds_of_steps_are_forgotten_before_they_are_too_many(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(launching, "MAX_LAUNCH_LISTS", 2)
    launch = gpu_launch(ToyKernel(), [])
    step_header, inputs = (
        StepHeader(StepCounters().sheets[0], MAX_REQUESTS, MAX_TOKENS),
        step_of(rows_of(1)).inputs,
    )
    for number, num_requests in enumerate((1, 2, 3, 1), 1):
        launch(step_header, inputs, form_of(number, num_requests), 0)
        assert len(launch._lineups) <= 2
