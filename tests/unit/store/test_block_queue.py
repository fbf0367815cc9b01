"""Takes more blocks than there is room for; gives what each policy does, and exact counts."""

from __future__ import annotations

import os
import threading
from pathlib import Path

import numpy as np

from clairai.store.block_queue import BlockQueue, SpillFile
from clairai.store.row_block import NotedBlock
from tests.support.row_blocks import block

DEADLINE_S = 20.0


def test_dropping_counts_every_row_and_whose_it_was() -> None:
    intake = BlockQueue("drop", block(1).nbytes * 2)
    taken = [intake.put(NotedBlock(block(stream))) for stream in (1, 2, 3, 3)]
    assert taken == [True, True, False, False]
    counts = intake.counts
    assert (counts.offered, counts.accepted, counts.dropped) == (12, 6, 6)
    assert (intake.losses(1), intake.losses(3), intake.losses(3)) == (0, 6, 0)


def test_a_block_larger_than_the_queue_is_taken_when_nothing_waits() -> None:
    intake = BlockQueue("drop", 1)
    assert intake.put(NotedBlock(block(1)))
    assert not intake.put(NotedBlock(block(2)))


def test_blocking_waits_for_room_and_ends_when_the_intake_closes() -> None:
    intake = BlockQueue("block", 1)
    assert intake.put(NotedBlock(block(1)))
    results: list[bool] = []
    first = threading.Thread(target=lambda: results.append(intake.put(NotedBlock(block(2)))))
    first.start()
    assert isinstance(intake.get(None)[0], NotedBlock)
    first.join(DEADLINE_S)
    assert results == [True]
    waiting = threading.Thread(target=lambda: results.append(intake.put(NotedBlock(block(3)))))
    waiting.start()
    intake.close()
    waiting.join(DEADLINE_S)
    assert results == [True, False]
    assert (intake.counts.accepted, intake.counts.dropped) == (6, 3)


def test_spilling_keeps_the_order_and_drops_beyond_its_bound(tmp_path: Path) -> None:
    size = block(1).nbytes
    spill = SpillFile(tmp_path, 4 * size)
    intake = BlockQueue("spill", size, spill)
    taken = [intake.put(NotedBlock(block(stream))) for stream in range(8)]
    intake.put_other("after")
    count = taken.count(True)
    assert taken == [True] * count + [False] * (8 - count)
    assert 2 <= count <= 5
    found = [one for _ in range(count) for one in intake.get(None)]
    blocks = [one.block for one in found if isinstance(one, NotedBlock)]
    assert [int(one.rows_N["stream"][0]) for one in blocks] == list(range(count))
    assert np.array_equal(blocks[-1].arrays["values"], block(count - 1).arrays["values"])
    assert intake.get(None) == ["after"]
    assert intake.put(NotedBlock(block(9)))
    assert os.listdir(tmp_path) == []
    assert intake.counts.accepted + intake.counts.dropped == intake.counts.offered
    spill.close()
