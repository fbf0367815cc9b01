"""Heartbeat files: who may write them, what is read of them, and which files are none."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from clairai.local.heartbeat import (
    FILE_BYTES,
    VARIABLE,
    Activity,
    Heartbeat,
    has_heartbeat,
    read_heartbeats,
    read_process_state,
)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    made = tmp_path / "beats"
    made.mkdir(mode=0o700)
    return made


def opened(folder: Path, role: str = "engine-core") -> Heartbeat:
    found = Heartbeat.open(role, {VARIABLE: str(folder)})  # type: ignore[arg-type]
    assert found is not None
    return found


def test_every_beat_is_read_by_another_process(folder: Path) -> None:
    heartbeat = opened(folder)
    (before,) = read_heartbeats(folder)
    assert (before.role, before.pid, before.beats) == ("engine-core", os.getpid(), 0)
    heartbeat.beat()
    program = (
        "import sys; from pathlib import Path\n"
        "from clairai.local.heartbeat import read_heartbeats\n"
        "print(read_heartbeats(Path(sys.argv[1]))[0].beats)"
    )
    command = [sys.executable, "-c", program, str(folder)]
    assert subprocess.run(command, capture_output=True, check=True).stdout == b"1\n"


def test_the_start_time_tells_a_process_from_a_later_one_with_its_id(folder: Path) -> None:
    opened(folder)
    (beat,) = read_heartbeats(folder)
    state = read_process_state(os.getpid())
    assert state is not None
    assert state.start_ticks == beat.start_ticks
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as other:
        later = read_process_state(other.pid)
        assert later is not None
        assert later.start_ticks > beat.start_ticks
        other.communicate()
    assert read_process_state(other.pid) is None


def test_a_call_that_may_take_minutes_is_announced_while_it_lasts(folder: Path) -> None:
    heartbeat = opened(folder)
    with heartbeat.during_call():
        assert read_heartbeats(folder)[0].activity is Activity.CALL
    assert read_heartbeats(folder)[0].activity is Activity.LOOP


def test_a_process_that_ends_in_order_leaves_no_file(folder: Path) -> None:
    opened(folder).close()
    assert list(folder.iterdir()) == []


def test_a_process_has_one_role_the_last_it_opened(folder: Path) -> None:
    assert not has_heartbeat(os.getpid(), {VARIABLE: str(folder)})
    opened(folder, "worker")
    assert has_heartbeat(os.getpid(), {VARIABLE: str(folder)})
    opened(folder, "engine-core")
    assert [beat.role for beat in read_heartbeats(folder)] == ["engine-core"]


@pytest.mark.parametrize("environ", [{}, {VARIABLE: ""}, {VARIABLE: "/nowhere/at/all"}])
def test_without_a_launcher_there_is_no_heartbeat(environ: dict[str, str]) -> None:
    assert Heartbeat.open("worker", environ) is None


@pytest.mark.attack(400)
def test_a_folder_that_others_can_write_to_is_not_used(folder: Path) -> None:
    folder.chmod(0o770)
    assert Heartbeat.open("worker", {VARIABLE: str(folder)}) is None
    folder.chmod(0o700)
    link = folder.parent / "link"
    link.symlink_to(folder)
    assert Heartbeat.open("worker", {VARIABLE: str(link)}) is None
    assert list(folder.iterdir()) == []


@pytest.mark.attack(401)
def test_files_that_are_no_heartbeats_are_passed_over_and_hang_nobody(folder: Path) -> None:
    opened(folder).beat()
    whole = (folder / f"engine-core-{os.getpid()}").read_bytes()
    planted = {
        "worker-1": b"",
        "worker-2": whole[: FILE_BYTES // 4],
        "worker-3": b"X" * FILE_BYTES,
        "worker-4": whole[:12] + b"\xff\xff\xff\xff" + whole[16:],  # no such activity
        "stranger-5": whole,
        "no role": whole,
    }
    for name, data in planted.items():
        (folder / name).write_bytes(data)
    (folder / "worker-6").symlink_to("/etc/passwd")
    os.mkfifo(folder / "worker-7")
    (folder / "worker-8").mkdir()
    assert [beat.beats for beat in read_heartbeats(folder)] == [1]
