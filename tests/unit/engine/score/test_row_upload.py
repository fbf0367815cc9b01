"""Rows of a bank are uploaded from memory that nothing overwrites before the GPU has fetched them.

Played: the GPU's events, and what is pinned. Real: who holds which memory, and when it is reused.
"""

from __future__ import annotations

import gc
from typing import Any

import numpy as np
import pytest
import torch

from clairai.engine.score.row_upload import RowUpload
from clairai.local.shared_buffer import BufferCopier, ByteArray, SharedBuffer

NUM_ROWS, WIDTH = 3, 8
NBYTES = 4 * NUM_ROWS * WIDTH


class Event:
    """Happens when the test says so, or when the code waits for it."""

    made: list[Event]

    def __init__(self) -> None:
        self.has_come = False
        self.made.append(self)

    def record(self, stream: object) -> None:
        """On no stream."""

    def query(self) -> bool:
        return self.has_come

    def synchronize(self) -> None:
        self.has_come = True


@pytest.fixture
def events(monkeypatch: pytest.MonkeyPatch) -> list[Event]:
    Event.made = []
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda _: None)
    empty = torch.empty
    monkeypatch.setattr(torch, "empty", lambda size, **_: empty(size))
    return Event.made


@pytest.fixture
def pinned(monkeypatch: pytest.MonkeyPatch) -> set[int]:
    """Addresses that count as pinned."""
    found: set[int] = set()
    monkeypatch.setattr(torch.Tensor, "is_pinned", lambda self: self.data_ptr() in found)
    return found


def upload() -> RowUpload:
    made = RowUpload(torch.device("cpu"))
    made._is_on_gpu, made._gap = True, 0
    return made


def rows_of(pages_N: ByteArray) -> Any:
    """Read-only, as a bank has them."""
    return np.frombuffer(pages_N.data.toreadonly(), np.float32).reshape(NUM_ROWS, WIDTH)


def filled(buffer: SharedBuffer, value: float) -> int:
    buffer.view(NBYTES).view(np.float32)[:] = value
    return buffer.fds[0]


def address(array: Any) -> int:
    return int(array.__array_interface__["data"][0])


def test_rows_in_pinned_memory_are_fetched_from_there(
    events: list[Event], pinned: set[int]
) -> None:
    buffer = SharedBuffer()
    rows_PD = rows_of(BufferCopier().copy(filled(buffer, 2.0), NBYTES))
    pinned.add(address(rows_PD))
    moved_PD = upload()(rows_PD)
    assert moved_PD.data_ptr() == address(rows_PD)
    assert moved_PD.tolist() == rows_PD.tolist()
    assert len(events) == 1


def test_other_rows_are_staged(events: list[Event], pinned: set[int]) -> None:
    assert not pinned
    buffer = SharedBuffer()
    rows_PD = rows_of(BufferCopier().copy(filled(buffer, 2.0), NBYTES))
    moved_PD = upload()(rows_PD)
    assert moved_PD.data_ptr() != address(rows_PD)
    assert moved_PD.tolist() == rows_PD.tolist()
    assert len(events) == 1


def test_memory_is_not_filled_again_while_the_gpu_fetches_from_it(
    events: list[Event], pinned: set[int]
) -> None:
    buffer, copier, to_gpu = SharedBuffer(), BufferCopier(), upload()
    rows_PD = rows_of(copier.copy(filled(buffer, 1.0), NBYTES))
    first = address(rows_PD)
    pinned.add(first)
    to_gpu(rows_PD)
    del rows_PD  # the bank is another one by now
    gc.collect()
    second_PD = rows_of(copier.copy(filled(buffer, 2.0), NBYTES))
    assert address(second_PD) != first, "the GPU may still read it"
    pinned.add(address(second_PD))
    to_gpu(second_PD)
    assert address(copier.copy(filled(buffer, 3.0), NBYTES)) != first
    events[0].has_come = True
    to_gpu(second_PD)
    gc.collect()
    assert address(copier.copy(filled(buffer, 4.0), NBYTES)) == first


def test_staging_is_not_filled_again_before_all_has_been_fetched(
    events: list[Event], pinned: set[int]
) -> None:
    to_gpu, copier, buffer = upload(), BufferCopier(), SharedBuffer()
    straight_PD = rows_of(copier.copy(filled(buffer, 1.0), NBYTES))
    staged_PD = rows_of(copier.copy(filled(buffer, 2.0), NBYTES))
    pinned.add(address(straight_PD))
    to_gpu(staged_PD)
    to_gpu(straight_PD)
    assert [event.has_come for event in events] == [False, False], "the host does not wait"
    to_gpu(staged_PD)
    assert [event.has_come for event in events] == [True, True, False]
