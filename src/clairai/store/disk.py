"""A folder of captures on disk: its lock, the names of its files, and the operations on them.

This is the only module of the store that touches the filesystem; tests replace it by a disk that
forgets whatever was not synced. Names are resolved below one open folder, and links are never
followed. A file's name consists of the writer's random epoch, a counter, and for some layouts the
stream and the point: nothing that a client says becomes part of it.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import mmap
import os
import re
import secrets
import stat
import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, Protocol

from clairai.errors import (
    StoreBusyError,
    StoreError,
    StoreStoppedError,
    describe_os_error,
    quote,
)
from clairai.store.core_folders import sort_core_names

IOV_MAX: Final = 1024  # buffers of one writev(2)
FLUSH_NBYTES: Final = 8 << 20  # how often the kernel is asked to start writing
MAX_READ_NBYTES: Final = 1 << 30
_NEW: Final = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
_OLD: Final = os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK  # opening a FIFO must not wait
MANIFEST: Final = "manifest"
LOCK: Final = "lock"
TEMPORARY: Final = ".tmp"
ORPHAN: Final = ".orphan"
_LOCK_TRIES: Final = 8
# NFS makes a flock a lock of bytes, which a folder has none of; others have no flock at all.
_NO_FOLDER_LOCKS: Final = (errno.EBADF, errno.EINVAL, errno.ENOLCK, errno.EOPNOTSUPP, errno.EISDIR)
_SHARD: Final = re.compile(
    r"[0-9a-f]{16}-[0-9]{8}(-[0-9a-f]{16}(-[a-z_]{1,16}\.[0-9]{1,5})?)?\.(safetensors|npz)",
    re.ASCII,
)
Buffer = bytes | memoryview


class WritableFile(Protocol):
    """A file that is being written."""

    def write(self, pieces: Sequence[Buffer]) -> None: ...
    def sync(self) -> None: ...
    def close(self) -> None: ...


class ByteSource(Protocol):
    """The bytes of a file that is only read: mapped, or read when they are asked for."""

    def __len__(self) -> int: ...
    def __getitem__(self, part: slice, /) -> memoryview: ...


class ReadableDisk(Protocol):
    """A folder that is read."""

    def names(self) -> list[str]: ...
    def nbytes(self, name: str) -> int: ...
    def inode(self, name: str) -> int: ...
    def read(self, name: str) -> bytes: ...
    def view(self, name: str) -> ByteSource: ...
    def core_names(self) -> list[str]: ...
    def core_disk(self, name: str) -> ReadableDisk: ...


class Disk(ReadableDisk, Protocol):
    """A folder. A crash may undo what a call did, until the matching sync has returned."""

    def create(self, name: str, nbytes: int) -> WritableFile: ...
    def append(self, name: str) -> WritableFile: ...
    def truncate(self, name: str, nbytes: int) -> None: ...
    def overwrite(self, name: str, offset: int, data: bytes) -> None: ...
    def rename(self, old: str, new: str) -> None: ...
    def remove(self, name: str) -> None: ...
    def sync_folder(self) -> None: ...
    def free_nbytes(self) -> int: ...
    def require_claim(self) -> None: ...


class LocalFile:
    """A descriptor open for writing."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self._flushed = self._written = 0

    def write(self, pieces: Sequence[Buffer]) -> None:
        for batch in _batches(pieces):
            views = batch
            while views:
                self._written += (count := os.writev(self._descriptor, views))
                views = _unwritten(views, count)
            self._start_flush()

    def _start_flush(self) -> None:
        # DONTNEED starts writing dirty pages back, so that the disk works while later pieces are
        # copied, and keeps a capture from pushing the model's files out of the page cache.
        while self._written - self._flushed >= FLUSH_NBYTES:
            os.posix_fadvise(self._descriptor, self._flushed, FLUSH_NBYTES, os.POSIX_FADV_DONTNEED)
            self._flushed += FLUSH_NBYTES

    def sync(self) -> None:
        os.fsync(self._descriptor)

    def close(self) -> None:
        if self._descriptor >= 0:
            os.close(self._descriptor)
        self._descriptor = -1


def _batches(pieces: Sequence[Buffer]) -> Iterator[list[memoryview]]:
    """Cut the pieces into batches of at most FLUSH_NBYTES and IOV_MAX buffers, in order."""
    batch: list[memoryview] = []
    room = FLUSH_NBYTES
    for piece in pieces:
        view = memoryview(piece).cast("B")
        while len(view):
            batch.append(view[:room])
            room -= len(batch[-1])
            view = view[len(batch[-1]) :]
            if not room or len(batch) == IOV_MAX:
                yield batch
                batch, room = [], FLUSH_NBYTES
    if batch:
        yield batch


def _unwritten(views: list[memoryview], count: int) -> list[memoryview]:
    """The buffers without their first `count` bytes."""
    for index, view in enumerate(views):
        if count < len(view):
            return [view[count:], *views[index + 1 :]]
        count -= len(view)
    return []


class LocalDisk:
    """A folder of this machine, kept open."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(os.path.abspath(path))
        try:
            self._folder = os.open(path, os.O_RDONLY | os.O_DIRECTORY | _OLD)
        except (OSError, ValueError) as error:
            raise StoreError(
                f"{quote(os.fspath(path), 200)} cannot be opened as a folder of captures, "
                f"{describe_os_error(error)}; links are not followed"
            ) from None
        self._descriptors = [self._folder]
        self.close = weakref.finalize(self, _close_all, self._descriptors)  # also at collection

    def create(self, name: str, nbytes: int) -> LocalFile:
        descriptor = os.open(name, _NEW, 0o600, dir_fd=self._folder)
        try:
            if nbytes:
                os.posix_fallocate(descriptor, 0, nbytes)  # fails here if the disk is full
        except BaseException:
            os.close(descriptor)
            os.unlink(name, dir_fd=self._folder)
            raise
        return LocalFile(descriptor)

    def append(self, name: str) -> LocalFile:
        return LocalFile(self._open(name, os.O_WRONLY | os.O_APPEND))

    def truncate(self, name: str, nbytes: int) -> None:
        descriptor = self._open(name, os.O_WRONLY)
        try:
            os.ftruncate(descriptor, nbytes)
            os.fsync(descriptor)
        finally:
            os.close(descriptor)

    def overwrite(self, name: str, offset: int, data: bytes) -> None:
        """Put these bytes in the place of as many others, and sync them."""
        descriptor = self._open(name, os.O_WRONLY)
        try:
            if os.pwrite(descriptor, data, offset) != len(data):
                raise OSError(errno.EIO, "a part of some bytes was written")
            os.fsync(descriptor)
        finally:
            os.close(descriptor)

    def rename(self, old: str, new: str) -> None:
        os.rename(old, new, src_dir_fd=self._folder, dst_dir_fd=self._folder)

    def remove(self, name: str) -> None:
        os.unlink(name, dir_fd=self._folder)

    def sync_folder(self) -> None:
        os.fsync(self._folder)

    def names(self) -> list[str]:
        """Return the names of all files. Raises StoreError if one is a link or a device.

        A writer may rename or remove files meanwhile: those that are gone are left out.
        """
        listed = []
        with os.scandir(self._folder) as entries:
            for entry in entries:
                with contextlib.suppress(FileNotFoundError):
                    listed.append((entry.name, entry.stat(follow_symlinks=False).st_mode))
        for name, mode in listed:
            if not stat.S_ISREG(mode) and not stat.S_ISDIR(mode):
                raise StoreError(
                    f"{quote(name)} in {quote(str(self.path), 200)} is a link or a device; a "
                    "folder of captures holds plain files: remove it"
                )
        return sorted(name for name, mode in listed if stat.S_ISREG(mode))

    def core_names(self) -> list[str]:
        """Return the names of the folders of engine cores below this one, by their numbers."""
        with os.scandir(self._folder) as entries:
            found = [one.name for one in entries if one.is_dir(follow_symlinks=False)]
        return sort_core_names(found)

    def core_disk(self, name: str) -> LocalDisk:
        return LocalDisk(self.path / name)

    def nbytes(self, name: str) -> int:
        return os.stat(name, dir_fd=self._folder, follow_symlinks=False).st_size

    def inode(self, name: str) -> int:
        return os.stat(name, dir_fd=self._folder, follow_symlinks=False).st_ino

    def read(self, name: str) -> bytes:
        """Return all of a file, synced first: no crash can undo what was read."""
        descriptor = self._open(name, os.O_RDONLY)
        try:
            nbytes = os.fstat(descriptor).st_size
            if nbytes > MAX_READ_NBYTES:
                raise StoreError(f"{quote(name)} has {nbytes} bytes, may have {MAX_READ_NBYTES}")
            with open(descriptor, "rb", closefd=False) as file:
                data = file.read(nbytes)
            _sync_if_possible(descriptor)
            return data
        finally:
            os.close(descriptor)

    def view(self, name: str) -> ByteSource:
        descriptor = self._open(name, os.O_RDONLY)
        try:
            if os.fstat(descriptor).st_size == 0:
                return memoryview(b"")
            return memoryview(mmap.mmap(descriptor, 0, access=mmap.ACCESS_READ))
        finally:
            os.close(descriptor)

    def free_nbytes(self) -> int:
        status = os.fstatvfs(self._folder)
        return status.f_bavail * status.f_frsize

    def require_claim(self) -> None:
        """Nothing: this folder was not claimed."""

    def _open(self, name: str, flags: int) -> int:
        descriptor = os.open(name, flags | _OLD, 0o600, dir_fd=self._folder)
        if stat.S_ISREG(os.fstat(descriptor).st_mode):
            return descriptor
        os.close(descriptor)
        raise StoreError(f"{quote(name)} is not a plain file; remove it from the folder")


class UnmappedDisk(LocalDisk):
    """A folder whose files are read in parts and not mapped, for processes that serve others.

    Reading a mapped file that somebody cuts, or whose disk fails, ends the process with SIGBUS;
    here it is an OSError. And mapped pages that were read count as memory of the process.
    """

    def view(self, name: str) -> ByteSource:
        return UnmappedFile(self, name)

    def core_disk(self, name: str) -> UnmappedDisk:
        return UnmappedDisk(self.path / name)

    def open_for_reading(self, name: str) -> int:
        """Return a descriptor, which the caller closes."""
        return self._open(name, os.O_RDONLY)


class UnmappedFile:
    """The bytes of a file, read when they are asked for. Holds no descriptor."""

    def __init__(self, disk: UnmappedDisk, name: str) -> None:
        self._disk, self._name = disk, name
        descriptor = disk.open_for_reading(name)
        try:
            self._identity = _identity(descriptor)
        finally:
            os.close(descriptor)

    def __len__(self) -> int:
        return self._identity[-1]

    def __getitem__(self, part: slice) -> memoryview:
        """Raises OSError if they cannot be read, or if the file is another one now."""
        first, end, _ = part.indices(len(self))
        descriptor = self._disk.open_for_reading(self._name)
        try:
            if _identity(descriptor) != self._identity:
                raise OSError(errno.ESTALE, f"{self._name} was replaced while it was read")
            return memoryview(_read_exactly(descriptor, first, max(end - first, 0)))
        finally:
            os.close(descriptor)


def _identity(descriptor: int) -> tuple[int, int, int]:
    found = os.fstat(descriptor)
    return found.st_dev, found.st_ino, found.st_size


def _read_exactly(descriptor: int, offset: int, nbytes: int) -> bytes:
    """Linux reads 2 GiB less a page at once, and may read less."""
    parts, missing = [], nbytes
    while missing:
        parts.append(os.pread(descriptor, missing, offset + nbytes - missing))
        missing -= len(parts[-1])
        if not parts[-1]:
            raise OSError(errno.EIO, "a file ended early")
    return parts[0] if len(parts) == 1 else b"".join(parts)


def _sync_if_possible(descriptor: int) -> None:
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in (errno.EROFS, errno.EINVAL, errno.ENOSYS):
            raise  # the others mean that nothing can be written here, so nothing can be undone


def has_captures(path: str | os.PathLike[str]) -> bool:
    """Return whether something was ever committed here, or in the folder of an engine core."""
    folder = Path(path)
    try:
        names = sort_core_names(os.listdir(folder))
    except OSError:
        return False
    return any((folder / name / MANIFEST).is_file() for name in ("", *names))


def is_shard(name: str) -> bool:
    return _SHARD.fullmatch(name) is not None


@dataclass
class ShardNames:
    """Gives the shards of one writer their names; no two writers give the same."""

    epoch: str = field(default_factory=lambda: secrets.token_hex(8))
    counter: int = 0

    def next(self, tail: str, suffix: str) -> str:
        self.counter += 1
        return f"{self.epoch}-{self.counter:08d}{tail}.{suffix}"


class ClaimedDisk(LocalDisk):
    """A folder that no other writer can claim while this one lives.

    The lock is on the open folder itself, which cannot be replaced as a file in it can. The file
    `lock` is locked too: for clairai 0.1, which knows only that, and for NFS, which has only that.
    The kernel releases both, however the process ends.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        super().__init__(path)
        try:
            self._lock_folder()
            self._lock = self._lock_file()
        except BaseException:
            self.close()
            raise
        # A process that is forked from this one must not keep the folder locked after its end.
        forget = weakref.WeakMethod(self._forget)
        os.register_at_fork(after_in_child=lambda: (call := forget()) and call())

    def require_claim(self) -> None:
        """Raise StoreStoppedError if the path leads to another folder now, or to another lock."""
        # Clients see these reasons: they name no path.
        if not _is_same(self._folder, self.path):
            raise StoreStoppedError(
                "the folder of captures was moved, removed or replaced while it was written to; "
                "put it back, then start again"
            )
        if not _is_same(self._lock, LOCK, self._folder):
            raise StoreStoppedError(
                "the file lock of the folder of captures was removed or replaced while it was "
                "written to; leave it alone, and start again"
            )

    def _lock_folder(self) -> None:
        try:
            _take_lock(self._folder, self.path)
        except OSError as error:
            if error.errno not in _NO_FOLDER_LOCKS:
                raise _not_locked(self.path, error) from None

    def _lock_file(self) -> int:
        """Return a locked descriptor of the file that is named `lock` now."""
        for _ in range(_LOCK_TRIES):
            try:
                descriptor = self._open(LOCK, os.O_RDWR | os.O_CREAT)
                self._descriptors.append(descriptor)
                _take_lock(descriptor, self.path)
            except OSError as error:
                raise _not_locked(self.path, error) from None
            if _is_same(descriptor, LOCK, self._folder):
                return descriptor
        raise StoreBusyError(f"somebody keeps replacing {LOCK} in {quote(str(self.path), 200)}")

    def _forget(self) -> None:
        self._folder = self._lock = -1
        self.close()


def _close_all(descriptors: list[int]) -> None:
    for descriptor in descriptors:
        os.close(descriptor)


def _is_same(descriptor: int, path: str | Path, folder: int | None = None) -> bool:
    """Whether this path still leads to the file that is open."""
    try:
        found = os.stat(path, dir_fd=folder, follow_symlinks=False)
    except FileNotFoundError:
        return False
    return os.path.samestat(found, os.fstat(descriptor))


def _take_lock(descriptor: int, path: Path) -> None:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise StoreBusyError(
            f"{quote(str(path), 200)} has a writer already; end it, or write to another folder"
        ) from None


def _not_locked(path: Path, error: OSError) -> StoreError:
    return StoreError(
        f"{quote(str(path), 200)} cannot be locked, {describe_os_error(error)}; give a folder on "
        "a disk of this machine, or on one that supports flock"
    )


@contextmanager
def claim_folder(path: str | os.PathLike[str]) -> Iterator[ClaimedDisk]:
    """Open a folder, made if it is not there, and keep other writers out until the end."""
    folder = Path(os.path.abspath(path))
    if sort_core_names([folder.name]):
        _make_folder(folder.parent)
    _make_folder(folder)
    disk = ClaimedDisk(path)
    try:
        yield disk
    finally:
        disk.close()


def _make_folder(path: Path) -> None:
    try:
        for missing in reversed([one for one in path.parents if not one.exists()]):
            _make_durable_folder(missing, 0o777)
        _make_durable_folder(path, 0o700)
        mode = path.lstat().st_mode
    except (OSError, ValueError) as error:
        raise StoreError(
            f"{quote(str(path), 200)} cannot be made a folder of captures, "
            f"{describe_os_error(error)}; give a folder of yours"
        ) from None
    if stat.S_ISDIR(mode) and mode & 0o022:
        raise StoreError(
            f"{quote(str(path), 200)} can be written by others (mode {mode & 0o777:03o}); "
            "chmod go-w it"
        )


def _make_durable_folder(path: Path, mode: int) -> None:
    """Make a folder, and sync the one that holds its name: no crash can undo what is in it."""
    try:
        path.mkdir(mode=mode)
    except FileExistsError:
        return
    descriptor = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        _sync_if_possible(descriptor)
    finally:
        os.close(descriptor)


def write_file(disk: Disk, name: str, data: bytes) -> None:
    """A new file with its bytes on the disk; its name is there after `sync_folder`."""
    file = disk.create(name, 0)
    try:
        file.write([data])
        file.sync()
    finally:
        file.close()


def replace_file(disk: Disk, name: str, data: bytes) -> None:
    """Write a small file so that after a crash it is the old one or the new one."""
    temporary = name + TEMPORARY
    if temporary in disk.names():
        disk.remove(temporary)
    write_file(disk, temporary, data)
    disk.rename(temporary, name)
    disk.sync_folder()
