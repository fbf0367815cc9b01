"""What each policy of the queue does when there is no room, and the exact counts."""

from __future__ import annotations

import os
import threading
from pathlib import Path

import numpy as np

from clairai.store.block_queue import BlockQueue, QueuedBlock, SpillFile
from clairai.store.row_block import RequestNote
from tests.support.row_blocks import block

DEADLINE_S = 20.0


def test_drop_counts_every_row_by_request() -> None:
    queue = BlockQueue("drop", block(1).nbytes * 2)
    accepted = [queue.put(block(stream)) for stream in (1, 2, 3, 3)]
    assert accepted == [True, True, False, False]
    counts = queue.counts
    assert (counts.offered, counts.accepted, counts.dropped) == (12, 6, 6)
    assert (queue.losses(1), queue.losses(3), queue.losses(3)) == (0, 6, 0)


def test_a_block_larger_than_the_queue_is_accepted_when_nothing_waits() -> None:
    queue = BlockQueue("drop", 1)
    assert queue.put(block(1))
    assert not queue.put(block(2))


def test_block_waits_for_room_and_ends_when_the_queue_closes() -> None:
    queue = BlockQueue("block", 1)
    assert queue.put(block(1))
    results: list[bool] = []
    first = threading.Thread(target=lambda: results.append(queue.put(block(2))))
    first.start()
    assert isinstance(queue.get(None)[0], QueuedBlock)
    first.join(DEADLINE_S)
    assert results == [True]
    waiting = threading.Thread(target=lambda: results.append(queue.put(block(3))))
    waiting.start()
    queue.close()
    waiting.join(DEADLINE_S)
    assert results == [True, False]
    assert (queue.counts.accepted, queue.counts.dropped) == (6, 3)


def test_spill_keeps_the_order_and_drops_beyond_its_bound(tmp_path: Path) -> None:
    size = block(1).nbytes
    spill = SpillFile(tmp_path, 4 * size)
    queue = BlockQueue("spill", size, spill)
    accepted = [queue.put(block(stream)) for stream in range(8)]
    queue.put_marker("after")
    count = accepted.count(True)
    assert accepted == [True] * count + [False] * (8 - count)
    assert 2 <= count <= 5
    found = [one for _ in range(count) for one in queue.get(None)]
    blocks = [one.block for one in found if isinstance(one, QueuedBlock)]
    assert [int(one.rows_N["stream"][0]) for one in blocks] == list(range(count))
    assert np.array_equal(blocks[-1].arrays["values"], block(count - 1).arrays["values"])
    assert queue.get(None) == ["after"]
    assert queue.put(block(9))
    assert os.listdir(tmp_path) == []
    assert queue.counts.accepted + queue.counts.dropped == queue.counts.offered
    spill.close()


def test_a_block_carries_the_notes_of_its_requests_at_the_time_it_was_offered() -> None:
    queue = BlockQueue("drop", 1 << 20)
    first, second = RequestNote.of({"a": 1}), RequestNote.of({"a": 2})
    queue.begin(1, first)
    queue.put(block(1))
    queue.put(block(2))
    queue.begin(1, second)
    queue.put(block(1))
    queue.end(1)
    queue.put(block(1))
    items = [item for item in queue.get(None) if isinstance(item, QueuedBlock)]
    assert [dict(item.notes) for item in items] == [{1: first}, {}, {1: second}, {}]
