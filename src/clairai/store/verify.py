"""Takes a folder of captures; gives every fault that is in it, one file after the other."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from clairai.errors import StoreDamagedError
from clairai.store.disk import Disk
from clairai.store.folder import MANIFEST, ORPHAN, is_shard
from clairai.store.manifest import Entry, parse
from clairai.store.opening import opened


@dataclass(frozen=True)
class Checked:
    """A file: how large, and what is wrong with it. `fault` is empty if nothing is."""

    name: str
    nbytes: int
    rows: int
    fault: str = ""


def verify(disk: Disk) -> Iterator[Checked]:
    """The manifest first, then each shard it names, every byte of it."""
    names = disk.names()
    if MANIFEST not in names:
        yield Checked(MANIFEST, 0, 0, "it is missing: this is no folder of captures")
        return
    data = disk.read(MANIFEST)
    parsed = parse(data)
    fault = f"line {len(parsed.commits) + 1}: {parsed.damage}" if parsed.damage else ""
    yield Checked(MANIFEST, len(data), 0, fault)
    for entry in parsed.entries:
        yield Checked(entry.name, entry.nbytes, entry.rows, _fault(disk, entry))


def _fault(disk: Disk, entry: Entry) -> str:
    try:
        found = opened(disk, entry)
        for name in found.tensors:
            found.array(name)
    except StoreDamagedError as error:
        return error.reason
    return ""


def beside(disk: Disk) -> tuple[str, ...]:
    """Shards without a line: a writer is at work on them now, or a crash came between."""
    names = disk.names()
    named = (
        {entry.name for entry in parse(disk.read(MANIFEST)).entries} if MANIFEST in names else ()
    )
    loose = (n for n in names if n not in named and is_shard(n.removesuffix(ORPHAN)))
    return tuple(loose)
