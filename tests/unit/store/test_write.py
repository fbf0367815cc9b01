"""A writer seals shards by size, age and origin, and counts every row."""

from __future__ import annotations

import errno
import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from clairai.errors import StoreBusyError, StoreError, StoreStoppedError
from clairai.store import read
from clairai.store.write import Writer, WriterLimits
from tests.support.faulty_disk import DEADLINE_S, QUICK, failing, wait_until
from tests.support.row_blocks import block, values


def _streams(path: Path) -> list[int]:
    return [request.stream for request in read.open(path).requests()]


def test_flushed_rows_are_visible_to_a_reader_while_the_writer_continues(tmp_path: Path) -> None:
    with Writer(tmp_path / "s") as writer:
        writer.offer(block(1))
        writer.flush()
        store = read.open(tmp_path / "s")
        writer.offer(block(2))
        assert [request.stream for request in store.requests()] == [1]
        writer.flush()
        assert store.refresh() == 1
        assert [request.stream for request in store.requests()] == [1, 2]
        assert (writer.counts.committed, writer.counts.pending) == (6, 0)


def test_rows_are_sealed_by_age(tmp_path: Path) -> None:
    with Writer(tmp_path / "s", limits=WriterLimits(seal_after_s=0.01, reserve_nbytes=0)) as writer:
        writer.offer(block(1))
        wait_until(lambda: writer.counts.committed == 3)


def test_rows_are_sealed_by_size(tmp_path: Path) -> None:
    with Writer(tmp_path / "s", limits=QUICK) as writer:
        for stream in range(4):
            writer.offer(block(stream))
        wait_until(lambda: writer.counts.committed == 12)
    assert len(read.open(tmp_path / "s").shards) == 4


def test_a_shard_has_the_last_note_of_a_request(tmp_path: Path) -> None:
    """The steering of a request may change while it runs."""
    with Writer(tmp_path / "s") as writer:
        for steering in ({}, {"applied": [1]}, {"applied": [1, 2]}):
            writer.begin(1, tags={"a": 1}, steering=steering)
            writer.offer(block(1))
    (shard,) = read.open(tmp_path / "s").shards
    assert shard.rows == 9
    request = read.open(tmp_path / "s").request(1)
    assert (request.tags, request.steering) == ({"a": 1}, {"applied": [1, 2]})


def test_new_weights_start_a_new_shard(tmp_path: Path) -> None:
    with Writer(tmp_path / "s") as writer:
        for weights in ("v1", "v2", "v1"):
            writer.offer(block(1, weights=weights))
    found = [(entry.origin.weights, entry.rows) for entry in read.open(tmp_path / "s").shards]
    assert found == [("v1", 6), ("v2", 3)]


def test_files_are_written_synced_and_renamed_in_the_promised_order(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The calls of the kernel; that this order survives crashes is tested elsewhere."""
    writer = Writer(tmp_path / "s")
    calls: list[str] = []
    for name in ("fsync", "rename", "writev"):
        monkeypatch.setattr(f"os.{name}", _recording(name, getattr(os, name), calls))
    writer.offer(block(1))
    writer.flush()
    writer.close()
    (shard,) = (file.name for file in (tmp_path / "s").glob("*.safetensors"))
    assert calls == [
        f"writev {shard}.tmp",
        f"fsync {shard}.tmp",
        f"rename {shard}",
        "fsync s",
        "writev manifest",
        "fsync manifest",
    ]


def _recording(name: str, call: Callable[..., Any], calls: list[str]) -> Callable[..., Any]:
    def record(first: Any, *rest: Any, **named: Any) -> Any:
        target = Path(os.readlink(f"/proc/self/fd/{first}")).name if type(first) is int else rest[0]
        calls.append(f"{name} {target}")
        return call(first, *rest, **named)

    return record


def test_a_second_writer_is_refused_and_readers_are_not(tmp_path: Path) -> None:
    with Writer(tmp_path / "s") as writer:
        with pytest.raises(StoreBusyError, match="has a writer already"):
            Writer(tmp_path / "s")
        writer.offer(block(1))
        writer.flush()
        assert _streams(tmp_path / "s") == [1]
    with Writer(tmp_path / "s"):
        pass


def test_spilled_rows_are_committed_when_the_disk_is_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    limits = WriterLimits(shard_nbytes=1, retry_s=0.005, reserve_nbytes=0, queue_nbytes=1)
    with Writer(tmp_path / "s", policy="spill", spill_to=tmp_path, limits=limits) as writer:
        writer.begin(19, tags={"a": 1})
        with failing(monkeypatch, "create", errno.ENOSPC):
            assert all(writer.offer(block(stream)) for stream in range(20))
        writer.flush()
        assert writer.counts.committed == 60
    assert _streams(tmp_path / "s") == list(range(20))
    assert read.open(tmp_path / "s").request(19).tags == {"a": 1}


def test_blocks_of_many_threads_are_all_counted(tmp_path: Path) -> None:
    limits = WriterLimits(shard_nbytes=4096, reserve_nbytes=0, queue_nbytes=2048)
    with Writer(tmp_path / "s", limits=limits) as writer:

        def offer(first: int) -> None:
            for stream in range(first, first + 50):
                writer.offer(block(stream))

        threads = [threading.Thread(target=offer, args=(100 * n,)) for n in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(DEADLINE_S)
        writer.flush()
        counts = writer.counts
    assert counts.offered == 600
    assert counts.accepted + counts.dropped == 600
    assert counts.committed == counts.accepted
    store = read.open(tmp_path / "s")
    assert sum(request.rows for request in store.requests()) == counts.committed
    for request in store.requests():
        expected = values(request.stream, np.arange(3), "post_block.3")
        assert np.array_equal(store.rows(request.stream), expected)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"layout": "heap"}, "no layout is named 'heap'"),
        ({"policy": "hope"}, "no policy is named 'hope'"),
        ({"policy": "spill"}, "needs a folder to spill to"),
    ],
)
def test_wrong_arguments_are_refused(
    tmp_path: Path, arguments: dict[str, str], message: str
) -> None:
    with pytest.raises(StoreError, match=message):
        Writer(tmp_path / "s", **arguments)  # type: ignore[arg-type]
    with pytest.raises(StoreError, match="must be above 0"):
        WriterLimits(shard_nbytes=0)


def test_everything_between_two_flushes_is_one_commit(
    tmp_path: Path,
) -> None:
    limits = WriterLimits(seal_after_s=0.01, shard_nbytes=100_000)
    with Writer(tmp_path / "s", commits="on_flush", limits=limits, layout="packed") as writer:
        for stream in (1, 2):
            writer.offer(block(stream, 200))
            writer.finish(stream)
        assert writer._take_due(None) == []  # what the collecting thread does when a shard is due
        assert read.open(tmp_path / "s").shards == ()
        writer.flush()
        assert [len(commit.shards) for commit in read.open(tmp_path / "s").commits] == [0, 2]
        assert _streams(tmp_path / "s") == [1, 2]


def test_rows_that_were_not_flushed_are_lost_and_reported(tmp_path: Path) -> None:
    writer = Writer(tmp_path / "s", commits="on_flush")
    writer.offer(block(1))
    writer.flush()
    writer.offer(block(2))
    with pytest.raises(StoreStoppedError, match="3 accepted rows are lost: they were not flushed"):
        writer.close()
    assert writer.losses(2) == 3
    assert _streams(tmp_path / "s") == [1]


def test_too_much_for_one_commit_fails_and_commits_nothing(tmp_path: Path) -> None:
    writer = Writer(tmp_path / "s", commits="on_flush", limits=WriterLimits(shard_nbytes=10_000))
    writer.offer(block(1, 500))
    with pytest.raises(StoreStoppedError, match="flush more often"):
        writer.flush()
    assert writer.losses(1) == 500
    with pytest.raises(StoreStoppedError):
        writer.close()
    assert read.open(tmp_path / "s").shards == ()
