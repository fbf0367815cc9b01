"""Copy a folder of captures to any address that fsspec knows.

Shards are sent first, then the manifest up to the line that names them. So at every moment there is
a folder of captures at the address, and what it shows is committed here. Progress is kept in the
folder and synced: whoever continues later sends nothing twice.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator

import msgspec

from clairai.errors import StoreDamagedError, StoreError
from clairai.store.disk import MANIFEST, Disk, replace_file
from clairai.store.remote_disk import RemoteDisk
from clairai.store.shard_manifest import CommitLine, ParsedManifest, ShardEntry, parse_manifest


class SendProgress(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """How much of the folder is at one address."""

    commits: int = 0
    nbytes: int = 0  # of the manifest
    digest: str = ""  # SHA-256 of those bytes, in hex


class ShardSender:
    """Copies one folder to one address. Raises StoreError for an address fsspec does not know."""

    def __init__(self, disk: Disk, url: str) -> None:
        self._remote = RemoteDisk(url)
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
                self._remote.put(entry.name, self._disk.view(entry.name), entry.nbytes)
                yield entry
            self._remote.put(MANIFEST, memoryview(data)[:end], end)
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
        try:
            present = self._remote.read(MANIFEST)
        except FileNotFoundError:
            present = b""
        if not data.startswith(present):
            raise StoreError("another folder of captures is at this address; give a new one")


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
