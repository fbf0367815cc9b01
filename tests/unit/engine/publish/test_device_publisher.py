"""What the host tells the GPU about a step is bounded, and a GPU that has stopped is noticed."""

from __future__ import annotations

import ctypes
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from clairai.engine.kernel_launch import KernelLaunch
from clairai.engine.publish import gpu_launcher, step_header
from clairai.engine.publish.device_publisher import DevicePublisher
from clairai.engine.publish.gpu_launcher import GpuLauncher
from clairai.engine.publish.header_layout import HEADER_FIELDS, NUM_HEADERS
from clairai.engine.publish.launch_list import LaunchList
from clairai.engine.publish.step_header import StepHeader, StepHeaders, StepShape
from clairai.engine.publish.step_rows import RowBuilder, StepRows
from clairai.engine.score.score_tables import ScoreTables
from clairai.engine.step import ForwardInputs, RequestMark, StepBatch
from clairai.errors import EngineGoneError
from clairai.ring.layout import RingHeader, RingShape

MAX_REQUESTS, MAX_TOKENS, BANK_VERSION = 4, 8, 9
INPUTS = ForwardInputs(torch.zeros(MAX_TOKENS), torch.zeros(MAX_TOKENS))


class StoppedGpu:
    """Takes every launch and runs none of them, until it is told to."""

    def __init__(self) -> None:
        self.headers: list[StepHeader] = []
        self.grids: list[list[tuple[int, int]]] = []

    def prepare(self, headers: StepHeaders, inputs: ForwardInputs) -> None:
        self.prepared = (headers, inputs)

    def begin_step(self) -> None:
        pass

    def __call__(self, headers: StepHeaders, inputs: ForwardInputs, shape: StepShape) -> None:
        del inputs
        self.headers.append(headers.last())
        self.grids.append(list(shape.grids))

    def published_by_graph(self) -> None: ...

    def capture(self, num_tokens: int) -> None: ...

    def make_wait(self, stream: int) -> None: ...

    def flush(self) -> None:
        for header in self.headers:
            header.head.done = header.head.number


def publisher(launcher: StoppedGpu) -> DevicePublisher:
    tables = ScoreTables(["a"], width=4, capacity=4, max_tokens=MAX_TOKENS, device="cpu")
    header = RingHeader(0xABCD_0000_1234_5678, RingShape(slots=8, slot_bytes=4096, ahead=2))
    return DevicePublisher(launcher, header, tables, MAX_REQUESTS)


def publish(to: DevicePublisher, rows: StepRows) -> None:
    to.publish(rows, BANK_VERSION, INPUTS)


def rows_of(num_requests: int, num_tokens: int = 1) -> StepRows:
    builder = RowBuilder()
    req_ids = [f"r{index}" for index in range(num_requests)]
    for index, req_id in enumerate(req_ids):
        builder.add_request(req_id, RequestMark(2**64 - 1 - index, 3), 5)
    counts_R = np.full(num_requests, num_tokens, np.int32)
    return builder.build(StepBatch(req_ids, counts_R, np.zeros(num_requests, np.int32)))


def test_a_gpu_that_has_stopped_is_waited_for_and_then_reported(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(step_header, "GPU_TIMEOUT_S", 0.01)
    gpu = StoppedGpu()
    sending = publisher(gpu)
    for _ in range(NUM_HEADERS):
        publish(sending, rows_of(2))
    with pytest.raises(EngineGoneError, match="has not published a step"):
        publish(sending, rows_of(2))


def test_a_gpu_that_goes_on_gets_its_headers_in_turn() -> None:
    gpu = StoppedGpu()
    sending = publisher(gpu)
    for _ in range(3 * NUM_HEADERS):
        publish(sending, rows_of(2))
        gpu.flush()
    assert sending.published == 3 * NUM_HEADERS
    assert len(set(map(id, gpu.headers))) == NUM_HEADERS
    assert gpu.headers[: 2 * NUM_HEADERS] == gpu.headers[NUM_HEADERS:]


def test_more_requests_or_tokens_than_a_header_holds_are_an_error_and_not_cut() -> None:
    sending = publisher(StoppedGpu())
    publish(sending, rows_of(MAX_REQUESTS, 2))
    with pytest.raises(ValueError, match="broadcast"):
        publish(sending, rows_of(MAX_REQUESTS + 1))
    with pytest.raises(ValueError, match="broadcast"):
        publish(sending, rows_of(1, MAX_TOKENS + 1))


def test_every_word_of_a_header_is_what_the_layout_says() -> None:
    gpu = StoppedGpu()
    sending = publisher(gpu)
    publish(sending, rows_of(3))
    publish(sending, rows_of(2, 4))
    header = gpu.headers[1]
    found = {name: getattr(header.head, name) for name in HEADER_FIELDS if name != "stamp_ns"}
    assert found == {
        "num_events": 0,
        "num_rows": 8,
        "first_seq": 1,
        "step": 2,
        "epoch_and_bank": 0x1234_5678 | BANK_VERSION << 32,
        "num_columns": 0,
        "rows_per_record": 167,
        "num_requests": 2,
        "number": 2,
        "record_flags": 0,
        "in_graph": 0,
        "shape": 2,
        "unused_13": 0,
        "unused_14": 0,
        "done": 0,
    }
    words = header.memory.tolist()[len(HEADER_FIELDS) :]
    assert [stream % 2**64 for stream in words[:2]] == [2**64 - 1, 2**64 - 2]
    assert words[MAX_REQUESTS:][:2] == [3, 3]  # choices
    assert gpu.grids == [[(1, 1)], [(1, 1)]]


def test_prepare_hands_the_inputs_to_the_launcher() -> None:
    gpu = StoppedGpu()
    publisher(gpu).prepare(INPUTS)
    assert gpu.prepared[1] is INPUTS


class ToyKernel:
    """A kernel's cells, and what it was asked to launch."""

    def __init__(self) -> None:
        names = ("header_ptr", "positions_ptr", "token_ids_ptr")
        self.cells = {name: ctypes.c_uint64(0) for name in names}
        self.asked: list[tuple[Any, ...]] = []

    def launch(self, grid: tuple[int, int, int], **own: int) -> KernelLaunch:
        self.asked.append((grid, own))
        return KernelLaunch(7, grid, 32, 0, (ctypes.c_void_p * 1)(), ())


class ToyScorer:
    """Due for steps of at most 4 tokens."""

    def __init__(self, kernel: ToyKernel) -> None:
        self._kernel = kernel

    def is_due(self, num_tokens: int) -> bool:
        return num_tokens <= 4

    def launch_for(self, num_tokens: int) -> KernelLaunch:
        return self._kernel.launch((9, 9, 9), T=num_tokens)


def launcher_of(kernel: ToyKernel, used: list[LaunchList]) -> GpuLauncher:
    """As it is after prepare(), except for the GPU."""
    made = GpuLauncher.__new__(GpuLauncher)
    vars(made).update(
        _launcher=SimpleNamespace(use=used.append, run=lambda _: None), _scorer=ToyScorer(kernel),
        _kernel=kernel, _launch_lists={}, _shape=None, _inputs=None, _is_scored=False,
    )  # fmt: skip
    return made


def shape_of(number: int, num_requests: int, num_tokens: int = 1) -> StepShape:
    ring, rows = RingShape(slots=8, slot_bytes=4096, ahead=2), rows_of(num_requests, num_tokens)
    return StepShape.of(number, rows, epoch_and_bank=1, num_columns=0, ring=ring)


def test_launches_are_laid_out_once_for_steps_of_the_same_sizes() -> None:
    kernel, used = ToyKernel(), list[LaunchList]()
    launcher, headers = launcher_of(kernel, used), StepHeaders(MAX_REQUESTS, MAX_TOKENS)
    shapes = [shape_of(1, 2), shape_of(2, 3), shape_of(3, 2), shape_of(4, 3, 2), shape_of(5, 2)]
    for shape in shapes:
        launcher(headers, INPUTS, shape)
        launcher(headers, INPUTS, shape)
    assert len(used) == 5  # once for each shape
    assert used[0] is used[2] is used[4]
    assert len({id(launch_list) for launch_list in used}) == 3
    scored = [own["T"] for _, own in kernel.asked if "T" in own]
    assert scored == [2, 3]  # and none for the 6 tokens of the fourth
    assert [len(launch_list.launches) for launch_list in used] == [2, 2, 2, 1, 2]
    assert kernel.cells["positions_ptr"].value == INPUTS.positions_T.data_ptr()


def test_launch_lists_are_dropped_before_they_are_too_many(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(gpu_launcher, "MAX_LAUNCH_LISTS", 2)
    launcher, headers = launcher_of(ToyKernel(), []), StepHeaders(MAX_REQUESTS, MAX_TOKENS)
    for number, num_requests in enumerate((1, 2, 3, 1), 1):
        launcher(headers, INPUTS, shape_of(number, num_requests))
        assert len(launcher._launch_lists) <= 2
