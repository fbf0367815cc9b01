"""A local disk writes files whole and in order, and never over an existing one."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from clairai.store import disk
from clairai.store.disk import LocalDisk


@pytest.mark.parametrize("at_once", [1, 3, 1 << 20])
def test_every_byte_is_written_in_order_however_little_the_kernel_writes_at_once(
    at_once: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = os.writev

    def partly(descriptor: int, views: list[memoryview]) -> int:
        assert len(views) <= 4
        return real(descriptor, [views[0][:at_once], *(views[1:] if at_once > 3 else [])])

    monkeypatch.setattr(disk, "FLUSH_NBYTES", 16)
    monkeypatch.setattr(disk, "IOV_MAX", 4)
    monkeypatch.setattr("os.writev", partly)
    pieces = [bytes([n]) * n for n in range(12)] + [bytes(100), b""]
    file = LocalDisk(tmp_path).create("x", 0)
    file.write(pieces)
    file.sync()
    file.close()
    assert (tmp_path / "x").read_bytes() == b"".join(pieces)


def test_an_existing_file_is_never_overwritten(tmp_path: Path) -> None:
    folder = LocalDisk(tmp_path)
    folder.create("x", 10).close()
    with pytest.raises(FileExistsError):
        folder.create("x", 10)
    assert folder.names() == ["x"]
    assert folder.nbytes("x") == 10


def test_a_file_that_a_writer_renames_meanwhile_is_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = LocalDisk(tmp_path)
    for name in ("kept", "shard.tmp"):
        folder.create(name, 10).close()
    real = os.scandir

    @contextmanager
    def renaming(descriptor: int) -> Iterator[list[os.DirEntry[str]]]:
        with real(descriptor) as entries:
            listed = list(entries)
        (tmp_path / "shard.tmp").rename(tmp_path / "shard")
        yield listed

    monkeypatch.setattr("os.scandir", renaming)
    assert folder.names() == ["kept"]


def test_a_file_without_room_is_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.posix_fallocate", full)
    with pytest.raises(OSError, match="No space"):
        LocalDisk(tmp_path).create("x", 10)
    assert os.listdir(tmp_path) == []
