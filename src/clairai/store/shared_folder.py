"""A folder of captures that several machines fill and one process commits to.

Machines put sealed shards there and tell the process that has the folder open, which adds a line
to the manifest. A shard that no line names does not exist for readers: so whatever a machine did
before it died, or does after it was given up, shows only if its line is written, and that once.

The folder is on a disk that all machines share, or at an address that fsspec knows. On a disk a
shard has a temporary name until it is committed; what a dead machine left is removed when
the folder is opened next. At an address it has its own name at once, and is never removed.
"""

from __future__ import annotations

import socket
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Protocol

from clairai.errors import StoreError, StoreStoppedError, quote
from clairai.store.commit_shards import Committer
from clairai.store.disk import (
    MANIFEST,
    TEMPORARY,
    ByteSource,
    ClaimedDisk,
    LocalDisk,
    claim_folder,
)
from clairai.store.read import Store
from clairai.store.recover import recover
from clairai.store.remote_disk import RemoteDisk, is_address
from clairai.store.shard_manifest import (
    FIRST_CHAIN,
    MANIFEST_VERSION,
    CommitLine,
    ParsedManifest,
    ShardEntry,
    dump_commit,
    parse_manifest,
)


class SharedFolder(Protocol):
    """The folder as the one process has it that commits."""

    @property
    def first_line(self) -> bytes:
        """Of its manifest: it tells this folder from every other one."""

    def store(self) -> Store: ...

    def commit(self, entries: Sequence[ShardEntry]) -> None:
        """All of these shards, which were put here, or none of them."""


@contextmanager
def open_shared_folder(where: str) -> Iterator[SharedFolder]:
    """Open a folder, made if it is not there; no other process may commit to it meanwhile.

    A folder on a disk is locked. At an address a second process is noticed when it has committed.
    """
    if is_address(where):
        yield RemoteFolder(RemoteDisk(where))
        return
    with claim_folder(where) as disk:
        manifest, _ = recover(disk)
        yield LocalFolder(disk, manifest)


class LocalFolder:
    """On a disk; shards come under temporary names."""

    def __init__(self, disk: ClaimedDisk, manifest: ParsedManifest) -> None:
        self._disk = disk
        self._committer = Committer(disk, manifest)
        self.first_line = _first_line(disk.read(MANIFEST))

    def store(self) -> Store:
        return Store(LocalDisk(self._disk.path))

    def commit(self, entries: Sequence[ShardEntry]) -> None:
        try:
            self._committer.adopt(entries)
        except OSError as error:
            raise StoreStoppedError(f"the disk refused a commit, {error.strerror}") from None


class RemoteFolder:
    """At an address; the manifest is replaced by one that has a line more."""

    def __init__(self, disk: RemoteDisk) -> None:
        self._disk = disk
        try:
            self._data = disk.read(MANIFEST)
        except FileNotFoundError:
            first = CommitLine(MANIFEST_VERSION, 0, time.time_ns())
            self._data, _ = dump_commit(first, FIRST_CHAIN)
            disk.put(MANIFEST, memoryview(self._data), len(self._data))
        manifest = parse_manifest(self._data)
        manifest.require_undamaged()
        self._sequence, self._chain = len(manifest.commits), manifest.chain
        self.first_line = _first_line(self._data)

    def store(self) -> Store:
        return Store(self._disk)

    def commit(self, entries: Sequence[ShardEntry]) -> None:
        if self._disk.read(MANIFEST) != self._data:
            raise StoreStoppedError(
                "somebody else has written the manifest at this address; nothing was added to it: "
                "let one command at a time write there, and start it again"
            )
        commit = CommitLine(MANIFEST_VERSION, self._sequence, time.time_ns(), tuple(entries))
        line, chain = dump_commit(commit, self._chain)
        data = self._data + line
        self._disk.put(MANIFEST, memoryview(data), len(data))
        self._data, self._chain, self._sequence = data, chain, self._sequence + 1


def _first_line(data: bytes) -> bytes:
    return data[: data.index(b"\n") + 1]


class ShardPlace(Protocol):
    """The folder as a machine has it that captures."""

    def put(self, name: str, data: ByteSource) -> None:
        """Returns when all of a shard is there and safe."""


def open_place(where: str, first_line: bytes) -> ShardPlace:
    """StoreError if this machine finds another folder there, or none."""
    if is_address(where):
        place: _LocalPlace | _RemotePlace = _RemotePlace(RemoteDisk(where))
    else:
        place = _LocalPlace(LocalDisk(where))
    if not place.manifest().startswith(first_line):
        raise StoreError(
            f"{quote(where, 200)} is another folder on {socket.gethostname()} than where the "
            "command runs; give a folder that all machines share, or an address such as "
            "s3://bucket/captures"
        )
    return place


class _LocalPlace:
    def __init__(self, disk: LocalDisk) -> None:
        self._disk = disk

    def manifest(self) -> bytes:
        return self._disk.read(MANIFEST) if MANIFEST in self._disk.names() else b""

    def put(self, name: str, data: ByteSource) -> None:
        try:
            file = self._disk.create(name + TEMPORARY, len(data))
            try:
                file.write([data[:]])
                file.sync()
            finally:
                file.close()
            self._disk.sync_folder()
        except OSError as error:
            raise StoreStoppedError(f"{name} could not be written, {error.strerror}") from None


class _RemotePlace:
    def __init__(self, disk: RemoteDisk) -> None:
        self._disk = disk

    def manifest(self) -> bytes:
        try:
            return self._disk.read(MANIFEST)
        except FileNotFoundError:
            return b""

    def put(self, name: str, data: ByteSource) -> None:
        self._disk.put(name, data, len(data))
