"""Bugs planted between the host and the kernel: comparing both publishers catches each."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from clairai.engine.publish import publish_kernel
from clairai.engine.publish.header_layout import HEADER_FIELDS
from clairai.engine.publish.step_header import StepHeader, StepHeaders, StepShape
from clairai.engine.publish.step_rows import BatchRequests, StepRows
from clairai.wire import ring_messages
from tests.kernels.publishers import WIDE, Publishers, assert_same, publishers, rows_in
from tests.support.engine_steps import Plan

Plant = Callable[[pytest.MonkeyPatch, Publishers], None]

HISTORY = (
    Plan(
        new=[(9, 2, 1), (4, 0, 0), (6, 5, 3), (400, 0, 2)],
        media=[[], [], [], [*range(1, 5)] * 76],
        counts=[7, 4, 1, 300],
    ),
    *[Plan(counts=[1, 2, 1, 1], order=step // 3) for step in range(10)],
    Plan(preempt=[(1, 1)], finish=[0], new=[(20, 10, 2)], counts=[6, 1, 4, 3]),
    *[Plan(counts=[1, 1, 2, 1], order=step) for step in range(10)],
)


def is_right(both: Publishers) -> bool:
    """Whether every step came out as the host and as the reference have it."""
    for plan in HISTORY:
        expected = both.step(plan)
        found, by_host = both.poll()
        if both.device_ring.statistics().torn or rows_in(found) != expected:
            return False
        try:
            assert_same(found, by_host)
        except AssertionError:
            return False
    return True


def test_without_a_planted_bug_every_step_is_right() -> None:
    with publishers() as both:
        assert is_right(both)


def rows_of_the_neighbour(monkeypatch: pytest.MonkeyPatch, _both: Publishers) -> None:
    """Each token is given to the request after its own."""

    def request_T(self: StepRows) -> NDArray[np.int32]:
        counts_R = self.counts_R
        return np.roll(np.repeat(np.arange(len(counts_R), dtype=np.int32), counts_R), 1)

    monkeypatch.setattr(StepRows, "request_T", property(request_T))


def requests_that_stay(monkeypatch: pytest.MonkeyPatch, _both: Publishers) -> None:
    """The requests of the batch are written to a header once, and never again."""
    write = StepHeader._write_requests

    def write_once(self: StepHeader, requests: BatchRequests) -> None:
        if self._requests is None:
            write(self, requests)

    monkeypatch.setattr(StepHeader, "_write_requests", write_once)


def counts_that_stay(monkeypatch: pytest.MonkeyPatch, _both: Publishers) -> None:
    """A header that takes one split of tokens for another of the same sum."""
    write = StepHeader._write_shape

    def write_stale(self: StepHeader, shape: StepShape) -> None:
        rows = shape.rows
        if self._counts and sum(np.frombuffer(self._counts, np.int32)) == rows.num_tokens:
            self._counts = rows.counts_R.tobytes()
        write(self, shape)

    monkeypatch.setattr(StepHeader, "_write_shape", write_stale)


def an_image_that_stays(monkeypatch: pytest.MonkeyPatch, _both: Publishers) -> None:
    """A header that takes the tokens of an image for as many of a text that comes later."""
    write = StepHeader._write_tokens

    def write_stale(self: StepHeader, rows: StepRows) -> None:
        write(self, rows)
        self._counts = rows.counts_R.tobytes()

    monkeypatch.setattr(StepHeader, "_write_tokens", write_stale)


def a_shape_that_stays(monkeypatch: pytest.MonkeyPatch, _both: Publishers) -> None:
    """A header takes one step for another with as many rows."""
    write = StepHeader._write_shape
    written: dict[int, int] = {}

    def write_new_sizes(self: StepHeader, shape: StepShape) -> None:
        if written.get(id(self)) == shape.num_rows:
            return
        written[id(self)] = shape.num_rows
        write(self, shape)

    monkeypatch.setattr(StepHeader, "_write_shape", write_new_sizes)


def events_one_row_early(monkeypatch: pytest.MonkeyPatch, _both: Publishers) -> None:
    """The kernel finds an event where the one before it should be."""
    write = StepHeader._write_shape

    def write_moved(self: StepHeader, shape: StepShape) -> None:
        write(self, shape)
        self._events[:] = np.roll(self._events, -ring_messages.ROW.itemsize)

    monkeypatch.setattr(StepHeader, "_write_shape", write_moved)


def nothing_is_recomputed(monkeypatch: pytest.MonkeyPatch, _both: Publishers) -> None:
    """How far a request had come is forgotten."""
    write = StepHeader._write_shape

    def write_unseen(self: StepHeader, shape: StepShape) -> None:
        write(self, shape)
        self._requests_FR[3] = 0

    monkeypatch.setattr(StepHeader, "_write_shape", write_unseen)


def half_a_stream_id(monkeypatch: pytest.MonkeyPatch, _both: Publishers) -> None:
    """The upper half of a stream's id is lost on the way."""
    write = StepHeader._write_requests

    def write_low(self: StepHeader, requests: BatchRequests) -> None:
        write(self, requests)
        self._requests_FR[0] &= 0xFFFF_FFFF

    monkeypatch.setattr(StepHeader, "_write_requests", write_low)


def positions_of_another_step(monkeypatch: pytest.MonkeyPatch, both: Publishers) -> None:
    """The kernel runs when the runner has moved on."""
    call = both.launch.__class__.__call__

    def late(self: Any, headers: StepHeaders, inputs: Any, shape: StepShape) -> None:
        inputs.positions_T.add_(1)
        call(self, headers, inputs, shape)
        inputs.positions_T.sub_(1)

    monkeypatch.setattr(both.launch.__class__, "__call__", late)


def columns_of_another_bank(_monkeypatch: pytest.MonkeyPatch, both: Publishers) -> None:
    """The kernel keeps the columns of the first bank."""
    scores_STK, offset_C = both.launch._from
    both.launch._from = (scores_STK, offset_C.roll(1))


def scores_of_the_next_token(_monkeypatch: pytest.MonkeyPatch, both: Publishers) -> None:
    """Scores are read one row down."""
    scores_STK, offset_C = both.launch._from
    both.launch._from = (scores_STK, offset_C + scores_STK.shape[2])


def another_capacity(_monkeypatch: pytest.MonkeyPatch, both: Publishers) -> None:
    """A row of scores is not as long as the kernel believes."""
    *sizes, capacity = both.launch._sizes
    both.launch._sizes = (*sizes, capacity - 1)


def more_requests_in_the_kernel(_monkeypatch: pytest.MonkeyPatch, both: Publishers) -> None:
    """Host and kernel disagree where in the header a field begins."""
    both.launch.constants["MAX_R"] += 1


def more_events_in_the_kernel(_monkeypatch: pytest.MonkeyPatch, both: Publishers) -> None:
    both.launch.constants["MAX_E"] -= 1


def fewer_records_ahead(_monkeypatch: pytest.MonkeyPatch, both: Publishers) -> None:
    """The kernel fills the heads of fewer records than it wrote."""
    both.launch.constants["AHEAD"] = WIDE.ahead // 2


def fewer_slots(_monkeypatch: pytest.MonkeyPatch, both: Publishers) -> None:
    """The kernel begins its next lap before the ring is full."""
    slots, *rest = both.launch._sizes
    both.launch._sizes = (slots // 8, *rest)


def smaller_slots(_monkeypatch: pytest.MonkeyPatch, both: Publishers) -> None:
    slots, slot_bytes, capacity = both.launch._sizes
    both.launch._sizes = (slots, slot_bytes - 8, capacity)


PLANTED: tuple[Plant, ...] = (
    rows_of_the_neighbour,
    requests_that_stay,
    counts_that_stay,
    an_image_that_stays,
    a_shape_that_stays,
    events_one_row_early,
    nothing_is_recomputed,
    half_a_stream_id,
    positions_of_another_step,
    columns_of_another_bank,
    scores_of_the_next_token,
    another_capacity,
    more_requests_in_the_kernel,
    more_events_in_the_kernel,
    fewer_records_ahead,
    fewer_slots,
    smaller_slots,
)


@pytest.mark.parametrize("plant", PLANTED, ids=lambda plant: plant.__name__)
def test_a_planted_bug_is_caught_by_the_comparison(
    plant: Plant, monkeypatch: pytest.MonkeyPatch
) -> None:
    with publishers() as both:
        plant(monkeypatch, both)
        assert not is_right(both)


def test_a_kernel_that_publishes_before_it_has_written_is_caught() -> None:
    """The ring's head moves on, and the slot is still the last lap's."""
    with publishers() as both:
        ring, head = both.launch._ring, 128 // 8

        def publish_only(_grid: tuple[int, int]) -> Callable[..., None]:
            def launched(_ring: torch.Tensor, header: torch.Tensor, *_: Any, **__: Any) -> None:
                ring[head] += 1
                header[HEADER_FIELDS.index("done")] = header[HEADER_FIELDS.index("number")]

            return launched

        with pytest.MonkeyPatch.context() as patched:
            patched.setattr(publish_kernel, "publish_step", _Indexed(publish_only))
            assert not is_right(both)
        assert both.device_ring.statistics().torn > 0


class _Indexed:
    """`kernel[grid](...)`, with a function of ours behind it."""

    def __init__(self, launch: Callable[[tuple[int, int]], Callable[..., None]]) -> None:
        self._launch = launch

    def __getitem__(self, grid: tuple[int, int]) -> Callable[..., None]:
        return self._launch(grid)
