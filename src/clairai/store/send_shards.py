"""Takes a folder of captures and an address that fsspec knows; gives the same folder there.

Sealed shards go first and the manifest, up to the line that names them, last. So what is there is
a folder of captures at every moment, and what it shows was committed here. How far it has come is
kept in the folder and synced: whoever goes on later sends nothing twice.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from typing import Any, Final

import msgspec

from clairai.errors import StoreDamagedError, StoreError, StoreStoppedError
from clairai.points import quote
from clairai.store.disk import MANIFEST, Disk
from clairai.store.export_rows import missing_extra
from clairai.store.recover import replace_file
from clairai.store.shard_manifest import CommitLine, ParsedManifest, ShardEntry, parse_manifest

MAX_URL: Final = 2048


class SendProgress(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """How far one address has come."""

    commits: int = 0
    nbytes: int = 0  # of the manifest
    digest: str = ""  # SHA-256 of those bytes, in hex


class ShardSender:
    """Sends one folder to one address. StoreError if the address is none that fsspec knows."""

    def __init__(self, disk: Disk, url: str) -> None:
        try:
            from fsspec.core import url_to_fs
        except ImportError:
            raise missing_extra("fsspec", "fsspec") from None
        if type(url) is not str or not 1 <= len(url) <= MAX_URL or "://" not in url:
            raise StoreError(f"{quote(url)} is no address; give one such as s3://bucket/captures")
        try:
            self._there, self._root = url_to_fs(url)
        except Exception as error:  # each kind of filesystem raises what its library raises
            raise StoreError(f"fsspec cannot use this address, {_describe(error)}") from None
        self._disk = disk
        self._name = f"sent-{hashlib.sha256(url.encode()).hexdigest()[:16]}"

    def send(self) -> Iterator[ShardEntry]:
        """Every shard that was committed and not sent, as it has come there.

        StoreStoppedError if the address did not take one: nothing is lost, and it may be tried
        again.
        """
        data, parsed = self._manifest()
        sent = self._sent(data)
        if not sent.commits:
            self._require_free(data)
        for commit, end in _unsent_commits(data, parsed, sent):
            for entry in commit.shards:
                self._put(entry.name, self._disk.view(entry.name), entry.nbytes)
                yield entry
            self._put(MANIFEST, memoryview(data)[:end], end)
            self._keep(SendProgress(commit.sequence + 1, end, _digest(data[:end])))

    def _manifest(self) -> tuple[bytes, ParsedManifest]:
        data = self._disk.read(MANIFEST) if MANIFEST in self._disk.names() else b""
        parsed = parse_manifest(data)
        parsed.require_whole()
        return data, parsed

    def _sent(self, data: bytes) -> SendProgress:
        if self._name not in self._disk.names():
            return SendProgress()
        try:
            sent = msgspec.json.decode(self._disk.read(self._name), type=SendProgress)
        except msgspec.DecodeError:
            return SendProgress()  # everything is sent again, which changes nothing there
        if _digest(data[: sent.nbytes]) != sent.digest:
            raise StoreDamagedError(
                f"the manifest is not the one that was sent before; nothing was sent: remove "
                f"{self._name} to send it all, over what is there"
            )
        return sent

    def _require_free(self, data: bytes) -> None:
        """Another folder's manifest there is never written over; a part of this one's is."""
        path = self._path(MANIFEST)
        try:
            there = self._there.cat_file(path) if self._there.exists(path) else b""
        except Exception as error:  # each kind of filesystem raises what its library raises
            raise StoreStoppedError(f"the address cannot be read, {_describe(error)}") from None
        if not data.startswith(there):
            raise StoreError("another folder of captures is at this address; give a new one")

    def _path(self, name: str) -> str:
        return f"{self._root.rstrip('/')}/{name}"

    def _keep(self, sent: SendProgress) -> None:
        replace_file(self._disk, self._name, msgspec.json.encode(sent))

    def _put(self, name: str, data: memoryview, nbytes: int) -> None:
        path = self._path(name)
        try:
            self._there.makedirs(self._root, exist_ok=True)
            with self._there.open(path, "wb") as file:
                file.write(data)
            there = self._size(path)
        except Exception as error:  # each kind of filesystem raises what its library raises
            raise StoreStoppedError(f"{name} could not be sent, {_describe(error)}") from None
        if there != nbytes:
            raise StoreStoppedError(f"{name} has {there} bytes there and {nbytes} here; try again")

    def _size(self, path: str) -> int:
        self._there.invalidate_cache(path)
        size: Any = self._there.info(path)["size"]
        return int(size)


def _unsent_commits(
    data: bytes, parsed: ParsedManifest, sent: SendProgress
) -> Iterator[tuple[CommitLine, int]]:
    """Each commit that was not sent, and where its line ends."""
    end = 0
    for commit in parsed.commits:
        end = data.index(b"\n", end) + 1
        if commit.sequence >= sent.commits:
            yield commit, end


def _digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def _describe(error: Exception) -> str:
    return f"{type(error).__name__}: {quote(str(error), 200)}"
