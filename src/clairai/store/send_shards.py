"""Copy a folder of captures to any address that fsspec knows.

Shards are sent first, then the manifest up to the line that names them. So at every moment there is
a folder of captures at the address, and what it shows is committed here. Progress is kept in the
folder and synced: whoever continues later sends nothing twice.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from typing import Any, Final

import msgspec

from clairai.errors import StoreDamagedError, StoreError, StoreStoppedError, quote
from clairai.store.disk import MANIFEST, ByteSource, Disk, replace_file
from clairai.store.export_rows import missing_extra
from clairai.store.shard_manifest import CommitLine, ParsedManifest, ShardEntry, parse_manifest

MAX_URL: Final = 2048
PART_NBYTES: Final = 4 << 20


class SendProgress(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """How much of the folder is at one address."""

    commits: int = 0
    nbytes: int = 0  # of the manifest
    digest: str = ""  # SHA-256 of those bytes, in hex


class ShardSender:
    """Copies one folder to one address. Raises StoreError for an address fsspec does not know."""

    def __init__(self, disk: Disk, url: str) -> None:
        try:
            from fsspec.core import url_to_fs
        except ImportError:
            raise missing_extra("fsspec", "fsspec") from None
        if type(url) is not str or not 1 <= len(url) <= MAX_URL or "://" not in url:
            raise StoreError(f"{quote(url)} is no address; give one such as s3://bucket/captures")
        try:
            self._remote, self._root = url_to_fs(url)
        except Exception as error:  # every filesystem library has exceptions of its own
            raise StoreError(f"fsspec cannot use this address, {_describe(error)}") from None
        self._disk = disk
        self._progress_name = f"sent-{hashlib.sha256(url.encode()).hexdigest()[:16]}"

    def send(self) -> Iterator[ShardEntry]:
        """Send every committed shard that is not at the address yet, and yield it when it is.

        Raises StoreStoppedError if the address refused one: nothing is lost, and the call may be
        tried again.
        """
        data = self._disk.read(MANIFEST) if MANIFEST in self._disk.names() else b""
        manifest = parse_manifest(data)
        manifest.require_undamaged()
        progress = self._read_progress(data)
        if not progress.commits:
            self._require_own_or_empty(data)
        for commit, end in _unsent_commits(data, manifest, progress):
            for entry in commit.shards:
                self._put(entry.name, self._disk.view(entry.name), entry.nbytes)
                yield entry
            self._put(MANIFEST, memoryview(data)[:end], end)
            progress = SendProgress(commit.sequence + 1, end, _digest(data[:end]))
            replace_file(self._disk, self._progress_name, msgspec.json.encode(progress))

    def _read_progress(self, data: bytes) -> SendProgress:
        if self._progress_name not in self._disk.names():
            return SendProgress()
        try:
            progress = msgspec.json.decode(self._disk.read(self._progress_name), type=SendProgress)
        except msgspec.DecodeError:
            return SendProgress()  # sending everything again is harmless
        if _digest(data[: progress.nbytes]) != progress.digest:
            raise StoreDamagedError(
                f"the manifest is not the one that was sent before; nothing was sent: remove "
                f"{self._progress_name} to send it all, over what is there"
            )
        return progress

    def _require_own_or_empty(self, data: bytes) -> None:
        """Refuse to overwrite the manifest of another folder; a part of this one's is fine."""
        path = self._path(MANIFEST)
        try:
            present = self._remote.cat_file(path) if self._remote.exists(path) else b""
        except Exception as error:
            raise StoreStoppedError(f"the address cannot be read, {_describe(error)}") from None
        if not data.startswith(present):
            raise StoreError("another folder of captures is at this address; give a new one")

    def _path(self, name: str) -> str:
        return f"{self._root.rstrip('/')}/{name}"

    def _put(self, name: str, data: ByteSource, nbytes: int) -> None:
        path = self._path(name)
        try:
            self._remote.makedirs(self._root, exist_ok=True)
            with self._remote.open(path, "wb") as file:
                for start in range(0, nbytes, PART_NBYTES):
                    file.write(data[start : min(start + PART_NBYTES, nbytes)])
            self._remote.invalidate_cache(path)
            size: Any = self._remote.info(path)["size"]
        except Exception as error:
            raise StoreStoppedError(f"{name} could not be sent, {_describe(error)}") from None
        if int(size) != nbytes:
            raise StoreStoppedError(f"{name} has {size} bytes there and {nbytes} here; try again")


def _unsent_commits(
    data: bytes, manifest: ParsedManifest, progress: SendProgress
) -> Iterator[tuple[CommitLine, int]]:
    """Yield each commit that was not sent, and where its line ends."""
    end = 0
    for commit in manifest.commits:
        end = data.index(b"\n", end) + 1
        if commit.sequence >= progress.commits:
            yield commit, end


def _digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def _describe(error: Exception) -> str:
    return f"{type(error).__name__}: {quote(str(error), 200)}"
