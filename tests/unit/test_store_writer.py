"""Takes a writer and a disk that is slow, full or broken; gives what is counted, said and kept."""

from __future__ import annotations

import errno
import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from clairai.errors import StoreBusyError, StoreError, StoreStoppedError
from clairai.store import reading
from clairai.store.disk import Buffer, LocalDisk, LocalFile
from clairai.store.verify import verify
from clairai.store.writer import Limits, Writer
from tests.unit.tiny_rows import block, values

DEADLINE_S = 20.0
QUICK = Limits(shard_nbytes=1, retry_s=0.005, reserve_nbytes=0)


def until(is_so: Callable[[], bool]) -> None:
    deadline_s = time.monotonic() + DEADLINE_S
    while not is_so():
        assert time.monotonic() < deadline_s
        time.sleep(0.001)


@contextmanager
def faulty(monkeypatch: pytest.MonkeyPatch, name: str, code: int) -> Iterator[None]:
    """A disk whose calls of that name fail."""

    def fail(*_: object) -> None:
        raise OSError(code, os.strerror(code))

    with monkeypatch.context() as patched:
        patched.setattr(LocalDisk if hasattr(LocalDisk, name) else LocalFile, name, fail)
        yield


def _streams(path: Path) -> list[int]:
    return [request.stream for request in reading.open(path).requests()]


def test_what_was_flushed_is_there_for_a_reader_while_the_writer_goes_on(tmp_path: Path) -> None:
    with Writer(tmp_path / "s") as writer:
        writer.offer(block(1))
        writer.flush()
        store = reading.open(tmp_path / "s")
        writer.offer(block(2))
        assert [request.stream for request in store.requests()] == [1]
        writer.flush()
        assert store.refresh() == 1
        assert [request.stream for request in store.requests()] == [1, 2]
        assert (writer.counts.committed, writer.counts.pending) == (6, 0)


def test_rows_are_sealed_by_age_without_anybody_asking(tmp_path: Path) -> None:
    with Writer(tmp_path / "s", limits=Limits(seal_after_s=0.01, reserve_nbytes=0)) as writer:
        writer.offer(block(1))
        until(lambda: writer.counts.committed == 3)


def test_rows_are_sealed_by_size(tmp_path: Path) -> None:
    with Writer(tmp_path / "s", limits=QUICK) as writer:
        for stream in range(4):
            writer.offer(block(stream))
        until(lambda: writer.counts.committed == 12)
    assert len(reading.open(tmp_path / "s").shards) == 4


def test_new_weights_begin_a_new_shard(tmp_path: Path) -> None:
    with Writer(tmp_path / "s") as writer:
        for weights in ("v1", "v2", "v1"):
            writer.offer(block(1, weights=weights))
    found = [(entry.origin.weights, entry.rows) for entry in reading.open(tmp_path / "s").shards]
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


def test_a_full_disk_stops_the_writer_with_a_reason_and_it_goes_on_when_there_is_room(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with Writer(tmp_path / "s", limits=QUICK) as writer:
        writer.offer(block(1))
        writer.flush()
        with faulty(monkeypatch, "create", errno.ENOSPC):
            assert writer.offer(block(2))
            until(lambda: writer.state.name == "stopped")
            assert "the disk is full, No space left on device" in writer.state.reason
            assert _streams(tmp_path / "s") == [1]
        until(lambda: writer.counts.committed == 6)
        assert writer.state.name == "writing"
    assert _streams(tmp_path / "s") == [1, 2]


def test_a_disk_below_its_reserve_is_full(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with Writer(tmp_path / "s", limits=QUICK) as writer:
        with monkeypatch.context() as patched:
            patched.setattr(LocalDisk, "free_nbytes", lambda _: 10)
            writer.offer(block(1))
            until(lambda: "10 bytes are free" in writer.state.reason)
        writer.flush()


@pytest.mark.parametrize("call", ["write", "sync", "rename", "sync_folder"])
def test_a_broken_disk_fails_the_writer_for_good_and_every_row_is_accounted_for(
    call: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    writer = Writer(tmp_path / "s", limits=QUICK)
    writer.offer(block(1))
    writer.flush()
    with faulty(monkeypatch, call, errno.EIO):
        writer.offer(block(2))
        until(lambda: writer.state.name == "failed")
        until(lambda: writer.counts.lost == 3)
    assert not writer.offer(block(3))
    with pytest.raises(StoreStoppedError, match="3 accepted rows are lost"):
        writer.close()
    counts = writer.counts
    assert (counts.offered, counts.accepted, counts.dropped) == (9, 6, 3)
    assert (counts.committed, counts.lost, counts.pending) == (3, 3, 0)
    assert (writer.losses(1), writer.losses(2), writer.losses(3)) == (0, 3, 3)
    with Writer(tmp_path / "s", limits=QUICK) as again:
        again.offer(block(4))
    assert _streams(tmp_path / "s") == [1, 4]
    assert [checked.fault for checked in verify(LocalDisk(tmp_path / "s")) if checked.fault] == []


def test_a_line_that_the_disk_had_no_room_for_is_cut_and_written_again_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = LocalFile.write

    def half(self: LocalFile, pieces: Sequence[Buffer]) -> None:
        if len(pieces) > 1:
            return real(self, pieces)
        real(self, [bytes(pieces[0])[:50]])
        raise OSError(errno.ENOSPC, "No space left on device")

    with Writer(tmp_path / "s", limits=QUICK) as writer:
        with monkeypatch.context() as patched:
            patched.setattr(LocalFile, "write", half)
            writer.offer(block(1))
            until(lambda: writer.state.name == "stopped")
            assert _streams(tmp_path / "s") == []
        writer.flush()
    assert _streams(tmp_path / "s") == [1]
    with Writer(tmp_path / "s") as again:
        assert str(again.recovery) == "nothing to recover"


def test_closing_on_a_full_disk_gives_up_and_counts_what_was_lost(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    writer = Writer(tmp_path / "s", limits=QUICK)
    with faulty(monkeypatch, "create", errno.EDQUOT):
        writer.offer(block(1))
        with pytest.raises(StoreStoppedError, match="3 accepted rows are lost: the disk is full"):
            writer.close(timeout_s=0.01)
    assert writer.counts.lost == 3


def test_flush_on_a_full_disk_says_why(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with Writer(tmp_path / "s", limits=QUICK) as writer:
        with faulty(monkeypatch, "create", errno.ENOSPC):
            writer.offer(block(1))
            until(lambda: writer.state.name == "stopped")
            with pytest.raises(StoreStoppedError, match="3 rows are not committed: the disk is f"):
                writer.flush(timeout_s=0.01)
        writer.flush()


def test_a_folder_that_cannot_be_made_ready_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with (
        faulty(monkeypatch, "create", errno.ENOSPC),
        pytest.raises(StoreStoppedError, match="cannot be made ready, No space left"),
    ):
        Writer(tmp_path / "s")
    with Writer(tmp_path / "s") as writer:
        writer.offer(block(1))
    with pytest.raises(StoreStoppedError, match="the writer is closed"):
        writer.flush()
    assert not writer.offer(block(2))


def test_spilled_rows_are_committed_when_the_disk_is_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    limits = Limits(shard_nbytes=1, retry_s=0.005, reserve_nbytes=0, queue_nbytes=1)
    with Writer(tmp_path / "s", policy="spill", spill_to=tmp_path, limits=limits) as writer:
        writer.begin(19, tags={"a": 1})
        with faulty(monkeypatch, "create", errno.ENOSPC):
            assert all(writer.offer(block(stream)) for stream in range(20))
        writer.flush()
        assert writer.counts.committed == 60
    assert _streams(tmp_path / "s") == list(range(20))
    assert reading.open(tmp_path / "s").request(19).tags == {"a": 1}


def test_many_who_offer_at_once_are_all_counted(tmp_path: Path) -> None:
    limits = Limits(shard_nbytes=4096, reserve_nbytes=0, queue_nbytes=2048)
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
    store = reading.open(tmp_path / "s")
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
        Limits(shard_nbytes=0)
