"""What a writer counts, reports and keeps when its disk is full or broken."""

from __future__ import annotations

import errno
from collections.abc import Sequence
from pathlib import Path

import pytest

from clairai.errors import StoreStoppedError
from clairai.store import read
from clairai.store.disk import Buffer, LocalDisk, LocalFile
from clairai.store.recover import verify
from clairai.store.write import Writer
from tests.support.faulty_disk import QUICK, failing, wait_until
from tests.support.row_blocks import block


def _streams(path: Path) -> list[int]:
    return [request.stream for request in read.open(path).requests()]


def test_a_full_disk_stops_the_writer_with_a_reason_and_it_continues_when_there_is_room(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with Writer(tmp_path / "s", limits=QUICK) as writer:
        writer.offer(block(1))
        writer.flush()
        with failing(monkeypatch, "create", errno.ENOSPC):
            assert writer.offer(block(2))
            wait_until(lambda: writer.state.name == "stopped")
            assert "the disk is full, No space left on device" in writer.state.reason
            assert _streams(tmp_path / "s") == [1]
        wait_until(lambda: writer.counts.committed == 6)
        assert writer.state.name == "writing"
    assert _streams(tmp_path / "s") == [1, 2]


@pytest.mark.attack(812)
@pytest.mark.parametrize("call", ["create", "append", "sync_folder"])
def test_a_writer_that_can_open_no_file_continues_when_it_can(
    call: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with Writer(tmp_path / "s", limits=QUICK) as writer:
        with failing(monkeypatch, call, errno.EMFILE):
            assert writer.offer(block(1))
            wait_until(lambda: writer.state.name == "stopped")
            assert "no file can be opened, Too many open files" in writer.state.reason
        wait_until(lambda: writer.counts.committed == 3)
        assert writer.state.name == "writing"
    assert _streams(tmp_path / "s") == [1]


def test_a_disk_below_its_reserve_is_full(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with Writer(tmp_path / "s", limits=QUICK) as writer:
        with monkeypatch.context() as patched:
            patched.setattr(LocalDisk, "free_nbytes", lambda _: 10)
            writer.offer(block(1))
            wait_until(lambda: "10 bytes are free" in writer.state.reason)
        writer.flush()


@pytest.mark.parametrize("call", ["write", "sync", "rename", "sync_folder"])
def test_a_broken_disk_fails_the_writer_for_good_and_every_row_is_accounted_for(
    call: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    writer = Writer(tmp_path / "s", limits=QUICK)
    writer.offer(block(1))
    writer.flush()
    with failing(monkeypatch, call, errno.EIO):
        writer.offer(block(2))
        wait_until(lambda: writer.state.name == "failed")
        wait_until(lambda: writer.counts.lost == 3)
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
    assert [check.fault for check in verify(LocalDisk(tmp_path / "s")) if check.fault] == []


def test_a_partly_written_line_is_removed_and_written_again_later(
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
            wait_until(lambda: writer.state.name == "stopped")
            assert _streams(tmp_path / "s") == []
        writer.flush()
    assert _streams(tmp_path / "s") == [1]
    with Writer(tmp_path / "s") as again:
        assert str(again.recovery) == "nothing to recover"


def test_closing_on_a_full_disk_gives_up_and_counts_what_was_lost(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    writer = Writer(tmp_path / "s", limits=QUICK)
    with failing(monkeypatch, "create", errno.EDQUOT):
        writer.offer(block(1))
        wait_until(lambda: writer.state.name == "stopped")
        with pytest.raises(StoreStoppedError, match="3 accepted rows are lost: the disk is full"):
            writer.close(timeout_s=0.01)
    assert writer.counts.lost == 3


def test_flush_on_a_full_disk_says_why(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with Writer(tmp_path / "s", limits=QUICK) as writer:
        with failing(monkeypatch, "create", errno.ENOSPC):
            writer.offer(block(1))
            wait_until(lambda: writer.state.name == "stopped")
            with pytest.raises(StoreStoppedError, match="3 rows are not committed: the disk is f"):
                writer.flush(timeout_s=0.01)
        writer.flush()


def test_a_shard_that_cannot_be_made_fails_the_writer_with_a_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise MemoryError("no room")

    writer = Writer(tmp_path / "s", limits=QUICK)
    with monkeypatch.context() as patched:
        patched.setattr("clairai.store.commit_shards.Committer.seal", fail)
        writer.offer(block(1))
        wait_until(lambda: writer.counts.lost == 3)
    with pytest.raises(StoreStoppedError, match="could not be made, MemoryError: no room"):
        writer.close()


def test_a_folder_that_cannot_be_made_ready_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with (
        failing(monkeypatch, "create", errno.ENOSPC),
        pytest.raises(StoreStoppedError, match="cannot be made ready, No space left"),
    ):
        Writer(tmp_path / "s")
    with Writer(tmp_path / "s") as writer:
        writer.offer(block(1))
    with pytest.raises(StoreStoppedError, match="the writer is closed"):
        writer.flush()
    assert not writer.offer(block(2))
