"""Rebuild the manifest of a folder of captures from its shards, when it is damaged or gone.

A shard says of itself what its line in the manifest says, and which commit it belongs to. So every
shard is read to its last byte; those that are intact get a line in a new manifest, in the order of
their commits. What is left of the old manifest helps: it says what was committed for sure, and it
checks the shards of clairai 0.1, which have no seal. Nothing is deleted: the old manifest and the
damaged shards are kept under names that end in `.damaged`.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import msgspec

from clairai.errors import StoreDamagedError, StoreError
from clairai.store.disk import MANIFEST, ORPHAN, Disk, is_shard, replace_file, write_file
from clairai.store.shard import (
    MAX_HEAD_NBYTES,
    CommitSeal,
    OpenShard,
    damage_error,
    make_entry,
    parse_npz,
    parse_start,
    plain_digest,
    read_seal,
    start_digest,
)
from clairai.store.shard_manifest import (
    FIRST_CHAIN,
    MANIFEST_VERSION,
    CommitLine,
    ParsedManifest,
    ShardEntry,
    dump_commit,
    parse_manifest,
)

DAMAGED: Final = ".damaged"
MAX_COMMITS: Final = 1 << 22
MAX_SHARDS_OF_LINE: Final = 1 << 13
_LINE: Final = re.compile(rb"[0-9a-f]{8} [0-9a-f]{64} (\{.*\})", re.DOTALL)


@dataclass(frozen=True)
class InspectedShard:
    """A shard of the folder, read to its last byte. `entry` is None if it is damaged."""

    file: str
    entry: ShardEntry | None
    seal: CommitSeal | None = None
    fault: str = ""


@dataclass(frozen=True)
class RepairPlan:
    """What a repair does to a folder; nothing, if `is_needed` is false."""

    fault: str  # of the manifest; empty if it is whole
    commits: tuple[CommitLine, ...]  # of the new manifest
    damaged: tuple[InspectedShard, ...]  # set aside
    missing: tuple[ShardEntry, ...]  # committed, and no longer there
    unlisted: tuple[str, ...]  # taken in though no line that is left names them
    unchecked: tuple[str, ...]  # of them, without a seal: their tags and order cannot be checked
    orphans: tuple[str, ...]  # never committed, and left alone

    @property
    def is_needed(self) -> bool:
        return bool(self.fault or self.damaged or self.missing)

    @property
    def rows(self) -> int:
        return sum(entry.rows for commit in self.commits for entry in commit.shards)

    def steps(self) -> Iterator[str]:
        """What will be done, a line each."""
        num_shards = sum(len(commit.shards) for commit in self.commits)
        if self.fault:
            yield f"the manifest is damaged: {self.fault}"
        for one in self.damaged:
            yield f"set aside {one.file} as {one.file}{DAMAGED}: {one.fault}"
        for entry in self.missing:
            yield f"{entry.name} is gone, with {entry.rows} rows: leave it out"
        if self.is_needed:
            yield f"write a manifest of {num_shards} shards and {self.rows} rows; keep the old one"
        for name in self.unlisted:
            yield f"note: no line names {name}; if its commit was the last, it may not have ended"
        for name in self.unchecked:
            yield f"note: {name} was written by clairai 0.1: its tags and order are not checked"
        for name in self.orphans:
            yield f"note: {name} was never committed; it is left as it is"


def plan_repair(disk: Disk) -> RepairPlan:
    """Read every byte of the folder and say what can be saved. Changes nothing."""
    names = disk.names()
    data = disk.read(MANIFEST) if MANIFEST in names else b""
    _require_known_version(data)
    manifest, salvaged = parse_manifest(data), salvage_lines(data)
    listed = {entry.name: entry for commit in salvaged for entry in commit.shards}
    proven = {entry.name: entry for entry in manifest.entries}
    shards = [inspect_shard(disk, name, proven.get(name)) for name in names if is_shard(name)]
    if not manifest.commits and not shards:
        raise StoreError("there is no manifest and no shard: this is not a folder of captures")
    fault = _find_fault(manifest, [one for one in shards if one.file not in proven])
    # If the manifest is whole, a writer sets aside what it does not name.
    ours = [one for one in shards if fault or one.file in proven]
    good = [one for one in ours if one.entry is not None]
    return RepairPlan(
        fault=fault,
        commits=_new_commits(good, salvaged),
        damaged=tuple(one for one in ours if one.entry is None),
        missing=tuple(entry for name, entry in listed.items() if name not in set(names)),
        unlisted=tuple(one.file for one in good if one.file not in listed),
        unchecked=tuple(one.file for one in good if one.seal is None and one.file not in proven),
        orphans=tuple(name for name in names if name.endswith(ORPHAN)),
    )


def _find_fault(manifest: ParsedManifest, unnamed: Sequence[InspectedShard]) -> str:
    """What is wrong with a manifest; one that was cut between two lines looks whole by itself."""
    if manifest.damage:
        return f"line {len(manifest.commits) + 1}, {manifest.damage}"
    num_lines = len(manifest.commits)
    follow = [one for one in unnamed if one.seal is not None and one.seal.sequence >= num_lines]
    if not follow:
        return ""
    return f"{len(follow)} shards follow its last line: others were cut off, or never written"


def _require_known_version(data: bytes) -> None:
    """Refuse the manifest of a newer clairai, which is not damaged but unknown."""
    first = _LINE.fullmatch(data.partition(b"\n")[0])
    try:
        version = msgspec.json.decode(first[1], type=_Version).version if first else 0
    except (msgspec.DecodeError, ValueError, RecursionError):
        return
    if version > MANIFEST_VERSION:
        raise StoreError(
            f"the manifest is of version {version}, and this clairai knows {MANIFEST_VERSION}; "
            "repair it with the version that wrote it"
        )


class _Version(msgspec.Struct):
    version: int


def salvage_lines(data: bytes) -> list[CommitLine]:
    """The commits of all lines that can be read, though the chain is broken."""
    found = []
    for line in data.split(b"\n"):
        match = _LINE.fullmatch(line)
        try:
            commit = msgspec.json.decode(match[1], type=CommitLine) if match else None
        except (msgspec.DecodeError, ValueError, RecursionError):
            continue
        if commit is not None and commit.version == MANIFEST_VERSION:
            found.append(commit)
    return found


def inspect_shard(disk: Disk, name: str, proven: ShardEntry | None) -> InspectedShard:
    """Read a shard to its last byte; `proven` is its entry in the valid part of a manifest."""
    try:
        entry, seal = _read_shard(disk, name)
        if proven is not None and proven != entry:
            raise damage_error(name, "it is not what the manifest says")
    except StoreDamagedError as error:
        return InspectedShard(name, None, fault=error.reason)
    except OSError as error:
        return InspectedShard(name, None, fault=f"it cannot be read ({error.strerror})")
    return InspectedShard(name, entry, seal)


def _read_shard(disk: Disk, name: str) -> tuple[ShardEntry, CommitSeal | None]:
    data = disk.view(name)
    if name.endswith(".npz"):
        shard, head_nbytes, digest = parse_npz(name, data), len(data), plain_digest(data)
    else:
        head_nbytes = int.from_bytes(data[:8], "little") + 8
        if not 8 < head_nbytes <= min(len(data), MAX_HEAD_NBYTES):
            raise damage_error(name, "its start is not that of a safetensors file")
        start = bytes(data[:head_nbytes])
        shard, digest = parse_start(name, start, data), start_digest(start)
    seal = _check_seal(shard, head_nbytes)
    for tensor in shard.tensors.infos:
        shard.tensors.check(tensor)
    made = make_entry(
        shard.head, name=name, nbytes=len(data), head_nbytes=head_nbytes, head_digest=digest
    )
    return made, seal


def _check_seal(shard: OpenShard, head_nbytes: int) -> CommitSeal | None:
    try:
        seal = read_seal(shard.tensors.data, head_nbytes)
        if seal is not None and not 0 < seal.sequence <= MAX_COMMITS:
            raise ValueError(f"its seal says that it is of commit {seal.sequence}")
        return seal
    except ValueError as error:
        raise damage_error(shard.name, str(error)) from None


def _new_commits(
    shards: Sequence[InspectedShard], salvaged: Iterable[CommitLine]
) -> tuple[CommitLine, ...]:
    """A line for each number, in order; one of whose shards none is left stays, and is empty.

    So a number is never given again, and a later repair finds the same order.
    """
    known = {
        entry.name: (commit.sequence, commit.time_ns)
        for commit in salvaged
        for entry in commit.shards
        if 0 < commit.sequence <= MAX_COMMITS
    }
    places = {one.file: _place(one, known) for one in shards}
    fallback = _place_of_others(shards, places)
    entries: defaultdict[int, list[ShardEntry]] = defaultdict(list)
    times: dict[int, int] = {}
    for one in shards:
        assert one.entry is not None
        sequence, time_ns = places[one.file] or (fallback, 0)
        entries[sequence].append(one.entry)
        times[sequence] = max(time_ns, times.get(sequence, 0))
    if max(map(len, entries.values()), default=0) > MAX_SHARDS_OF_LINE:
        raise StoreError(f"over {MAX_SHARDS_OF_LINE} shards say nothing about their commit")
    return tuple(
        CommitLine(MANIFEST_VERSION, number, times.get(number, 0), tuple(entries[number]))
        for number in range(max(entries, default=0) + 1)
    )


def _place(one: InspectedShard, known: Mapping[str, tuple[int, int]]) -> tuple[int, int] | None:
    """The number and the time of its commit; None if nobody says."""
    if one.seal is not None:
        return one.seal.sequence, one.seal.time_ns
    return known.get(one.file)


def _place_of_others(
    shards: Sequence[InspectedShard], places: Mapping[str, tuple[int, int] | None]
) -> int:
    """Of shards of clairai 0.1 that no line names: before all sealed ones, which are newer."""
    sealed = [one.seal.sequence for one in shards if one.seal is not None]
    if sealed:
        return max(min(sealed) - 1, 1)
    return max((place[0] for place in places.values() if place is not None), default=0) + 1


def apply_repair(disk: Disk, plan: RepairPlan) -> None:
    """Write the new manifest. A crash leaves the old one or the new one, and a copy of the old."""
    if MANIFEST in disk.names():
        _keep_copy(disk, disk.read(MANIFEST))
    data, chain = b"", FIRST_CHAIN
    for commit in plan.commits:
        line, chain = dump_commit(commit, chain)
        data += line
    replace_file(disk, MANIFEST, data)
    for one in plan.damaged:
        disk.rename(one.file, one.file + DAMAGED)
    disk.sync_folder()


def _keep_copy(disk: Disk, data: bytes) -> None:
    names, number = set(disk.names()), 1
    while (name := f"{MANIFEST}-{number}{DAMAGED}") in names:
        number += 1
    write_file(disk, name, data)
    disk.sync_folder()
