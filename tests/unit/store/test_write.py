"""Takes blocks; gives them to a writer that seals by size, age and origin, and counts them all."""

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
from tests.support.faulty_disk import DEADLINE_S, QUICK, faulty, until
from tests.support.row_blocks import block, values


def _streams(path: Path) -> list[int]:
    return [request.stream for request in read.open(path).requests()]


def test_what_was_flushed_is_there_for_a_reader_while_the_writer_goes_on(tmp_path: Path) -> None:
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


def test_rows_are_sealed_by_age_without_anybody_asking(tmp_path: Path) -> None:
    with Writer(tmp_path / "s", limits=WriterLimits(seal_after_s=0.01, reserve_nbytes=0)) as writer:
        writer.offer(block(1))
        until(lambda: writer.counts.committed == 3)


def test_rows_are_sealed_by_size(tmp_path: Path) -> None:
    with Writer(tmp_path / "s", limits=QUICK) as writer:
        for stream in range(4):
            writer.offer(block(stream))
        until(lambda: writer.counts.committed == 12)
    assert len(read.open(tmp_path / "s").shards) == 4


def test_what_is_known_of_a_request_last_is_what_its_shard_says(tmp_path: Path) -> None:
    """A request may be steered otherwise on its way."""
    with Writer(tmp_path / "s") as writer:
        for steering in ({}, {"applied": [1]}, {"applied": [1, 2]}):
            writer.begin(1, tags={"a": 1}, steering=steering)
            writer.offer(block(1))
    (shard,) = read.open(tmp_path / "s").shards
    assert shard.rows == 9
    request = read.open(tmp_path / "s").request(1)
    assert (request.tags, request.steering) == ({"a": 1}, {"applied": [1, 2]})


def test_new_weights_begin_a_new_shard(tmp_path: Path) -> None:
    with Writer(tmp_path / "s") as writer:
        for weights in ("v1", "v2", "v1"):
            writer.offer(block(1, weights=weights))
    found = [(entry.origin.weights, entry.rows) for entry in read.open(tmp_path / "s").shards]
    assert found == [("v1", 6), ("v2", 3)]


def test_the_kernel_is_asked_for_the_order_that_is_promised(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Which file is synced, renamed and written, in turn; the order itself is tried elsewhere."""
    writer = Writer(tmp_path / "s")
    calls: list[str] = []
    for name in ("fsync", "rename", "writev"):
        monkeypatch.setattr(f"os.{name}", _told(name, getattr(os, name), calls))
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


def _told(name: str, call: Callable[..., Any], calls: list[str]) -> Callable[..., Any]:
    def tell(first: Any, *rest: Any, **named: Any) -> Any:
        target = Path(os.readlink(f"/proc/self/fd/{first}")).name if type(first) is int else rest[0]
        calls.append(f"{name} {target}")
        return call(first, *rest, **named)

    return tell


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
        with faulty(monkeypatch, "create", errno.ENOSPC):
            assert all(writer.offer(block(stream)) for stream in range(20))
        writer.flush()
        assert writer.counts.committed == 60
    assert _streams(tmp_path / "s") == list(range(20))
    assert read.open(tmp_path / "s").request(19).tags == {"a": 1}


def test_many_who_offer_at_once_are_all_counted(tmp_path: Path) -> None:
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
    ("given", "said"),
    [
        ({"layout": "heap"}, "no layout is named 'heap'"),
        ({"policy": "hope"}, "no policy is named 'hope'"),
        ({"policy": "spill"}, "needs a folder to spill to"),
    ],
)
def test_what_a_writer_cannot_be_is_said(tmp_path: Path, given: dict[str, str], said: str) -> None:
    with pytest.raises(StoreError, match=said):
        Writer(tmp_path / "s", **given)  # type: ignore[arg-type]
    with pytest.raises(StoreError, match="must be above 0"):
        WriterLimits(shard_nbytes=0)


def test_what_lies_between_two_flushes_is_one_commit_whatever_its_size_and_age(
    tmp_path: Path,
) -> None:
    limits = WriterLimits(seal_after_s=0.01, shard_nbytes=100_000)
    with Writer(tmp_path / "s", commits="on_flush", limits=limits, layout="packed") as writer:
        for stream in (1, 2):
            writer.offer(block(stream, 200))
            writer.finish(stream)
        assert writer._placed(None) == []  # what the collecting thread asks when it is time
        assert read.open(tmp_path / "s").shards == ()
        writer.flush()
        assert [len(commit.shards) for commit in read.open(tmp_path / "s").commits] == [0, 2]
        assert _streams(tmp_path / "s") == [1, 2]


def test_what_was_not_flushed_is_lost_with_the_writer_and_said(tmp_path: Path) -> None:
    writer = Writer(tmp_path / "s", commits="on_flush")
    writer.offer(block(1))
    writer.flush()
    writer.offer(block(2))
    with pytest.raises(StoreStoppedError, match="3 accepted rows are lost: they were not flushed"):
        writer.close()
    assert writer.losses(2) == 3
    assert _streams(tmp_path / "s") == [1]


def test_more_than_one_commit_holds_fails_and_commits_none_of_it(tmp_path: Path) -> None:
    writer = Writer(tmp_path / "s", commits="on_flush", limits=WriterLimits(shard_nbytes=10_000))
    writer.offer(block(1, 500))
    with pytest.raises(StoreStoppedError, match="flush more often"):
        writer.flush()
    assert writer.losses(1) == 500
    with pytest.raises(StoreStoppedError):
        writer.close()
    assert read.open(tmp_path / "s").shards == ()
