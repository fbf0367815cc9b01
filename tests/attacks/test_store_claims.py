"""Whatever is done to a folder under its writer: there is one writer, and readers can read."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import signal
from collections.abc import Callable
from pathlib import Path

import pytest

from clairai.errors import StoreBusyError, StoreError, StoreStoppedError
from clairai.store import read
from clairai.store.disk import LocalDisk, claim_folder
from clairai.store.write import Writer
from tests.support.faulty_disk import QUICK
from tests.support.row_blocks import block


def _streams(folder: Path) -> list[int]:
    return sorted(request.stream for request in read.open(folder).requests())


@pytest.mark.attack(500)
def test_a_second_writer_stays_out_though_the_lock_was_deleted_under_the_first(
    tmp_path: Path,
) -> None:
    with Writer(tmp_path / "s") as writer:
        writer.offer(block(1))
        writer.flush()
        (tmp_path / "s" / "lock").unlink()
        with pytest.raises(StoreBusyError, match="has a writer already"):
            Writer(tmp_path / "s")
    assert _streams(tmp_path / "s") == [1]


def _delete(lock: Path) -> None:
    lock.unlink()


def _replace_by_file(lock: Path) -> None:
    lock.unlink()
    lock.touch(mode=0o600)


def _replace_by_link(lock: Path) -> None:
    lock.rename(lock.with_name("kept"))
    lock.symlink_to("kept")


def _replace_by_pipe(lock: Path) -> None:
    lock.unlink()
    os.mkfifo(lock)


def _replace_by_folder(lock: Path) -> None:
    lock.unlink()
    lock.mkdir()


CHANGES = (_delete, _replace_by_file, _replace_by_link, _replace_by_pipe, _replace_by_folder)


@pytest.mark.attack(501)
@pytest.mark.parametrize("change", CHANGES)
def test_a_writer_whose_lock_was_removed_or_replaced_stops_and_says_so(
    change: Callable[[Path], None], tmp_path: Path
) -> None:
    writer = Writer(tmp_path / "s", limits=QUICK)
    writer.offer(block(1))
    writer.flush()
    change(tmp_path / "s" / "lock")
    writer.offer(block(2))
    with pytest.raises(StoreStoppedError, match=r"lock of .* was removed or replaced"):
        writer.flush()
    assert writer.state.name == "failed"
    with pytest.raises(StoreStoppedError, match="accepted rows are lost"):
        writer.close()
    with contextlib.suppress(OSError):
        (tmp_path / "s" / "lock").unlink()
    if change is not _replace_by_folder:
        assert _streams(tmp_path / "s") == [1]


def _move_away(folder: Path) -> None:
    folder.rename(folder.with_name("moved"))


def _swap(folder: Path) -> None:
    folder.rename(folder.with_name("moved"))
    folder.mkdir(mode=0o700)


def _link_back(folder: Path) -> None:
    folder.rename(folder.with_name("moved"))
    folder.symlink_to("moved")


@pytest.mark.attack(502)
@pytest.mark.parametrize("change", [_move_away, _swap, _link_back])
def test_a_writer_whose_folder_was_moved_or_swapped_writes_nothing_more(
    change: Callable[[Path], None], tmp_path: Path
) -> None:
    writer = Writer(tmp_path / "s", limits=QUICK)
    writer.offer(block(1))
    writer.flush()
    change(tmp_path / "s")
    before = sorted(os.listdir(tmp_path / "moved"))
    writer.offer(block(2))
    with pytest.raises(StoreStoppedError, match="was moved, removed or replaced"):
        writer.flush()
    with pytest.raises(StoreStoppedError, match="accepted rows are lost"):
        writer.close()
    assert sorted(os.listdir(tmp_path / "moved")) == before
    assert _streams(tmp_path / "moved") == [1]


def _cut(manifest: Path) -> None:
    with manifest.open("r+b") as file:
        file.truncate(len(file.readline()))


def _put_back_an_older_copy(manifest: Path) -> None:
    first = manifest.read_bytes().splitlines(keepends=True)[0]
    manifest.unlink()
    manifest.write_bytes(first)


def _replace_by_an_equal_file(manifest: Path) -> None:
    data = manifest.read_bytes()
    manifest.rename(manifest.with_name("kept"))
    manifest.write_bytes(data)


def _append(manifest: Path) -> None:
    with manifest.open("ab") as file:
        file.write(b"more\n")


@pytest.mark.attack(503)
@pytest.mark.parametrize(
    "change", [_delete, _cut, _put_back_an_older_copy, _replace_by_an_equal_file, _append]
)
def test_nothing_is_added_to_a_manifest_that_somebody_else_has_changed(
    change: Callable[[Path], None], tmp_path: Path
) -> None:
    writer = Writer(tmp_path / "s", limits=QUICK)
    writer.offer(block(1))
    writer.flush()
    change(manifest := tmp_path / "s" / "manifest")
    changed = manifest.read_bytes() if manifest.exists() else None
    writer.offer(block(2))
    with pytest.raises(StoreStoppedError, match="manifest was removed, cut, replaced or written"):
        writer.flush()
    with pytest.raises(StoreStoppedError, match="accepted rows are lost"):
        writer.close()
    assert (manifest.read_bytes() if manifest.exists() else None) == changed
    shards = [name for name in os.listdir(tmp_path / "s") if name.endswith(".safetensors")]
    assert len(shards) == 1  # nothing is left of the commit that was given up


@pytest.mark.attack(504)
@pytest.mark.parametrize("kind", ["link", "pipe", "folder"])
def test_a_lock_that_is_no_plain_file_is_refused_at_once(kind: str, tmp_path: Path) -> None:
    (tmp_path / "s").mkdir(mode=0o700)
    lock = tmp_path / "s" / "lock"
    (tmp_path / "victim").write_text("mine")
    if kind == "link":
        lock.symlink_to(tmp_path / "victim")
    elif kind == "pipe":
        os.mkfifo(lock)
    else:
        lock.mkdir()
    with pytest.raises(StoreError, match=r"cannot be locked|not a plain file"):
        Writer(tmp_path / "s")
    assert (tmp_path / "victim").read_text() == "mine"


@pytest.mark.attack(505)
def test_a_lock_that_is_replaced_while_it_is_taken_is_taken_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, taken = fcntl.flock, []

    def replace_once(descriptor: int, operation: int) -> None:
        real(descriptor, operation)
        taken.append(os.fstat(descriptor).st_ino)
        if len(taken) == 2:  # the folder, then the file
            _replace_by_link(tmp_path / "s" / "lock")
            (tmp_path / "s" / "lock").unlink()

    monkeypatch.setattr("fcntl.flock", replace_once)
    with claim_folder(tmp_path / "s") as disk:
        disk.require_claim()
        assert taken[-1] == (tmp_path / "s" / "lock").stat().st_ino != taken[1]


@pytest.mark.attack(506)
def test_a_process_forked_from_a_writer_does_not_keep_its_folder_locked(tmp_path: Path) -> None:
    reading, writing = os.pipe()
    with claim_folder(tmp_path / "s"):
        child = os.fork()
        if not child:  # lives on until it is killed
            os.write(writing, b"x")
            signal.pause()
        assert os.read(reading, 1) == b"x"
        with pytest.raises(StoreBusyError):
            Writer(tmp_path / "s")
    try:
        Writer(tmp_path / "s").close()
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)


@pytest.mark.attack(507)
@pytest.mark.parametrize("code", [errno.ENOLCK, errno.EOPNOTSUPP, errno.EINVAL])
def test_a_folder_that_cannot_be_locked_is_refused_with_the_way_out(
    code: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr("fcntl.flock", refuse)
    with pytest.raises(StoreError, match=r"cannot be locked.*supports flock"):
        Writer(tmp_path / "s")


@pytest.mark.attack(508)
def test_where_folders_have_no_locks_the_first_of_two_writers_is_fenced_off(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on NFS, where the file is locked and the folder is not."""
    real = fcntl.flock

    def lock_files(descriptor: int, operation: int) -> None:
        if os.path.isdir(f"/proc/self/fd/{descriptor}"):
            raise OSError(errno.EBADF, "Bad file descriptor")
        real(descriptor, operation)

    monkeypatch.setattr("fcntl.flock", lock_files)
    first = Writer(tmp_path / "s", limits=QUICK)
    first.offer(block(1))
    first.flush()
    with pytest.raises(StoreBusyError):
        Writer(tmp_path / "s")
    (tmp_path / "s" / "lock").unlink()
    with Writer(tmp_path / "s") as second:
        second.offer(block(2))
        second.flush()
        first.offer(block(3))
        with pytest.raises(StoreStoppedError, match="removed or replaced"):
            first.flush()
    with pytest.raises(StoreStoppedError):
        first.close()
    assert _streams(tmp_path / "s") == [1, 2]


def test_folders_that_are_made_are_synced_into_the_ones_that_hold_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, synced = os.fsync, []

    def note(descriptor: int) -> None:
        synced.append(os.readlink(f"/proc/self/fd/{descriptor}"))
        real(descriptor)

    monkeypatch.setattr("os.fsync", note)
    with claim_folder(tmp_path / "a" / "b" / "s"):
        pass
    assert synced == [str(tmp_path), str(tmp_path / "a"), str(tmp_path / "a" / "b")]
    assert isinstance(LocalDisk(tmp_path / "a" / "b" / "s").names(), list)
