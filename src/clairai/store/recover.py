"""Repair a folder of captures after a crash, and verify one byte by byte.

Rows count as committed if a line of the manifest names their shard, and readers see nothing else.
`recover` applies these rules, in this order:

- a link in the folder, a damaged line of the manifest, or a shard that is missing or has another
  size is an error, and nothing is changed;
- a last line that was never finished is left out of a fresh copy of the manifest;
- files that were being written are removed: no line can name them;
- a sealed shard that no line names is renamed to NAME.orphan and not deleted. Its rows were never
  reported as committed; but if somebody else truncated the manifest, it is all that is left.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass

from clairai.errors import StoreDamagedError
from clairai.store.disk import MANIFEST, ORPHAN, TEMPORARY, Disk, is_shard, replace_file
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
    """What was repaired when the folder was opened."""

    torn_nbytes: int = 0  # of an unfinished last line
    removed: tuple[str, ...] = ()
    set_aside: tuple[str, ...] = ()

    def __str__(self) -> str:
        steps = []
        if self.torn_nbytes:
            steps.append(f"cut an unfinished line of {self.torn_nbytes} bytes off the manifest")
        if self.removed:
            steps.append(f"removed {len(self.removed)} unfinished files")
        if self.set_aside:
            steps.append(f"set aside {len(self.set_aside)} shards that were never committed")
        return "; ".join(steps) or "nothing to recover"


def recover(disk: Disk) -> tuple[ParsedManifest, Recovery]:
    """Make a folder ready for its one writer. Raises StoreDamagedError and changes nothing if data
    that was committed is missing or damaged."""
    names = set(disk.names())
    manifest = _read_manifest(disk, names)
    manifest.require_undamaged()
    _require_shards(disk, manifest, names)
    # A fresh copy, not the same file: if an earlier sync failed, the bytes just read may be in
    # memory only, and syncing that file again would report success.
    data = disk.read(MANIFEST)[: manifest.nbytes] if MANIFEST in names else b""
    if not manifest.commits:
        first = CommitLine(MANIFEST_VERSION, 0, time.time_ns())
        data, chain = dump_commit(first, FIRST_CHAIN)
        manifest = ParsedManifest((first,), len(data), chain)
    replace_file(disk, MANIFEST, data)
    return manifest, _clear_leftovers(disk, manifest, names)


def _read_manifest(disk: Disk, names: set[str]) -> ParsedManifest:
    if MANIFEST in names:
        return parse_manifest(disk.read(MANIFEST))
    if shards := [name for name in names if is_shard(name)]:
        raise StoreDamagedError(
            f"the manifest is missing, and {len(shards)} shards are there; nothing was changed: "
            "restore it from a copy, or run `clairai capture repair`"
        )
    return ParsedManifest((), 0, FIRST_CHAIN)


def _require_shards(disk: Disk, manifest: ParsedManifest, names: set[str]) -> None:
    for entry in manifest.entries:
        if entry.name not in names or disk.nbytes(entry.name) != entry.nbytes:
            raise StoreDamagedError(
                f"shard {entry.name} is missing or does not have its {entry.nbytes} bytes; "
                "nothing was changed: restore it from a copy, or run `clairai capture repair`"
            )


def _clear_leftovers(disk: Disk, manifest: ParsedManifest, names: set[str]) -> Recovery:
    committed = {entry.name for entry in manifest.entries}
    orphans = sorted(name for name in names - committed if is_shard(name))
    unfinished = sorted(name for name in names if name.endswith(TEMPORARY))
    unfinished = [name for name in unfinished if name in set(disk.names())]
    for name in unfinished:
        disk.remove(name)
    for name in orphans:
        disk.rename(name, name + ORPHAN)
    disk.sync_folder()
    return Recovery(manifest.torn_nbytes, tuple(unfinished), tuple(orphans))


@dataclass(frozen=True)
class FileCheck:
    """One verified file, and what is wrong with it; `fault` is empty if nothing is."""

    name: str
    nbytes: int
    rows: int
    fault: str = ""


def verify(disk: Disk) -> Iterator[FileCheck]:
    """Check the manifest, then every byte of each shard that it names."""
    if MANIFEST not in disk.names():
        yield FileCheck(MANIFEST, 0, 0, "it is missing: this is not a folder of captures")
        return
    data = disk.read(MANIFEST)
    manifest = parse_manifest(data)
    fault = f"line {len(manifest.commits) + 1}: {manifest.damage}" if manifest.damage else ""
    yield FileCheck(MANIFEST, len(data), 0, fault)
    for entry in manifest.entries:
        yield FileCheck(entry.name, entry.nbytes, entry.rows, _find_fault(disk, entry))


def _find_fault(disk: Disk, entry: ShardEntry) -> str:
    try:
        shard = open_shard(disk, entry)
        for name in shard.tensors.infos:
            shard.tensors.check(name)
    except StoreDamagedError as error:
        return error.reason
    return ""


def uncommitted_shards(disk: Disk) -> tuple[str, ...]:
    """Shards that no line names: a writer is working on them now, or a crash interrupted one."""
    names = disk.names()
    manifest = parse_manifest(disk.read(MANIFEST)) if MANIFEST in names else None
    committed = {entry.name for entry in manifest.entries} if manifest else set()
    return tuple(n for n in names if n not in committed and is_shard(n.removesuffix(ORPHAN)))
