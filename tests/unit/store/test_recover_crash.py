"""No crash loses a commit, and none shows rows that were not committed."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
import pytest

from clairai.errors import StoreDamagedError, StoreStoppedError
from clairai.store import shard_manifest
from clairai.store.commit_shards import Committer
from clairai.store.read import Store
from clairai.store.recover import recover, verify
from clairai.store.shard import SealedShard
from clairai.store.shard_manifest import CommitLine
from tests.support.crash_disk import CrashDisk, CrashError, Fate, fates, random_fate
from tests.support.row_blocks import block, pending_shard, values

Commits = list[list[int]]  # the streams of each commit: one shard each, two rows each
SMALL: Commits = [[1], [2, 3], [4]]


@dataclass
class Run:
    """A writer that commits until the crash, and how far it came."""

    started: int = 0
    finished: int = 0
    committer_class: type[Committer] = Committer
    commits: Commits = field(default_factory=lambda: SMALL)

    def on(self, disk: CrashDisk) -> None:
        manifest, _ = recover(disk)
        committer = self.committer_class(disk, manifest)
        for streams in self.commits:
            self.started += 1
            committer.commit(committer.seal([pending_shard(block(s, 2)) for s in streams]))
            self.finished += 1

    def check(self, disk: CrashDisk) -> None:
        """Everything committed is there and right, plus at most the commit under way."""
        recover(disk)
        assert [check.fault for check in verify(disk) if check.fault] == []
        shown = [request.stream for request in Store(disk).requests()]
        allowed = [self._streams(count) for count in (self.finished, self.started)]
        assert shown in allowed
        for stream in shown:
            rows = Store(disk).rows(stream)
            assert np.array_equal(rows, values(stream, np.arange(2), "post_block.3"))

    def _streams(self, num_commits: int) -> list[int]:
        return [stream for streams in self.commits[:num_commits] for stream in streams]


def _run_until_crash(run: Run, num_operations: int, disk: CrashDisk | None = None) -> CrashDisk:
    disk = disk or CrashDisk()
    disk.operations_left = num_operations
    with pytest.raises(CrashError):
        run.on(disk)
    return disk


def _num_operations() -> int:
    disk = CrashDisk()
    Run().on(disk)
    return len(disk.done)


def _crash_everywhere(
    committer_class: type[Committer], disk_class: type[CrashDisk] = CrashDisk
) -> int:
    """Crash at every operation with every simple fate. Returns the number of crashes survived."""
    survived = 0
    for num_operations in range(_num_operations()):
        for fate in fates():
            run = Run(committer_class=committer_class)
            run.check(_run_until_crash(run, num_operations, disk_class()).after_crash(fate))
            survived += 1
    return survived


def test_a_crash_at_every_operation_loses_no_commit_and_shows_no_other() -> None:
    assert _crash_everywhere(Committer) == _num_operations() * len(fates())
    assert _num_operations() > 60


def test_300_random_crashes_of_larger_runs_lose_no_commit_and_show_no_other() -> None:
    for seed in range(300):
        source = random.Random(seed)  # noqa: S311
        commits = [[10 * c + i for i in range(source.randint(1, 3))] for c in range(1, 9)]
        whole = CrashDisk()
        Run(commits=commits).on(whole)
        run = Run(commits=commits)
        disk = _run_until_crash(run, source.randrange(len(whole.done)))
        run.check(disk.after_crash(random_fate(source)))


def test_a_crash_while_recovering_from_a_crash_is_survived_too() -> None:
    for num_operations in range(_num_operations()):
        run = Run()
        crashed = _run_until_crash(run, num_operations)
        for fate in fates():
            _crash_while_recovering(run, crashed, fate)


def _crash_while_recovering(run: Run, crashed: CrashDisk, fate: Fate) -> None:
    for operations_left in range(8):
        disk = crashed.after_crash(fate)
        disk.operations_left = operations_left
        try:
            recover(disk)
        except CrashError:
            run.check(disk.after_crash(fate))


def test_writing_continues_after_a_crash_and_nothing_old_is_touched() -> None:
    run = Run()
    disk = _run_until_crash(run, 30).after_crash(fates()[1])
    run.check(disk)
    manifest, _ = recover(disk)
    before = {entry.name for entry in manifest.entries}
    committer = Committer(disk, manifest)
    committer.commit(committer.seal([pending_shard(block(99, 2))]))
    assert before < {entry.name for entry in Store(disk).shards}
    assert Store(disk).requests()[-1].stream == 99


def test_after_a_failed_sync_nothing_is_committed_until_the_folder_is_opened_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    disk = CrashDisk()
    run = Run()
    run.on(disk)
    committer = Committer(disk, recover(disk)[0])
    shards = committer.seal([pending_shard(block(9, 2))])
    with monkeypatch.context() as patched:
        patched.setattr(Committer, "_sync_line", _failing_sync)
        with pytest.raises(StoreStoppedError, match="open the folder again"):
            committer.commit(shards)
    with pytest.raises(StoreStoppedError, match="open the folder again"):
        committer.commit(shards)
    for fate in fates():
        again = disk.after_crash(fate)
        run.commits, run.started = [*SMALL, [9]], 4
        run.check(again)


def _failing_sync(self: Committer, _: object) -> None:
    self._break(OSError(5, "Input/output error"))


class LineFirst(Committer):
    """Planted bug: the manifest names shards that have only their temporary names."""

    def _publish(self, shards: Sequence[SealedShard], commit: CommitLine) -> None:
        self._append(commit)
        self._rename_all(shards)


class UnsyncedShards(Committer):
    """Planted bug: shards are renamed before their bytes are on the disk."""

    def _write_all(self, shards: Sequence[SealedShard]) -> None:
        for shard in shards:
            file = self._disk.create(shard.name + ".tmp", shard.nbytes)
            file.write([shard.start, *shard.pieces])


class UnsyncedLine(Committer):
    """Planted bug: a commit is reported before its line is on the disk."""

    def _sync_line(self, file: object) -> None:
        pass


class NoFolderSync(CrashDisk):
    """Planted bug: renames are never made durable."""

    def sync_folder(self) -> None:
        self.tick("sync_folder")


PLANTED: list[tuple[type[Committer], type[CrashDisk]]] = [
    (LineFirst, CrashDisk),
    (UnsyncedShards, CrashDisk),
    (UnsyncedLine, CrashDisk),
    (Committer, NoFolderSync),
]


@pytest.mark.parametrize(("committer_class", "disk_class"), PLANTED)
def test_a_writer_that_breaks_the_order_is_caught(
    committer_class: type[Committer], disk_class: type[CrashDisk]
) -> None:
    with pytest.raises((AssertionError, StoreDamagedError)):
        _crash_everywhere(committer_class, disk_class)


@pytest.mark.parametrize("part", ["manifest", "shard"])
def test_a_reader_that_ignores_checksums_is_caught(
    part: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without checksums a changed line or a changed tensor passes for a good one."""
    flips: dict[str, Callable[[CrashDisk], bytes]] = {
        "manifest": lambda disk: _with_a_bit_changed(disk, "manifest", b'"rows":2', b'"rows":3'),
        "shard": _with_a_value_changed,
    }
    disk = CrashDisk()
    Run().on(disk)
    flips[part](disk)
    assert any(check.fault for check in verify(disk))
    monkeypatch.setattr(shard_manifest, "_checksum", _trusting_checksum(disk))
    monkeypatch.setattr("clairai.store.shard.hashlib.sha256", _EqualDigest)
    monkeypatch.setattr("clairai.store.shard.digest_range", lambda *_: _EqualText("0" * 64))
    assert not any("checksum" in check.fault for check in verify(disk))


def _with_a_bit_changed(disk: CrashDisk, name: str, old: bytes, new: bytes) -> bytes:
    inode = disk.files[name]
    assert old in inode.data
    inode.data = inode.data.replace(old, new, 1)
    return inode.data


def _with_a_value_changed(disk: CrashDisk) -> bytes:
    inode = disk.files[Store(disk).shards[0].name]
    inode.data = inode.data[:-1] + bytes([inode.data[-1] ^ 1])
    return inode.data


def _trusting_checksum(disk: CrashDisk) -> Callable[..., str]:
    """Planted bug: every line's checksum counts as right."""
    lines = disk.files["manifest"].data.splitlines()
    stated = {line[74:]: line[9:73].decode() for line in lines}
    return lambda *parts: stated[parts[-1]]


class _EqualDigest:
    """Planted bug: a digest that equals every other."""

    def __init__(self, data: object = b"") -> None:
        self._data = data

    def hexdigest(self) -> str:
        return _EqualText("0" * 64)


class _EqualText(str):
    __slots__ = ()

    def __ne__(self, other: object) -> bool:
        return False

    __hash__ = str.__hash__
