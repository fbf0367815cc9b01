"""Group accepted blocks into shards, seal them, and commit them: all of them, durably, or none.

The order of a commit is what makes it safe:

1. write every shard under a temporary name, and sync it;
2. rename every shard;
3. sync the folder;
4. append one line to the manifest, and sync it.

A crash before the end of 4 leaves shards that no line names, and those do not exist for readers.
"""

from __future__ import annotations

import contextlib
import errno
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Final, Literal, get_args

import msgspec
import numpy as np

from clairai.errors import StoreError, StoreStoppedError, quote
from clairai.store.block_queue import QueuedBlock
from clairai.store.disk import MANIFEST, TEMPORARY, Disk, ShardNames, WritableFile
from clairai.store.row_block import RequestNote, RowBlock
from clairai.store.shard import (
    CommitSeal,
    SealedShard,
    damage_error,
    put_seal,
    renew_seal,
    seal_npz,
    seal_safetensors,
    start_digest,
    stream_hex,
)
from clairai.store.shard_manifest import (
    MANIFEST_VERSION,
    CommitLine,
    ParsedManifest,
    ShardEntry,
    dump_commit,
)

Layout = Literal["sharded", "packed", "per_file", "npz"]
LAYOUTS: Final[tuple[Layout, ...]] = get_args(Layout)
MAX_PENDING_SHARDS: Final = 512  # files of one commit
MAX_START_NBYTES: Final = 1 << 26  # below safetensors' own bound of 100 MB


@dataclass
class PendingShard:
    """Blocks of one kind that will become one file."""

    tail: str  # the part of the file's name that says which request and point it holds
    suffix: str
    blocks: list[RowBlock] = field(default_factory=list)
    notes: dict[int, RequestNote] = field(default_factory=dict)
    nbytes: int = 0

    @property
    def num_rows(self) -> int:
        return sum(block.num_rows for block in self.blocks)

    def split(self) -> tuple[PendingShard, PendingShard]:
        """Return the same rows as two shards; there must be at least two rows."""
        blocks = self.blocks
        if len(blocks) == 1:
            indices = np.arange(blocks[0].num_rows)
            blocks = [blocks[0].select(half) for half in np.array_split(indices, 2)]
        middle = len(blocks) // 2
        return (
            PendingShard(self.tail, self.suffix, blocks[:middle], self.notes),
            PendingShard(self.tail, self.suffix, blocks[middle:], self.notes),
        )


class PendingShards:
    """The blocks that are accepted and not yet sealed, grouped into the files of a layout."""

    def __init__(self, layout: str) -> None:
        if layout not in LAYOUTS:
            raise StoreError(
                f"no layout is named {quote(layout)}; give one of {', '.join(LAYOUTS)}"
            )
        self._layout: str = layout
        self._growing: dict[tuple[object, ...], PendingShard] = {}
        self._finished: list[PendingShard] = []
        self.nbytes = 0

    def __len__(self) -> int:
        return len(self._growing) + len(self._finished)

    @property
    def is_full(self) -> bool:
        return len(self) >= MAX_PENDING_SHARDS

    def add(self, item: QueuedBlock) -> None:
        for stream, block in self._by_stream(item.block):
            pending = self._shard_for(stream, block)
            pending.blocks.append(block)
            self._grow(pending, block.nbytes)
            streams = item.notes if stream is None else item.notes.keys() & {stream}
            for noted in streams:
                self._set_note(pending, noted, item.notes[noted])

    def _set_note(self, pending: PendingShard, stream: int, note: RequestNote) -> None:
        """Keep the newest: steering may change during a request, and its last note has it all."""
        known = pending.notes.get(stream)
        if known != note:
            pending.notes[stream] = note
            self._grow(pending, note.nbytes - (0 if known is None else known.nbytes))

    def _grow(self, pending: PendingShard, nbytes: int) -> None:
        pending.nbytes += nbytes
        self.nbytes += nbytes

    def _by_stream(self, block: RowBlock) -> Iterator[tuple[int | None, RowBlock]]:
        """Split a block by request, where the layout gives each request files of its own."""
        streams = block.rows_N["stream"]
        if self._layout == "sharded":
            yield None, block
        elif len(streams) and (streams == streams[0]).all():
            yield int(streams[0]), block
        else:
            for stream in np.unique(streams).tolist():
                yield stream, block.select(np.flatnonzero(streams == stream))

    def _shard_for(self, stream: int | None, block: RowBlock) -> PendingShard:
        point = block.point if self._layout in ("per_file", "npz") else ""
        key = (stream, point, block.kind)
        if key not in self._growing:
            tail = ""
            if stream is not None:
                tail = f"-{stream_hex(stream)}-{point}" if point else f"-{stream_hex(stream)}"
            suffix = "npz" if self._layout == "npz" else "safetensors"
            self._growing[key] = PendingShard(tail, suffix)
        return self._growing[key]

    def finish(self, stream: int) -> bool:
        """End a request's own files. Returns whether any finished files wait to be sealed."""
        own = [key for key in self._growing if key[0] == stream]
        self._finished += [self._growing.pop(key) for key in own]
        return bool(self._finished)

    def take_finished(self) -> list[PendingShard]:
        """Remove and return the shards of finished requests."""
        taken, self._finished = self._finished, []
        self.nbytes -= sum(pending.nbytes for pending in taken)
        return taken

    def take_all(self) -> list[PendingShard]:
        """Remove and return every shard; the next block starts new ones."""
        taken = [*self._finished, *self._growing.values()]
        self._finished, self._growing, self.nbytes = [], {}, 0
        return taken


class _FolderChangedError(StoreStoppedError):
    """Somebody else has changed the folder. Nothing was added to its manifest."""


class Committer:
    """Seals pending shards and commits them to the folder of the one writer."""

    def __init__(self, disk: Disk, manifest: ParsedManifest, *, reserve_nbytes: int = 0) -> None:
        self._disk = disk
        self._names = ShardNames()
        self._sequence = self._sealing = len(manifest.commits)
        self._nbytes, self._chain = manifest.nbytes, manifest.chain
        self._inode = disk.inode(MANIFEST)
        self._reserve_nbytes = reserve_nbytes
        self._broken = ""

    def seal(self, pending: Sequence[PendingShard]) -> list[SealedShard]:
        """Make the bytes and checksums of these shards: the part that needs no disk.

        They are for one commit, the next after those that were sealed before.
        """
        made = [(shard, sealed) for shard in pending for sealed in _seal(shard)]
        if not made:
            return []
        seal = CommitSeal(self._sealing, len(made), time.time_ns())
        self._sealing += 1
        return [
            replace(put_seal(sealed, seal), name=self._names.next(shard.tail, shard.suffix))
            for shard, sealed in made
        ]

    def commit(self, shards: Sequence[SealedShard]) -> tuple[ShardEntry, ...]:
        """Commit these shards together.

        Raises OSError if the disk refused: nothing of them remains, and the same call may be tried
        again. Raises StoreStoppedError if somebody else has changed the folder, or if it is unknown
        what is on the disk: open the folder again.
        """
        if self._broken:
            raise StoreStoppedError(self._broken)
        self._require_unchanged()
        self._require_room(shards)
        entries = tuple(shard.entry() for shard in shards)
        try:
            self._write_all(shards)
            self._publish(
                shards, CommitLine(MANIFEST_VERSION, self._sequence, time.time_ns(), entries)
            )
        except (OSError, _FolderChangedError):
            self._remove(shards)
            raise
        return entries

    def adopt(self, entries: Sequence[ShardEntry]) -> tuple[ShardEntry, ...]:
        """Commit shards that others have written here under temporary names, and synced.

        Each gets the seal of this commit, so that it can be found again without the manifest.
        Raises StoreDamagedError, and commits nothing, if one is not what its entry says; otherwise
        as `commit`.
        """
        if self._broken:
            raise StoreStoppedError(self._broken)
        self._require_unchanged()
        seal = CommitSeal(self._sequence, len(entries), time.time_ns())
        sealed = tuple(self._renew_seal(entry, seal) for entry in entries)
        for entry in entries:
            self._disk.rename(entry.name + TEMPORARY, entry.name)
        self._disk.sync_folder()
        self._require_unchanged()
        self._append(CommitLine(MANIFEST_VERSION, self._sequence, time.time_ns(), sealed))
        self._sealing = self._sequence
        return sealed

    def _renew_seal(self, entry: ShardEntry, seal: CommitSeal) -> ShardEntry:
        name = entry.name + TEMPORARY
        data = self._disk.view(name)
        start = bytes(data[: entry.head_nbytes])
        if len(data) != entry.nbytes or start_digest(start) != entry.head_digest:
            raise damage_error(entry.name, "it is not what was written")
        renewed = renew_seal(start, seal)
        self._disk.overwrite(name, renewed.offset, renewed.text)
        return msgspec.structs.replace(entry, head_digest=renewed.start_digest)

    def _require_unchanged(self) -> None:
        """A line after somebody else's would make the whole manifest unreadable."""
        try:
            self._disk.require_claim()
        except StoreStoppedError as error:
            self._broken = error.reason
            raise _FolderChangedError(error.reason) from None
        try:
            found = self._disk.inode(MANIFEST), self._disk.nbytes(MANIFEST)
        except FileNotFoundError:
            found = None
        if found != (self._inode, self._nbytes):
            self._broken = (
                "the manifest was removed, cut, replaced or written to by somebody else; nothing "
                "is added to it: open the folder again, or see `clairai capture repair`"
            )
            raise _FolderChangedError(self._broken)

    def _require_room(self, shards: Sequence[SealedShard]) -> None:
        needed = sum(shard.nbytes for shard in shards) + self._reserve_nbytes
        if (free := self._disk.free_nbytes()) < needed:
            raise OSError(errno.ENOSPC, f"{free} bytes are free and {needed} are needed")

    def _write_all(self, shards: Sequence[SealedShard]) -> None:
        for shard in shards:
            file = self._disk.create(shard.name + TEMPORARY, shard.nbytes)
            try:
                file.write([shard.start, *shard.pieces])
                file.sync()
            finally:
                file.close()

    def _publish(self, shards: Sequence[SealedShard], commit: CommitLine) -> None:
        self._rename_all(shards)
        self._require_unchanged()
        self._append(commit)

    def _rename_all(self, shards: Sequence[SealedShard]) -> None:
        for shard in shards:
            self._disk.rename(shard.name + TEMPORARY, shard.name)
        self._disk.sync_folder()

    def _append(self, commit: CommitLine) -> None:
        line, chain = dump_commit(commit, self._chain)
        file = self._disk.append(MANIFEST)
        try:
            self._write_line(file, line)
            self._sync_line(file)
        finally:
            file.close()
        self._nbytes, self._chain = self._nbytes + len(line), chain
        self._sequence += 1

    def _write_line(self, file: WritableFile, line: bytes) -> None:
        try:
            file.write([line])
        except OSError:
            self._remove_partial_line()
            raise

    def _remove_partial_line(self) -> None:
        try:
            self._disk.truncate(MANIFEST, self._nbytes)
        except OSError as error:
            self._break(error)

    def _sync_line(self, file: WritableFile) -> None:
        try:
            file.sync()
        except OSError as error:
            # A second fsync would succeed even though the kernel dropped the dirty pages after the
            # first one failed, so it is never tried again.
            self._break(error)

    def _break(self, error: OSError) -> None:
        self._broken = (
            f"the manifest could not be written ({error.strerror}), so it is unknown what is on "
            "the disk; open the folder again, which finds out"
        )
        raise StoreStoppedError(self._broken) from None

    def _remove(self, shards: Sequence[SealedShard]) -> None:
        for shard in shards:
            for name in (shard.name + TEMPORARY, shard.name):
                # What cannot be removed now is set aside when the folder is opened next.
                with contextlib.suppress(OSError):
                    self._disk.remove(name)


def _seal(pending: PendingShard) -> Iterator[SealedShard]:
    """Seal one file, or several where the header of one would be too large to be opened."""
    if pending.suffix == "npz":
        yield seal_npz(pending.blocks, pending.notes)
        return
    sealed = seal_safetensors(pending.blocks, pending.notes)
    if len(sealed.start) <= MAX_START_NBYTES or pending.num_rows < 2:
        yield sealed
        return
    for half in pending.split():
        yield from _seal(half)
