"""Every flipped bit in a folder of captures is found, by verifying and by reading."""

from __future__ import annotations

import random

import numpy as np
import pytest

from clairai.errors import StoreDamagedError, StoreError
from clairai.store import shard_manifest
from clairai.store.commit_shards import Committer, PendingShard
from clairai.store.read import Store
from clairai.store.recover import recover, verify
from clairai.store.shard_manifest import FIRST_CHAIN, CommitLine, dump_commit, parse_manifest
from tests.support.crash_disk import CrashDisk
from tests.support.row_blocks import block, pending_shard

NUM_FLIPS = 10_000


def _disk() -> CrashDisk:
    disk = CrashDisk()
    manifest, _ = recover(disk)
    committer = Committer(disk, manifest)
    committer.commit(committer.seal([pending_shard(block(1))]))
    npz = PendingShard("", "npz", [block(3, encoder="full8")])
    committer.commit(committer.seal([pending_shard(block(2, encoder="topk8")), npz]))
    return disk


def _read_all(disk: CrashDisk) -> None:
    store = Store(disk)
    streams = [request.stream for request in store.requests()]
    assert streams == [1, 2, 3]
    for stream in streams:
        np.asarray(store.rows(stream))


def _is_found_by_verify(disk: CrashDisk) -> bool:
    return any(check.fault for check in verify(disk))


def _is_found_by_reading(disk: CrashDisk) -> bool:
    try:
        _read_all(disk)
    except StoreDamagedError:
        return True
    return False


def test_a_folder_as_it_was_written_has_no_fault() -> None:
    disk = _disk()
    assert not _is_found_by_verify(disk)
    assert not _is_found_by_reading(disk)


def test_each_of_10000_random_single_bit_flips_is_found_by_verifying_and_by_reading() -> None:
    disk, source = _disk(), random.Random(0)  # noqa: S311
    places = [(name, index) for name in disk.files for index in range(len(disk.files[name].data))]
    missed = []
    for name, index in source.choices(places, k=NUM_FLIPS):
        inode, bit = disk.files[name], source.randrange(8)
        good = inode.data
        inode.data = good[:index] + bytes([good[index] ^ 1 << bit]) + good[index + 1 :]
        if not (_is_found_by_verify(disk) and _is_found_by_reading(disk)):
            missed.append((name, index, bit))
        inode.data = good
    assert missed == []


def test_a_flipped_bit_in_the_last_line_is_not_taken_for_an_unfinished_line() -> None:
    data = _disk().files["manifest"].data
    start = data.rindex(b"\n", 0, -1) + 1
    for index in range(start, len(data)):
        for bit in range(8):
            flipped = data[:index] + bytes([data[index] ^ 1 << bit]) + data[index + 1 :]
            parsed = parse_manifest(flipped)
            assert parsed.damage, (index, bit)
            assert not parsed.torn_nbytes


def test_every_prefix_of_the_last_line_is_an_unfinished_line() -> None:
    data = _disk().files["manifest"].data
    start = data.rindex(b"\n", 0, -1) + 1
    for end in range(start + 1, len(data)):
        for tail in (b"", b"\0" * (len(data) - end)):
            parsed = parse_manifest(data[:end] + tail)
            assert (parsed.damage, len(parsed.commits)) == ("", 2)
            assert parsed.torn_nbytes == end + len(tail) - start


def test_a_last_line_without_its_first_sectors_is_an_unfinished_line() -> None:
    data = _disk().files["manifest"].data
    start = data.rindex(b"\n", 0, -1) + 1
    for sector in range(start + 1, len(data)):
        parsed = parse_manifest(data[:start] + bytes(sector - start) + data[sector:])
        assert (parsed.damage, parsed.torn_nbytes) == ("", len(data) - start)


@pytest.mark.parametrize("change", ["missing", "doubled", "swapped"])
def test_a_line_that_is_missing_doubled_or_moved_is_found(change: str) -> None:
    first, second, third = _disk().files["manifest"].data.splitlines(keepends=True)
    changed = {
        "missing": [first, third],
        "doubled": [first, second, second, third],
        "swapped": [first, third, second],
    }[change]
    assert parse_manifest(b"".join(changed)).damage


def test_zeros_in_the_middle_of_a_manifest_are_damage_and_not_an_unfinished_line() -> None:
    first, second, third = _disk().files["manifest"].data.splitlines(keepends=True)
    holed = first + second[:40] + bytes(200) + second[240:] + third
    assert parse_manifest(holed).damage


def test_recovery_changes_nothing_in_a_damaged_folder() -> None:
    disk = _disk()
    inode = disk.files["manifest"]
    inode.data = inode.data.replace(b'"rows":3', b'"rows":2', 1)
    before = {name: one.data for name, one in disk.files.items()}
    with pytest.raises(StoreDamagedError, match="nothing was changed"):
        recover(disk)
    assert {name: one.data for name, one in disk.files.items()} == before


def test_a_missing_shard_or_manifest_is_damage() -> None:
    disk = _disk()
    del disk.files[Store(disk).shards[0].name]
    with pytest.raises(StoreDamagedError, match="missing"):
        recover(disk)
    del disk.files["manifest"]
    with pytest.raises(StoreDamagedError, match="the manifest is missing"):
        recover(disk)
    with pytest.raises(StoreError, match="no manifest"):
        Store(disk)


def test_a_checksummed_line_with_wrong_content_is_damage() -> None:
    line, chain = dump_commit(CommitLine(shard_manifest.MANIFEST_VERSION, 0, 1), FIRST_CHAIN)
    later, _ = dump_commit(CommitLine(shard_manifest.MANIFEST_VERSION + 1, 1, 1), chain)
    assert "version 2" in parse_manifest(line + later).damage
    gap, _ = dump_commit(CommitLine(shard_manifest.MANIFEST_VERSION, 2, 1), chain)
    assert "line 2" in parse_manifest(line + gap).damage
