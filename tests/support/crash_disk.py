"""A disk in memory that forgets in a crash whatever was not synced.

It is as unkind as POSIX allows: of the unsynced bytes of a file, a crash keeps all, none, some or
zeros; of the names changed since the folder was last synced, any subset. The crash comes when a
given number of operations is used up.
"""

from __future__ import annotations

import errno
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from clairai.store.disk import Buffer


class CrashError(BaseException):
    """The machine is off."""


@dataclass
class Inode:
    """A file's bytes: as they are, and as they were when they were last synced."""

    data: bytes = b""
    synced: bytes = b""


@dataclass
class CrashDisk:
    """`operations_left` counts down; the operation after the last one raises CrashError."""

    operations_left: int = 1 << 60
    room: int = 1 << 60
    files: dict[str, Inode] = field(default_factory=dict)
    synced_files: dict[str, Inode] = field(default_factory=dict)
    changes: list[Callable[[dict[str, Inode]], None]] = field(default_factory=list)
    done: list[str] = field(default_factory=list)

    def tick(self, what: str) -> None:
        if self.operations_left <= 0:
            raise CrashError
        self.operations_left -= 1
        self.done.append(what)

    def _change(self, change: Callable[[dict[str, Inode]], None]) -> None:
        change(self.files)
        self.changes.append(change)

    def create(self, name: str, nbytes: int) -> CrashFile:
        self.tick("create")
        if name in self.files:
            raise FileExistsError(errno.EEXIST, "exists")
        if nbytes > self.free_nbytes():
            raise OSError(errno.ENOSPC, "No space left on device")
        inode = Inode()
        self._change(lambda files: files.__setitem__(name, inode))
        return CrashFile(self, inode)

    def append(self, name: str) -> CrashFile:
        return CrashFile(self, self.files[name])

    def truncate(self, name: str, nbytes: int) -> None:
        self.tick("truncate")
        inode = self.files[name]
        inode.data = inode.synced = inode.data[:nbytes]

    def overwrite(self, name: str, offset: int, data: bytes) -> None:
        self.tick("overwrite")
        inode = self.files[name]
        inode.data = inode.synced = inode.data[:offset] + data + inode.data[offset + len(data) :]

    def rename(self, old: str, new: str) -> None:
        self.tick("rename")
        inode = self.files[old]

        def change(files: dict[str, Inode]) -> None:
            files.pop(old, None)
            files[new] = inode

        self._change(change)

    def remove(self, name: str) -> None:
        self.tick("remove")
        if name not in self.files:
            raise FileNotFoundError(errno.ENOENT, "not there")

        def change(files: dict[str, Inode]) -> None:
            files.pop(name, None)

        self._change(change)

    def sync_folder(self) -> None:
        self.tick("sync_folder")
        self.synced_files, self.changes = dict(self.files), []

    def names(self) -> list[str]:
        return sorted(self.files)

    def nbytes(self, name: str) -> int:
        return len(self.files[name].data)

    def inode(self, name: str) -> int:
        if name not in self.files:
            raise FileNotFoundError(errno.ENOENT, "not there")
        return id(self.files[name])

    def require_claim(self) -> None:
        """No other process sees this disk."""

    def read(self, name: str) -> bytes:
        return self.files[name].data

    def view(self, name: str) -> memoryview:
        if name not in self.files:
            raise FileNotFoundError(errno.ENOENT, "not there")
        return memoryview(self.files[name].data)

    def core_names(self) -> list[str]:
        return []

    def core_disk(self, name: str) -> CrashDisk:
        raise FileNotFoundError(errno.ENOENT, f"{name} is not there")

    def free_nbytes(self) -> int:
        return self.room - sum(len(inode.data) for inode in self.files.values())

    def after_crash(self, fate: Fate) -> CrashDisk:
        """Return the disk as the next boot finds it."""
        files = dict(self.synced_files)
        for change in self.changes:
            if fate.keeps_name():
                change(files)
        kept = {name: fate.kept(inode) for name, inode in files.items()}
        found = {name: Inode(data, data) for name, data in kept.items()}
        return CrashDisk(room=self.room, files=found, synced_files=dict(found))


@dataclass
class CrashFile:
    """A file that is being written."""

    disk: CrashDisk
    inode: Inode

    def write(self, pieces: Sequence[Buffer]) -> None:
        for piece in pieces:
            self.disk.tick("write")
            room = self.disk.free_nbytes()
            self.inode.data += bytes(piece)[: max(room, 0)]
            if len(piece) > room:
                raise OSError(errno.ENOSPC, "No space left on device")

    def sync(self) -> None:
        self.disk.tick("sync")
        self.inode.synced = self.inode.data

    def close(self) -> None:
        pass


@dataclass
class Fate:
    """What a crash does to unsynced names and bytes."""

    keeps_name: Callable[[], bool]
    kept: Callable[[Inode], bytes]


def _zeros(inode: Inode) -> bytes:
    return inode.synced.ljust(len(inode.data), b"\0")


def _half(inode: Inode) -> bytes:
    return inode.data[: (len(inode.synced) + len(inode.data) + 1) // 2]


def fates() -> list[Fate]:
    """The simple ones: nothing survives, everything does (kill -9), or only names or bytes."""
    old, new = (lambda inode: inode.synced), (lambda inode: inode.data)
    yes, no = (lambda: True), (lambda: False)
    kept = (old, new, _zeros, _half)
    return [Fate(names, data) for names in (yes, no) for data in kept]


def random_fate(source: random.Random) -> Fate:
    """Keep any subset of the names, and any prefix of the bytes, maybe with a hole of zeros."""

    def kept(inode: Inode) -> bytes:
        start, end = sorted((len(inode.synced), len(inode.data)))
        cut = source.randint(start, end)
        data = bytearray(inode.data[:cut] if source.random() < 0.7 else _zeros(inode))
        if source.random() < 0.3 and cut - start >= 2:
            hole = source.randint(start, cut - 2)
            data[hole:cut] = bytes(cut - hole)
        return inode.synced if len(inode.data) < start else bytes(data)

    return Fate(lambda: source.random() < 0.5, kept)
