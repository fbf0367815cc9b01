"""Takes a disk that forgets; gives proof that no crash loses a commit or shows what was not one."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
import pytest

from clairai.errors import StoreDamagedError, StoreStoppedError
from clairai.store import shard_manifest
from clairai.store.commit_shards import Committer, ShardFile
from clairai.store.read import Store
from clairai.store.recover import recover, verify
from clairai.store.shard_manifest import CommitLine
from tests.support.crash_disk import CrashError, Fate, ToyDisk, fates, random_fate
from tests.support.row_blocks import block, draft, values

Commits = list[list[int]]  # the streams of each commit: one shard each, two rows each
SMALL: Commits = [[1], [2, 3], [4]]


@dataclass
class Run:
    """What a writer was told, until the crash."""

    started: int = 0
    finished: int = 0
    sealer_class: type[Committer] = Committer
    commits: Commits = field(default_factory=lambda: SMALL)

    def on(self, disk: ToyDisk) -> None:
        parsed, _ = recover(disk)
        sealer = self.sealer_class(disk, parsed)
        for streams in self.commits:
            self.started += 1
            sealer.commit(sealer.ready([draft(block(s, 2)) for s in streams]))
            self.finished += 1

    def check(self, disk: ToyDisk) -> None:
        """All that was committed is there and right; beyond it at most the commit under way."""
        recover(disk)
        assert [checked.fault for checked in verify(disk) if checked.fault] == []
        shown = [request.stream for request in Store(disk).requests()]
        allowed = [self._streams(count) for count in (self.finished, self.started)]
        assert shown in allowed
        for stream in shown:
            rows = Store(disk).rows(stream)
            assert np.array_equal(rows, values(stream, np.arange(2), "post_block.3"))

    def _streams(self, num_commits: int) -> list[int]:
        return [stream for streams in self.commits[:num_commits] for stream in streams]


def _cut(run: Run, num_operations: int, disk: ToyDisk | None = None) -> ToyDisk:
    disk = disk or ToyDisk()
    disk.operations_left = num_operations
    with pytest.raises(CrashError):
        run.on(disk)
    return disk


def _num_operations() -> int:
    disk = ToyDisk()
    Run().on(disk)
    return len(disk.done)


def _crash_everywhere(sealer_class: type[Committer], disk_class: type[ToyDisk] = ToyDisk) -> int:
    """How many crashes were survived: every operation, every plain fate."""
    survived = 0
    for num_operations in range(_num_operations()):
        for fate in fates():
            run = Run(sealer_class=sealer_class)
            run.check(_cut(run, num_operations, disk_class()).after_crash(fate))
            survived += 1
    return survived


def test_a_crash_at_every_operation_loses_no_commit_and_shows_no_other() -> None:
    assert _crash_everywhere(Committer) == _num_operations() * len(fates())
    assert _num_operations() > 60


def test_300_random_crashes_of_larger_runs_lose_no_commit_and_show_no_other() -> None:
    for seed in range(300):
        source = random.Random(seed)  # noqa: S311
        commits = [[10 * c + i for i in range(source.randint(1, 3))] for c in range(1, 9)]
        whole = ToyDisk()
        Run(commits=commits).on(whole)
        run = Run(commits=commits)
        disk = _cut(run, source.randrange(len(whole.done)))
        run.check(disk.after_crash(random_fate(source)))


def test_a_crash_while_recovering_from_a_crash_is_survived_too() -> None:
    for num_operations in range(_num_operations()):
        run = Run()
        crashed = _cut(run, num_operations)
        for fate in fates():
            _recover_cut_everywhere(run, crashed, fate)


def _recover_cut_everywhere(run: Run, crashed: ToyDisk, fate: Fate) -> None:
    for operations_left in range(8):
        disk = crashed.after_crash(fate)
        disk.operations_left = operations_left
        try:
            recover(disk)
        except CrashError:
            run.check(disk.after_crash(fate))


def test_a_folder_is_written_on_after_a_crash_and_nothing_old_is_touched() -> None:
    run = Run()
    disk = _cut(run, 30).after_crash(fates()[1])
    run.check(disk)
    parsed, _ = recover(disk)
    before = {entry.name for entry in parsed.entries}
    sealer = Committer(disk, parsed)
    sealer.commit(sealer.ready([draft(block(99, 2))]))
    assert before < {entry.name for entry in Store(disk).shards}
    assert Store(disk).requests()[-1].stream == 99


def test_after_a_line_that_failed_to_sync_nothing_is_committed_until_the_folder_is_opened_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    disk = ToyDisk()
    run = Run()
    run.on(disk)
    sealer = Committer(disk, recover(disk)[0])
    ready = sealer.ready([draft(block(9, 2))])
    with monkeypatch.context() as patched:
        patched.setattr(Committer, "_sync_line", _failing_sync)
        with pytest.raises(StoreStoppedError, match="open the folder again"):
            sealer.commit(ready)
    with pytest.raises(StoreStoppedError, match="open the folder again"):
        sealer.commit(ready)
    for fate in fates():
        again = disk.after_crash(fate)
        run.commits, run.started = [*SMALL, [9]], 4
        run.check(again)


def _failing_sync(self: Committer, _: object) -> None:
    self._break(OSError(5, "Input/output error"))


class LineFirst(Committer):
    """Planted bug: the manifest names shards that have only their temporary names."""

    def _publish(self, ready: Sequence[ShardFile], commit: CommitLine) -> None:
        self._append(commit)
        self._rename_all(ready)


class UnsyncedShards(Committer):
    """Planted bug: shards are renamed before their bytes are on the disk."""

    def _write_all(self, ready: Sequence[ShardFile]) -> None:
        for one in ready:
            file = self._disk.create(one.name + ".tmp", one.sealed.nbytes)
            file.write([one.sealed.start, *one.sealed.pieces])


class UnsyncedLine(Committer):
    """Planted bug: a commit is said to be done before its line is on the disk."""

    def _sync_line(self, file: object) -> None:
        pass


class NoFolderSync(ToyDisk):
    """Planted bug: renames are never made durable."""

    def sync_folder(self) -> None:
        self.tick("sync_folder")


PLANTED: list[tuple[type[Committer], type[ToyDisk]]] = [
    (LineFirst, ToyDisk),
    (UnsyncedShards, ToyDisk),
    (UnsyncedLine, ToyDisk),
    (Committer, NoFolderSync),
]


@pytest.mark.parametrize(("sealer_class", "disk_class"), PLANTED)
def test_a_writer_that_breaks_the_order_is_caught(
    sealer_class: type[Committer], disk_class: type[ToyDisk]
) -> None:
    with pytest.raises((AssertionError, StoreDamagedError)):
        _crash_everywhere(sealer_class, disk_class)


@pytest.mark.parametrize("part", ["manifest", "shard"])
def test_a_reader_that_ignores_checksums_is_caught(
    part: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With no checksum a torn line, or a changed tensor, passes for a good one."""
    flips: dict[str, Callable[[ToyDisk], bytes]] = {
        "manifest": lambda disk: _with_a_bit_changed(disk, "manifest", b'"rows":2', b'"rows":3'),
        "shard": _with_a_value_changed,
    }
    disk = ToyDisk()
    Run().on(disk)
    flips[part](disk)
    assert any(checked.fault for checked in verify(disk))
    monkeypatch.setattr(shard_manifest, "_checksum", _believed(disk))
    monkeypatch.setattr("clairai.store.shard.hashlib.sha256", _Anything)
    monkeypatch.setattr("clairai.store.shard.chunked_digest", lambda _: _Same("0" * 64))
    assert not any("checksum" in checked.fault for checked in verify(disk))


def _with_a_bit_changed(disk: ToyDisk, name: str, old: bytes, new: bytes) -> bytes:
    inode = disk.files[name]
    assert old in inode.data
    inode.data = inode.data.replace(old, new, 1)
    return inode.data


def _with_a_value_changed(disk: ToyDisk) -> bytes:
    inode = disk.files[Store(disk).shards[0].name]
    inode.data = inode.data[:-1] + bytes([inode.data[-1] ^ 1])
    return inode.data


def _believed(disk: ToyDisk) -> Callable[..., str]:
    """Planted bug: whatever checksum a line has is its checksum."""
    lines = disk.files["manifest"].data.splitlines()
    said = {line[74:]: line[9:73].decode() for line in lines}
    return lambda *parts: said[parts[-1]]


class _Anything:
    """Planted bug: a digest that equals every other."""

    def __init__(self, data: object = b"") -> None:
        self._data = data

    def hexdigest(self) -> str:
        return _Same("0" * 64)


class _Same(str):
    __slots__ = ()

    def __ne__(self, other: object) -> bool:
        return False

    __hash__ = str.__hash__
