"""Takes a folder as a crash left it; gives it ready to be written to, and says what was done.

What a line of the manifest names is kept, and nothing else is shown. Rules, in this order:

- a link in the folder, a damaged line, a shard that is missing or has another size: nothing is
  changed, and an error says which;
- a last line that was never finished is left out of a fresh copy of the manifest;
- files that were being written are removed: no line can name them;
- a shard that was sealed and has no line is set aside, as NAME.orphan, and not deleted. Its rows
  were never said to be committed; but had somebody else cut the manifest, it would be all there is.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass

from clairai.errors import StoreDamagedError
from clairai.store.disk import MANIFEST, ORPHAN, TEMPORARY, Disk, is_shard
from clairai.store.shard import open_shard
from clairai.store.shard_manifest import (
    FIRST_CHAIN,
    MANIFEST_VERSION,
    CommitLine,
    ParsedManifest,
    ShardEntry,
    dump_commit,
    parse_manifest,
)


@dataclass(frozen=True)
class Recovery:
    """What had to be done when the folder was opened."""

    torn_nbytes: int = 0
    removed: tuple[str, ...] = ()
    set_aside: tuple[str, ...] = ()

    def __str__(self) -> str:
        said = []
        if self.torn_nbytes:
            said.append(f"cut an unfinished line of {self.torn_nbytes} bytes off the manifest")
        if self.removed:
            said.append(f"removed {len(self.removed)} unfinished files")
        if self.set_aside:
            said.append(f"set aside {len(self.set_aside)} shards that were never committed")
        return "; ".join(said) or "nothing to recover"


def recover(disk: Disk) -> tuple[ParsedManifest, Recovery]:
    """For the one writer of the folder."""
    names = set(disk.names())
    parsed = _read_manifest(disk, names)
    parsed.require_whole()
    _require_shards(disk, parsed, names)
    # A copy, not the same file: after a sync that failed, what we read may be in memory alone, and
    # another sync of it would be told that all is well.
    data = disk.read(MANIFEST)[: parsed.nbytes] if MANIFEST in names else b""
    if not parsed.commits:
        first = CommitLine(MANIFEST_VERSION, 0, time.time_ns())
        data, chain = dump_commit(first, FIRST_CHAIN)
        parsed = ParsedManifest((first,), len(data), chain)
    replace_file(disk, MANIFEST, data)
    return parsed, _clear_leftovers(disk, parsed, names)


def _read_manifest(disk: Disk, names: set[str]) -> ParsedManifest:
    if MANIFEST in names:
        return parse_manifest(disk.read(MANIFEST))
    if sealed := [name for name in names if is_shard(name)]:
        raise StoreDamagedError(
            f"the manifest is missing, and {len(sealed)} shards are there; nothing was changed: "
            "bring it back from a copy"
        )
    return ParsedManifest((), 0, FIRST_CHAIN)


def _require_shards(disk: Disk, parsed: ParsedManifest, names: set[str]) -> None:
    for entry in parsed.entries:
        if entry.name not in names or disk.nbytes(entry.name) != entry.nbytes:
            raise StoreDamagedError(
                f"shard {entry.name} is missing or has not its {entry.nbytes} bytes; nothing was "
                "changed: bring it back from a copy"
            )


def replace_file(disk: Disk, name: str, data: bytes) -> None:
    """After a crash the file is the old one or the new one."""
    temporary = name + TEMPORARY
    if temporary in disk.names():
        disk.remove(temporary)
    file = disk.create(temporary, 0)
    try:
        file.write([data])
        file.sync()
    finally:
        file.close()
    disk.rename(temporary, name)
    disk.sync_folder()


def _clear_leftovers(disk: Disk, parsed: ParsedManifest, names: set[str]) -> Recovery:
    kept = {entry.name for entry in parsed.entries}
    orphans = sorted(name for name in names - kept if is_shard(name))
    unfinished = sorted(name for name in names if name.endswith(TEMPORARY))
    unfinished = [name for name in unfinished if name in set(disk.names())]
    for name in unfinished:
        disk.remove(name)
    for name in orphans:
        disk.rename(name, name + ORPHAN)
    disk.sync_folder()
    return Recovery(parsed.torn_nbytes, tuple(unfinished), tuple(orphans))


# MERGED
# Takes a folder of captures; gives every fault that is in it, one file after the other.


@dataclass(frozen=True)
class FileCheck:
    """A file: how large, and what is wrong with it. `fault` is empty if nothing is."""

    name: str
    nbytes: int
    rows: int
    fault: str = ""


def verify(disk: Disk) -> Iterator[FileCheck]:
    """The manifest first, then each shard it names, every byte of it."""
    names = disk.names()
    if MANIFEST not in names:
        yield FileCheck(MANIFEST, 0, 0, "it is missing: this is no folder of captures")
        return
    data = disk.read(MANIFEST)
    parsed = parse_manifest(data)
    fault = f"line {len(parsed.commits) + 1}: {parsed.damage}" if parsed.damage else ""
    yield FileCheck(MANIFEST, len(data), 0, fault)
    for entry in parsed.entries:
        yield FileCheck(entry.name, entry.nbytes, entry.rows, _fault(disk, entry))


def _fault(disk: Disk, entry: ShardEntry) -> str:
    try:
        found = open_shard(disk, entry)
        for name in found.tensors:
            found.array(name)
    except StoreDamagedError as error:
        return error.reason
    return ""


def uncommitted_shards(disk: Disk) -> tuple[str, ...]:
    """Shards without a line: a writer is at work on them now, or a crash came between."""
    names = disk.names()
    named = (
        {entry.name for entry in parse_manifest(disk.read(MANIFEST)).entries}
        if MANIFEST in names
        else ()
    )
    loose = (n for n in names if n not in named and is_shard(n.removesuffix(ORPHAN)))
    return tuple(loose)
