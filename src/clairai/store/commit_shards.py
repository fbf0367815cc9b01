"""Takes blocks as they come, and a layout; gives drafts: the blocks that will be one file each."""

from __future__ import annotations

import contextlib
import errno
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Final, Literal, get_args

import numpy as np

from clairai.errors import StoreError, StoreStoppedError
from clairai.points import quote
from clairai.store import shard
from clairai.store import shard as npz
from clairai.store.disk import MANIFEST, TEMPORARY, Disk, ShardNames, WritableFile
from clairai.store.row_block import NotedBlock, RequestNote, RowBlock
from clairai.store.shard import SealedShard, stream_hex
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


@dataclass
class PendingShard:
    """Blocks of one kind that will be sealed together."""

    tail: str  # of the file's name
    suffix: str
    blocks: list[RowBlock] = field(default_factory=list)
    notes: dict[int, RequestNote] = field(default_factory=dict)
    nbytes: int = 0

    @property
    def num_rows(self) -> int:
        return sum(block.num_rows for block in self.blocks)

    def halves(self) -> tuple[PendingShard, PendingShard]:
        """The same rows as two files; for a draft of two rows or more."""
        blocks = self.blocks
        if len(blocks) == 1:
            places = np.arange(blocks[0].num_rows)
            blocks = [blocks[0].taken(part) for part in np.array_split(places, 2)]
        middle = len(blocks) // 2
        first, second = blocks[:middle], blocks[middle:]
        return (
            PendingShard(self.tail, self.suffix, first, self.notes),
            PendingShard(self.tail, self.suffix, second, self.notes),
        )


class PendingShards:
    """What was accepted and is not yet handed to the disk."""

    def __init__(self, layout: str) -> None:
        if layout not in LAYOUTS:
            raise StoreError(
                f"no layout is named {quote(layout)}; give one of {', '.join(LAYOUTS)}"
            )
        self._layout: str = layout
        self._drafts: dict[tuple[object, ...], PendingShard] = {}
        self._finished: list[PendingShard] = []
        self.nbytes = 0

    def __len__(self) -> int:
        return len(self._drafts) + len(self._finished)

    @property
    def is_full(self) -> bool:
        return len(self) >= MAX_PENDING_SHARDS

    def add(self, given: NotedBlock) -> None:
        for stream, part in self._parts(given.block):
            draft = self._draft(stream, part)
            draft.blocks.append(part)
            self._grow(draft, part.nbytes)
            streams = given.notes if stream is None else given.notes.keys() & {stream}
            for one in streams:
                self._remember(draft, one, given.notes[one])

    def _remember(self, draft: PendingShard, stream: int, note: RequestNote) -> None:
        """The newest: a request may be steered otherwise on its way, and its note tells it all."""
        known = draft.notes.get(stream)
        if known != note:
            draft.notes[stream] = note
            self._grow(draft, note.nbytes - (0 if known is None else known.nbytes))

    def _grow(self, draft: PendingShard, nbytes: int) -> None:
        draft.nbytes += nbytes
        self.nbytes += nbytes

    def _parts(self, block: RowBlock) -> Iterator[tuple[int | None, RowBlock]]:
        streams = block.rows_N["stream"]
        if self._layout == "sharded":
            yield None, block
        elif len(streams) and (streams == streams[0]).all():
            yield int(streams[0]), block
        else:
            for stream in np.unique(streams).tolist():
                yield stream, block.taken(np.flatnonzero(streams == stream))

    def _draft(self, stream: int | None, block: RowBlock) -> PendingShard:
        point = block.point if self._layout in ("per_file", "npz") else ""
        key = (stream, point, block.kind)
        if key not in self._drafts:
            tail = (
                "" if stream is None else f"-{stream_hex(stream)}" + (f"-{point}" if point else "")
            )
            suffix = "npz" if self._layout == "npz" else "safetensors"
            self._drafts[key] = PendingShard(tail, suffix)
        return self._drafts[key]

    def finish(self, stream: int) -> bool:
        """The request has ended; whether files of its own can be sealed."""
        own = [key for key in self._drafts if key[0] == stream]
        self._finished += [self._drafts.pop(key) for key in own]
        return bool(self._finished)

    def take_finished(self) -> list[PendingShard]:
        """Those that nothing can be added to."""
        taken, self._finished = self._finished, []
        self.nbytes -= sum(draft.nbytes for draft in taken)
        return taken

    def take(self) -> list[PendingShard]:
        """All of them; what comes next begins new ones."""
        taken = [*self._finished, *self._drafts.values()]
        self._finished, self._drafts, self.nbytes = [], {}, 0
        return taken


# MERGED
# Takes drafts; gives them committed: all of them, durably, or none. The order is the promise.
#
# 1. every shard under a temporary name, synced; 2. every rename; 3. the folder, synced; 4. one
# line
# of the manifest, synced. A crash before the end of 4 leaves shards without a line: they do not
# exist.


MAX_START_NBYTES: Final = 1 << 26  # below safetensors' own bound of 100 MB


@dataclass(frozen=True)
class ShardFile:
    """A sealed shard and the name it will have."""

    name: str
    sealed: SealedShard


class Committer:
    """The one writer's hand on the disk."""

    def __init__(self, disk: Disk, parsed: ParsedManifest, *, reserve_nbytes: int = 0) -> None:
        self._disk = disk
        self._names = ShardNames()
        self._sequence = len(parsed.commits)
        self._nbytes, self._chain = parsed.nbytes, parsed.chain
        self._reserve_nbytes = reserve_nbytes
        self._broken = ""

    def ready(self, drafts: Sequence[PendingShard]) -> list[ShardFile]:
        """Everything that takes the processor and not the disk."""
        return [
            ShardFile(self._names.next(part.tail, part.suffix), sealed)
            for draft in drafts
            for part, sealed in _seal(draft)
        ]

    def commit(self, ready: Sequence[ShardFile]) -> tuple[ShardEntry, ...]:
        """OSError if the disk did not take it: none of it is there, and it may be tried again.

        StoreStoppedError if it cannot be known what is on the disk: open the folder again.
        """
        if self._broken:
            raise StoreStoppedError(self._broken)
        self._require_room(ready)
        entries = tuple(_manifest_entry(one) for one in ready)
        try:
            self._write_all(ready)
            self._publish(
                ready, CommitLine(MANIFEST_VERSION, self._sequence, time.time_ns(), entries)
            )
        except OSError:
            self._take_back(ready)
            raise
        return entries

    def _require_room(self, ready: Sequence[ShardFile]) -> None:
        needed = sum(one.sealed.nbytes for one in ready) + self._reserve_nbytes
        if (free := self._disk.free_nbytes()) < needed:
            raise OSError(errno.ENOSPC, f"{free} bytes are free and {needed} are needed")

    def _write_all(self, ready: Sequence[ShardFile]) -> None:
        for one in ready:
            file = self._disk.create(one.name + TEMPORARY, one.sealed.nbytes)
            try:
                file.write([one.sealed.start, *one.sealed.pieces])
                file.sync()
            finally:
                file.close()

    def _publish(self, ready: Sequence[ShardFile], commit: CommitLine) -> None:
        self._rename_all(ready)
        self._append(commit)

    def _rename_all(self, ready: Sequence[ShardFile]) -> None:
        for one in ready:
            self._disk.rename(one.name + TEMPORARY, one.name)
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
            self._cut_line()
            raise

    def _cut_line(self) -> None:
        try:
            self._disk.cut(MANIFEST, self._nbytes)
        except OSError as error:
            self._break(error)

    def _sync_line(self, file: WritableFile) -> None:
        try:
            file.sync()
        except OSError as error:
            # Never tried again: the kernel may have dropped the pages and would say all is well.
            self._break(error)

    def _break(self, error: OSError) -> None:
        self._broken = (
            f"the manifest could not be written ({error.strerror}), so it is not known what is on "
            "the disk; open the folder again, which finds out"
        )
        raise StoreStoppedError(self._broken) from None

    def _take_back(self, ready: Sequence[ShardFile]) -> None:
        for one in ready:
            for name in (one.name + TEMPORARY, one.name):
                # What stays is set aside when the folder is opened next.
                with contextlib.suppress(OSError):
                    self._disk.remove(name)


def _seal(draft: PendingShard) -> Iterator[tuple[PendingShard, SealedShard]]:
    """The draft as one file, or as several where one would say too much of itself to be opened."""
    if draft.suffix == "npz":
        yield draft, npz.seal_npz(draft.blocks, draft.notes)
        return
    sealed = shard.seal_safetensors(draft.blocks, draft.notes)
    if len(sealed.start) <= MAX_START_NBYTES or draft.num_rows < 2:
        yield draft, sealed
        return
    for half in draft.halves():
        yield from _seal(half)


def _manifest_entry(one: ShardFile) -> ShardEntry:
    head = one.sealed.head
    streams = [span.stream for span in head.spans] or ["0" * 16]
    return ShardEntry(
        name=one.name,
        nbytes=one.sealed.nbytes,
        head_nbytes=len(one.sealed.start),
        head_digest=one.sealed.start_digest,
        rows=head.rows,
        requests=len(set(streams)) if head.spans else 0,
        first_stream=min(streams),
        last_stream=max(streams),
        points=head.points,
        origin=head.origin,
    )
