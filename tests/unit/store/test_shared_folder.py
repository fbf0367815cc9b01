"""Shards that several machines put into one folder are there when, and only when, committed."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path
from uuid import uuid4

import numpy as np
import pytest

from clairai.errors import StoreBusyError, StoreDamagedError, StoreError, StoreStoppedError
from clairai.store.commit_shards import Committer
from clairai.store.disk import MANIFEST, TEMPORARY, LocalDisk
from clairai.store.read import Store
from clairai.store.read import open as open_store
from clairai.store.recover import recover, verify
from clairai.store.repair import plan_repair
from clairai.store.shard_manifest import ShardEntry
from clairai.store.shared_folder import open_place, open_shared_folder
from clairai.store.write import Writer
from tests.support.crash_disk import CrashDisk, CrashError, fates
from tests.support.row_blocks import block, pending_shard, values


@pytest.fixture(params=["disk", "address"])
def where(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    return f"memory://{uuid4().hex}/run" if request.param == "address" else str(tmp_path / "run")


class Machine:
    """Captures into a scratch folder of its own."""

    def __init__(self, scratch: Path, where: str, first_line: bytes) -> None:
        self._scratch = scratch
        self._place = open_place(where, first_line)

    def put(self, *streams: int) -> tuple[ShardEntry, ...]:
        with Writer(self._scratch) as writer:
            for stream in streams:
                writer.begin(stream, tags={"stream": stream})
                writer.offer(block(stream))
        disk = LocalDisk(self._scratch)
        entries = Store(disk).commits[-1].shards
        for entry in entries:
            self._place.put(entry.name, disk.view(entry.name))
        return entries


def _streams(store: Store) -> list[int]:
    for one in store.requests():
        rows = np.asarray(store.rows(one.stream))
        assert np.array_equal(rows, values(one.stream, np.arange(3), "post_block.3"))
        assert one.tags == {"stream": one.stream}
    return sorted(one.stream for one in store.requests())


def test_what_is_committed_is_there_and_what_is_only_put_is_not(where: str, tmp_path: Path) -> None:
    with open_shared_folder(where) as folder:
        east, west = (
            Machine(tmp_path / name, where, folder.first_line) for name in ("east", "west")
        )
        folder.commit(east.put(1, 2))
        west.put(3)  # and it dies before its report comes
        folder.commit(east.put(4))
        assert _streams(folder.store()) == [1, 2, 4]
    with open_shared_folder(where) as folder:  # as the same command, called again
        assert _streams(folder.store()) == [1, 2, 4]
        folder.commit(Machine(tmp_path / "south", where, folder.first_line).put(3))
    assert _streams(open_store(where)) == [1, 2, 3, 4]
    assert len(open_store(where).commits) == 4


def test_a_folder_on_a_disk_has_one_process_that_commits(tmp_path: Path) -> None:
    where = str(tmp_path / "run")
    with (
        open_shared_folder(where),
        pytest.raises(StoreBusyError),
        open_shared_folder(where),
    ):
        pass


def test_a_second_process_that_commits_to_an_address_is_noticed(tmp_path: Path) -> None:
    where = f"memory://{uuid4().hex}/run"
    with open_shared_folder(where) as one, open_shared_folder(where) as other:
        machine = Machine(tmp_path / "w", where, one.first_line)
        one.commit(machine.put(1))
        with pytest.raises(StoreStoppedError, match="one command at a time"):
            other.commit(machine.put(2))
    assert _streams(open_store(where)) == [1]


def test_a_machine_that_does_not_share_the_folder_is_refused(where: str, tmp_path: Path) -> None:
    other = tmp_path / "other"
    other.mkdir(mode=0o700)
    with open_shared_folder(where) as folder:
        for place in (str(other), f"memory://{uuid4().hex}/none"):
            with pytest.raises(StoreError, match="all machines share"):
                open_place(place, folder.first_line)


def test_a_shard_that_was_cut_on_its_way_is_not_committed(tmp_path: Path) -> None:
    where = tmp_path / "run"
    with open_shared_folder(str(where)) as folder:
        (entry,) = Machine(tmp_path / "w", str(where), folder.first_line).put(1)
        path = where / (entry.name + TEMPORARY)
        path.write_bytes(path.read_bytes()[:-1])
        with pytest.raises(StoreDamagedError):
            folder.commit([entry])
    assert _streams(open_store(where)) == []


def test_a_lost_manifest_is_rebuilt_from_shards_of_several_machines(tmp_path: Path) -> None:
    """Each shard has the seal of the commit that it became part of, not of its scratch folder's."""
    where = tmp_path / "run"
    with open_shared_folder(str(where)) as folder:
        machines = [
            Machine(tmp_path / name, str(where), folder.first_line) for name in ("east", "west")
        ]
        for stream in range(1, 7):
            folder.commit(machines[stream % 2].put(stream))
        machines[0].put(7)  # never committed
    committed = open_store(where).commits
    assert [one.fault for one in verify(LocalDisk(where)) if one.fault] == []
    (where / MANIFEST).unlink()
    plan = plan_repair(LocalDisk(where))
    assert [one.shards for one in plan.commits] == [one.shards for one in committed]


def _adopt(disk: CrashDisk, streams: list[int], done: list[int]) -> None:
    manifest, _ = recover(disk)
    committer = Committer(disk, manifest)
    source = CrashDisk()
    sealing = Committer(source, recover(source)[0])
    for stream in streams:
        (shard,) = sealing.seal([pending_shard(block(stream, 3))])
        sealing.commit([shard])
        file = disk.create(shard.name + TEMPORARY, shard.nbytes)
        file.write([shard.start, *shard.pieces])
        file.sync()
        file.close()
        committer.adopt([shard.entry()])
        done.append(stream)


def test_no_crash_loses_what_was_adopted_or_shows_the_half_of_it() -> None:
    streams = [1, 2, 3]
    num_operations = 0
    while True:
        disk, done = CrashDisk(), list[int]()
        disk.operations_left = num_operations
        with suppress(CrashError):
            _adopt(disk, streams, done)
        for fate in fates():
            after = disk.after_crash(fate)
            recover(after)
            assert [one.fault for one in verify(after) if one.fault] == []
            shown = sorted(one.stream for one in Store(after).requests())
            assert shown in (done, streams[: len(done) + 1])
        if done == streams:
            return
        num_operations += 1
