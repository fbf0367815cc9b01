"""Takes a path; gives a private folder with one writer, and the names of the files in it.

Names are ours alone: a random epoch of the writer, a counter, and for some layouts the stream and
the point. Nothing that a client says is ever part of a name.
"""

from __future__ import annotations

import fcntl
import os
import re
import secrets
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from clairai.errors import StoreBusyError, StoreError
from clairai.points import quote
from clairai.store.disk import LocalDisk, cause

MANIFEST: Final = "manifest"
LOCK: Final = "lock"
TEMPORARY: Final = ".tmp"
ORPHAN: Final = ".orphan"
_SHARD: Final = re.compile(
    r"[0-9a-f]{16}-[0-9]{8}(-[0-9a-f]{16}(-[a-z_]{1,16}\.[0-9]{1,5})?)?\.(safetensors|npz)",
    re.ASCII,
)


def is_shard(name: str) -> bool:
    return _SHARD.fullmatch(name) is not None


@dataclass
class Names:
    """The names one writer gives to its shards; no two writers share one."""

    epoch: str = field(default_factory=lambda: secrets.token_hex(8))
    counter: int = 0

    def next(self, tail: str, suffix: str) -> str:
        self.counter += 1
        return f"{self.epoch}-{self.counter:08d}{tail}.{suffix}"


@contextmanager
def claimed(path: str | os.PathLike[str]) -> Iterator[LocalDisk]:
    """The folder, made if it is not there, with no other writer in it until the end."""
    _make(Path(path))
    disk = LocalDisk(path)
    try:
        with _locked(disk):
            yield disk
    finally:
        disk.close()


def _make(path: Path) -> None:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.mkdir(mode=0o700, exist_ok=True)
        mode = path.lstat().st_mode
    except (OSError, ValueError) as error:
        raise StoreError(
            f"{quote(str(path), 200)} cannot be made a folder of captures, {cause(error)}; "
            "give a folder of yours"
        ) from None
    if stat.S_ISDIR(mode) and mode & 0o022:
        raise StoreError(
            f"{quote(str(path), 200)} can be written by others (mode {mode & 0o777:03o}); "
            "chmod go-w it"
        )


@contextmanager
def _locked(disk: LocalDisk) -> Iterator[None]:
    """The kernel lets go of it however the writer ends."""
    try:
        descriptor = disk.open_or_make(LOCK)
    except OSError as error:
        raise StoreError(f"{quote(str(disk.path), 200)} cannot be locked, {cause(error)}") from None
    try:
        _take(descriptor, disk.path)
        yield
    finally:
        os.close(descriptor)


def _take(descriptor: int, path: Path) -> None:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise StoreBusyError(
            f"{quote(str(path), 200)} has a writer already; end it, or write to another folder"
        ) from None
