"""Takes drafts; gives them committed: all of them, durably, or none. The order is the promise.

1. every shard under a temporary name, synced; 2. every rename; 3. the folder, synced; 4. one line
of the manifest, synced. A crash before the end of 4 leaves shards without a line: they do not
exist.
"""

from __future__ import annotations

import contextlib
import errno
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final

from clairai.errors import StoreStoppedError
from clairai.store import npz, shard
from clairai.store.disk import Disk, Writing
from clairai.store.draft import Draft
from clairai.store.folder import MANIFEST, TEMPORARY, Names
from clairai.store.manifest import VERSION, Commit, Entry, Parsed, dump
from clairai.store.shard import Sealed

MAX_START_NBYTES: Final = 1 << 26  # below safetensors' own bound of 100 MB


@dataclass(frozen=True)
class Ready:
    """A sealed shard and the name it will have."""

    name: str
    sealed: Sealed


class Sealer:
    """The one writer's hand on the disk."""

    def __init__(self, disk: Disk, parsed: Parsed, *, reserve_nbytes: int = 0) -> None:
        self._disk = disk
        self._names = Names()
        self._sequence = len(parsed.commits)
        self._nbytes, self._chain = parsed.nbytes, parsed.chain
        self._reserve_nbytes = reserve_nbytes
        self._broken = ""

    def ready(self, drafts: Sequence[Draft]) -> list[Ready]:
        """Everything that takes the processor and not the disk."""
        return [
            Ready(self._names.next(part.tail, part.suffix), sealed)
            for draft in drafts
            for part, sealed in _sealed(draft)
        ]

    def commit(self, ready: Sequence[Ready]) -> tuple[Entry, ...]:
        """OSError if the disk did not take it: none of it is there, and it may be tried again.

        StoreStoppedError if it cannot be known what is on the disk: open the folder again.
        """
        if self._broken:
            raise StoreStoppedError(self._broken)
        self._require_room(ready)
        entries = tuple(_entry(one) for one in ready)
        try:
            self._write_all(ready)
            self._publish(ready, Commit(VERSION, self._sequence, time.time_ns(), entries))
        except OSError:
            self._take_back(ready)
            raise
        return entries

    def _require_room(self, ready: Sequence[Ready]) -> None:
        needed = sum(one.sealed.nbytes for one in ready) + self._reserve_nbytes
        if (free := self._disk.free_nbytes()) < needed:
            raise OSError(errno.ENOSPC, f"{free} bytes are free and {needed} are needed")

    def _write_all(self, ready: Sequence[Ready]) -> None:
        for one in ready:
            file = self._disk.create(one.name + TEMPORARY, one.sealed.nbytes)
            try:
                file.write([one.sealed.start, *one.sealed.pieces])
                file.sync()
            finally:
                file.close()

    def _publish(self, ready: Sequence[Ready], commit: Commit) -> None:
        self._rename_all(ready)
        self._append(commit)

    def _rename_all(self, ready: Sequence[Ready]) -> None:
        for one in ready:
            self._disk.rename(one.name + TEMPORARY, one.name)
        self._disk.sync_folder()

    def _append(self, commit: Commit) -> None:
        line, chain = dump(commit, self._chain)
        file = self._disk.append(MANIFEST)
        try:
            self._write_line(file, line)
            self._sync_line(file)
        finally:
            file.close()
        self._nbytes, self._chain = self._nbytes + len(line), chain
        self._sequence += 1

    def _write_line(self, file: Writing, line: bytes) -> None:
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

    def _sync_line(self, file: Writing) -> None:
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

    def _take_back(self, ready: Sequence[Ready]) -> None:
        for one in ready:
            for name in (one.name + TEMPORARY, one.name):
                # What stays is set aside when the folder is opened next.
                with contextlib.suppress(OSError):
                    self._disk.remove(name)


def _sealed(draft: Draft) -> Iterator[tuple[Draft, Sealed]]:
    """The draft as one file, or as several where one would say too much of itself to be opened."""
    if draft.suffix == "npz":
        yield draft, npz.seal(draft.blocks, draft.notes)
        return
    sealed = shard.seal(draft.blocks, draft.notes)
    if len(sealed.start) <= MAX_START_NBYTES or draft.num_rows < 2:
        yield draft, sealed
        return
    for half in draft.halves():
        yield from _sealed(half)


def _entry(one: Ready) -> Entry:
    head = one.sealed.head
    streams = [span.stream for span in head.spans] or ["0" * 16]
    return Entry(
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
