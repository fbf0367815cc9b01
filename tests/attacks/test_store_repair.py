"""Whatever happens to a manifest, the shards themselves give every intact row back."""

from __future__ import annotations

import os
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from typer.testing import CliRunner

from clairai.cli.commands import app
from clairai.errors import StoreDamagedError, StoreError
from clairai.store import read, shard
from clairai.store.disk import LocalDisk
from clairai.store.read import Store
from clairai.store.recover import verify
from clairai.store.repair import apply_repair, plan_repair
from clairai.store.shard import CommitSeal, open_shard
from clairai.store.write import Writer
from clairai.wire.ring_messages import RECOMPUTED
from tests.support.crash_disk import CrashDisk, CrashError, Inode, fates
from tests.support.row_blocks import block

LAYOUTS = ("sharded", "npz")
Rows = dict[int, tuple[dict[str, Any], list[list[float]]]]


def _write(folder: Path, layout: str) -> None:
    """Three writers, one after the other; the last one computes a row of the first again."""
    for turn in range(3):
        with Writer(folder, layout=layout) as writer:
            for stream in (2 * turn + 1, 2 * turn + 2):
                writer.begin(stream, tags={"turn": turn, "stream": stream})
                writer.offer(block(stream))
                writer.finish(stream)
                writer.flush()
    again = block(1, 1, start=2)
    again.rows_N["flags"] |= RECOMPUTED
    again.arrays["values"][:] = 99.0
    with Writer(folder, layout=layout) as writer:
        writer.begin(1, tags={"turn": 3})
        writer.offer(again)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    made = tmp_path_factory.mktemp("repair")
    for layout in LAYOUTS:
        _write(made / layout, layout)
    return {layout: made / layout for layout in LAYOUTS}


def _contents(store: Store) -> Rows:
    return {
        one.stream: (one.tags, np.asarray(store.rows(one.stream)).tolist())
        for one in store.requests()
    }


def _copy(folder: Path, to: Path) -> Path:
    shutil.rmtree(to, ignore_errors=True)
    shutil.copytree(folder, to)
    return to


def _repair(folder: Path) -> None:
    plan = plan_repair(disk := LocalDisk(folder))
    apply_repair(disk, plan)


def _flip(data: bytes, source: random.Random) -> bytes:
    changed = bytearray(data)
    for _ in range(source.randint(1, 8)):
        changed[source.randrange(len(data))] ^= 1 << source.randrange(8)
    return bytes(changed)


def _cut(data: bytes, source: random.Random) -> bytes:
    return data[: source.randrange(len(data))]


def _cut_out(data: bytes, source: random.Random) -> bytes:
    first, end = sorted(source.sample(range(len(data) + 1), 2))
    return data[:first] + data[end:]


def _zero(data: bytes, source: random.Random) -> bytes:
    first, end = sorted(source.sample(range(len(data) + 1), 2))
    return data[:first] + bytes(end - first) + data[end:]


def _shuffle(data: bytes, source: random.Random) -> bytes:
    lines = data.splitlines(keepends=True)
    return b"".join(source.choices(lines, k=source.randint(0, len(lines))))


def _garbage(_: bytes, source: random.Random) -> bytes:
    return source.randbytes(source.randint(0, 3000))


DAMAGES = (_flip, _cut, _cut_out, _zero, _shuffle, _garbage)
Damage = Callable[[bytes, random.Random], bytes]


@pytest.mark.attack(530)
@settings(max_examples=150, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.integers(0, 1 << 32), st.sampled_from(DAMAGES), st.sampled_from(LAYOUTS))
def test_after_any_damage_to_the_manifest_a_repair_gives_every_row_and_tag_back(
    folders: dict[str, Path], tmp_path: Path, seed: int, damage: Damage, layout: str
) -> None:
    expected = _contents(read.open(folders[layout]))
    folder = _copy(folders[layout], tmp_path / "s")
    manifest = folder / "manifest"
    manifest.write_bytes(damage(manifest.read_bytes(), random.Random(seed)))  # noqa: S311
    before = set(os.listdir(folder))
    _repair(folder)
    assert _contents(read.open(folder)) == expected
    assert before <= set(os.listdir(folder))  # nothing was deleted
    assert not any(check.fault for check in verify(LocalDisk(folder)))
    with Writer(folder, layout=layout) as writer:
        writer.offer(block(100))
    assert _contents(read.open(folder)).keys() == expected.keys() | {100}


@pytest.mark.attack(531)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_manifest_that_is_gone_is_rebuilt_in_the_order_of_the_commits_again_and_again(
    layout: str, folders: dict[str, Path], tmp_path: Path
) -> None:
    folder = _copy(folders[layout], tmp_path / "s")
    expected = _contents(read.open(folder))
    (folder / "manifest").unlink()
    with pytest.raises(StoreDamagedError, match="clairai capture repair"):
        Writer(folder)
    _repair(folder)
    with Writer(folder, layout=layout) as writer:  # a newer row than the one computed again
        newest = block(1, 1, start=2)
        newest.arrays["values"][:] = 7.0
        writer.offer(newest)
    (folder / "manifest").unlink()
    _repair(folder)
    found = _contents(read.open(folder))
    assert found[1][1][2][0] == 7.0
    expected[1][1][2] = found[1][1][2]
    assert found == expected


@pytest.mark.attack(532)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_no_flipped_bit_of_a_shard_passes_a_repair_without_its_manifest(
    layout: str, folders: dict[str, Path], tmp_path: Path
) -> None:
    """Not one in its tags, its types or its numbers: without a manifest the seal has to find it."""
    source = random.Random(0)  # noqa: S311
    folder = _copy(folders[layout], tmp_path / "s")
    (folder / "manifest").unlink()
    victim = folder / read.open(folders[layout]).shards[0].name
    good = victim.read_bytes()
    whole = read.open(folders[layout])
    notes = whole.shard(whole.shards[0]).head.notes
    expected = _contents(read.open(folders[layout]))
    head_nbytes = len(good) if layout == "npz" else int.from_bytes(good[:8], "little") + 8
    for offset in [*range(0, head_nbytes, 37), len(good) - 1]:
        changed = bytearray(good)
        changed[offset] ^= 1 << source.randrange(8)
        victim.write_bytes(changed)
        plan = plan_repair(LocalDisk(folder))
        if [one.file for one in plan.damaged] == [victim.name]:
            continue
        # The few bytes that say that there is a seal: then it is like one of version 0.1, and said.
        assert plan.unchecked == (victim.name,)
        entries = {entry.name: entry for commit in plan.commits for entry in commit.shards}
        assert open_shard(LocalDisk(folder), entries[victim.name]).head.notes == notes
    victim.write_bytes(good)
    _repair(folder)
    assert _contents(read.open(folder)) == expected


@pytest.mark.attack(533)
def test_damaged_and_missing_shards_are_left_out_counted_and_never_deleted(
    folders: dict[str, Path], tmp_path: Path
) -> None:
    folder = _copy(folders["sharded"], tmp_path / "s")
    names = [entry.name for entry in read.open(folder).shards]
    (folder / names[0]).unlink()
    os.truncate(folder / names[1], 100)
    with pytest.raises(StoreDamagedError, match="clairai capture repair"):
        Writer(folder)
    plan = plan_repair(LocalDisk(folder))
    assert [entry.name for entry in plan.missing] == [names[0]]
    assert [one.file for one in plan.damaged] == [names[1]]
    apply_repair(LocalDisk(folder), plan)
    assert (folder / f"{names[1]}.damaged").stat().st_size == 100
    assert [entry.name for entry in read.open(folder).shards] == names[2:]
    Writer(folder).close()


@pytest.mark.attack(534)
def test_files_of_a_crashed_commit_appear_only_if_they_are_named(
    folders: dict[str, Path], tmp_path: Path
) -> None:
    folder = _copy(folders["sharded"], tmp_path / "s")
    lines = (folder / "manifest").read_bytes().splitlines(keepends=True)
    names = [entry.name for entry in read.open(folder).shards]
    (folder / "manifest").write_bytes(b"".join(lines[:-1]))  # as before the last line was written
    (folder / f"{names[0]}.tmp").write_bytes(b"half a shard")
    (folder / "0123456789abcdef-00000001.safetensors.orphan").write_bytes(b"an orphan")
    plan = plan_repair(LocalDisk(folder))
    assert plan.unlisted == (names[-1],)
    assert any(names[-1] in step and "may not have ended" in step for step in plan.steps())
    assert plan.orphans == ("0123456789abcdef-00000001.safetensors.orphan",)
    apply_repair(LocalDisk(folder), plan)
    assert sorted(entry.name for entry in read.open(folder).shards) == sorted(names)


@pytest.mark.attack(535)
def test_a_crash_in_the_middle_of_a_repair_leaves_a_folder_that_can_be_repaired(
    folders: dict[str, Path],
) -> None:
    files = {file.name: file.read_bytes() for file in folders["sharded"].iterdir()}
    expected = _contents(read.open(folders["sharded"]))
    victim = read.open(folders["sharded"]).shards[-1].name  # of the row that was computed again
    files["manifest"] = files["manifest"][:700]
    files[victim] = files[victim][:-1]

    def disk(operations_left: int) -> CrashDisk:
        inodes = {name: Inode(data, data) for name, data in files.items()}
        return CrashDisk(operations_left, files=inodes, synced_files=dict(inodes))

    whole = disk(1 << 30)
    apply_repair(whole, plan_repair(whole))
    repaired = _contents(Store(whole))
    assert repaired.keys() == expected.keys()
    for operations in range(len(whole.done)):
        crashing = disk(operations)
        with pytest.raises(CrashError):
            apply_repair(crashing, plan_repair(crashing))
        for fate in fates():
            found = crashing.after_crash(fate)
            plan = plan_repair(found)
            if plan.is_needed:
                apply_repair(found, plan)
            assert _contents(Store(found)) == repaired
            kept = [inode.data for inode in found.files.values()]
            assert files[victim] in kept


def test_the_command_says_what_it_would_do_and_does_it_only_when_told(
    folders: dict[str, Path], tmp_path: Path
) -> None:
    folder = _copy(folders["sharded"], tmp_path / "s")
    expected = _contents(read.open(folder))
    run = CliRunner().invoke
    assert "nothing to repair" in run(app, ["capture", "repair", str(folder)]).stdout
    (folder / "manifest").write_bytes(b"x")
    said = run(app, ["capture", "repair", str(folder)])
    assert (said.exit_code, "write a manifest of 7 shards and 19 rows" in said.stdout) == (1, True)
    assert (folder / "manifest").read_bytes() == b"x"
    done = run(app, ["capture", "repair", str(folder), "--apply"])
    assert (done.exit_code, done.stdout.splitlines()[-1]) == (0, "repaired")
    assert _contents(read.open(folder)) == expected
    assert (folder / "manifest-1.damaged").read_bytes() == b"x"


@pytest.mark.attack(536)
def test_a_manifest_of_a_newer_version_and_a_seal_beyond_reason_are_refused(
    folders: dict[str, Path], tmp_path: Path
) -> None:
    folder = _copy(folders["sharded"], tmp_path / "s")
    manifest = folder / "manifest"
    data = manifest.read_bytes()
    manifest.write_bytes(data.replace(b'"version":1', b'"version":2', 1))
    with pytest.raises(StoreError, match="repair it with the version that wrote it"):
        plan_repair(LocalDisk(folder))
    manifest.unlink()
    sealed = shard.put_seal(shard.seal_safetensors([block(50)], {}), CommitSeal(1 << 60, 1, 1))
    hostile = folder / "ffffffffffffffff-00000001.safetensors"
    hostile.write_bytes(sealed.start + b"".join(map(bytes, sealed.pieces)))
    plan = plan_repair(LocalDisk(folder))
    assert [one.file for one in plan.damaged] == [hostile.name]
    assert len(plan.commits) == 8


def test_a_folder_without_anything_is_not_made_one(tmp_path: Path) -> None:
    (tmp_path / "s").mkdir(mode=0o700)
    with pytest.raises(StoreError, match="not a folder of captures"):
        plan_repair(LocalDisk(tmp_path / "s"))
    assert CliRunner().invoke(app, ["capture", "repair", str(tmp_path / "no"), "--apply"]).exit_code
    assert os.listdir(tmp_path) == ["s"]


@pytest.mark.parametrize("damage", ["gone", "changed"])
def test_a_folder_of_version_0_1_is_repaired_and_what_cannot_be_checked_is_said(
    damage: str, tmp_path: Path
) -> None:
    """Its shards have no seal."""
    golden = Path(__file__).parents[1] / "surface" / "golden" / "captures"
    folder = _copy(golden, tmp_path / "s")
    folder.chmod(0o700)
    expected = _contents(read.open(golden))
    manifest = folder / "manifest"
    if damage == "gone":
        manifest.unlink()
    else:
        first, second = manifest.read_bytes().splitlines(keepends=True)
        manifest.write_bytes(first + second.replace(b'"time_ns":1', b'"time_ns":2'))
    plan = plan_repair(LocalDisk(folder))
    assert len(plan.unchecked) == 3
    assert any("its tags and order are not checked" in step for step in plan.steps())
    apply_repair(LocalDisk(folder), plan)
    assert _contents(read.open(folder)) == expected
    with Writer(folder) as writer:
        writer.offer(block(100))
    manifest.unlink()
    _repair(folder)
    assert _contents(read.open(folder)).keys() == expected.keys() | {100}
