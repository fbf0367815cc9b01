"""What is judged from heartbeats: gone, suspended, silent; with a clock of the test's own."""

from __future__ import annotations

import os
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest

from clairai.launch import process_guard
from clairai.launch.liveness import LivenessLimits, LivenessWatch, Trouble
from clairai.local.heartbeat import (
    Activity,
    Beat,
    ProcessState,
    Role,
    read_heartbeats,
    read_process_state,
)

LIMITS = LivenessLimits(gone=1.0, stopped=3.0, slow=8.0, stall=60.0, call=600.0)
EPOCH = 1_700_000_000.0
STEP_S = 0.2


@dataclass
class Scene:
    """Processes as the kernel and their files show them."""

    beats: dict[int, Beat] = field(default_factory=dict)
    letters: dict[int, str] = field(default_factory=dict)
    starts: dict[int, int] = field(default_factory=dict)
    now_s: float = 100.0
    is_blind: bool = False  # we can open no file

    def __post_init__(self) -> None:
        self.watch = LivenessWatch(
            LIMITS,
            state_of=self._state_of,
            clock=lambda: self.now_s,
            wall_clock=lambda: EPOCH + self.now_s,
        )

    def _state_of(self, pid: int) -> ProcessState | None:
        if self.is_blind:
            raise OSError(24, "Too many open files")
        letter = self.letters.get(pid)
        return None if letter is None else ProcessState(letter, self.starts[pid])

    def add(self, role: Role, pid: int, *, beats: int = 1) -> None:
        self.beats[pid] = Beat(role, pid, pid * 10, beats)
        self.letters[pid], self.starts[pid] = "S", pid * 10

    def change(self, pid: int, **changes: object) -> None:
        self.beats[pid] = replace(self.beats[pid], **changes)  # type: ignore[arg-type]

    def run(self, seconds: float, *, beating: tuple[int, ...] = ()) -> Trouble | None:
        """Look five times a second; `beating` go on meanwhile."""
        found = None
        for _ in range(round(seconds / STEP_S)):
            self.now_s += STEP_S
            for pid in beating:
                self.change(pid, beats=self.beats[pid].beats + 1)
            found = self.watch.look(list(self.beats.values()))
        return found


@pytest.fixture
def scene() -> Scene:
    made = Scene()
    made.add("engine-core", 7)
    assert made.run(1.0, beating=(7,)) is None
    return made


def test_processes_that_beat_are_well(scene: Scene) -> None:
    scene.add("api-server", 8)
    assert scene.run(300.0, beating=(7, 8)) is None


@pytest.mark.attack(402)
@pytest.mark.parametrize("role", ["engine-core", "worker"])
def test_a_killed_process_is_fatal_within_seconds(scene: Scene, role: Role) -> None:
    scene.add(role, 9)
    scene.run(1.0, beating=(7, 9))
    died = EPOCH + scene.now_s
    del scene.letters[9]
    found = scene.run(2.0, beating=(7,))
    assert found is not None
    assert found.is_fatal
    assert found.reason.endswith("(process 9) has ended")
    assert found.since == pytest.approx(died, abs=0.5)


def test_another_process_with_the_same_id_is_not_the_one_that_beat(scene: Scene) -> None:
    scene.starts[7] += 1
    found = scene.run(2.0)
    assert found is not None
    assert "has ended" in found.reason


@pytest.mark.parametrize("letter", ["Z", "X"])
def test_a_process_that_nobody_has_reaped_is_gone(scene: Scene, letter: str) -> None:
    scene.letters[7] = letter
    found = scene.run(2.0)
    assert found is not None
    assert found.is_fatal


def test_the_guard_reports_the_end_of_its_own_child(scene: Scene) -> None:
    scene.add("api-server", 8)
    scene.run(1.0, beating=(7, 8))
    del scene.letters[8]
    assert scene.run(5.0, beating=(7,)) is None


@pytest.mark.attack(403)
@pytest.mark.parametrize("role", ["engine-core", "worker", "api-server"])
def test_a_suspended_process_is_fatal_within_seconds(scene: Scene, role: Role) -> None:
    scene.add(role, 9, beats=0)
    scene.letters[9] = "T"
    assert scene.run(2.0, beating=(7,)) is None
    found = scene.run(2.0, beating=(7,))
    assert found is not None
    assert found.is_fatal
    assert found.reason.endswith("(process 9) is suspended")


def test_a_process_that_was_suspended_briefly_or_is_traced_is_left_alone(scene: Scene) -> None:
    scene.letters[7] = "T"
    assert scene.run(2.0) is None
    scene.letters[7] = "S"
    assert scene.run(2.0, beating=(7,)) is None
    scene.letters[7] = "t"  # a debugger
    found = scene.run(20.0)
    assert found is not None
    assert not found.is_fatal


@pytest.mark.attack(419)
def test_an_api_server_that_is_cut_off_from_the_core_is_fatal_although_both_beat(
    scene: Scene,
) -> None:
    scene.add("api-server", 8)
    assert scene.run(60.0, beating=(7, 8)) is None
    broken = EPOCH + scene.now_s
    scene.change(8, activity=Activity.CUT_OFF)
    assert scene.run(LIMITS.cut_off - 0.5, beating=(7, 8)) is None
    found = scene.run(1.0, beating=(7, 8))
    assert found is not None
    assert found.is_fatal
    assert found.reason == "the API server (process 8) has lost its connection to the engine core"
    assert found.since == pytest.approx(broken, abs=0.5)


def test_a_core_that_ended_is_named_and_not_the_connection_that_ended_with_it(scene: Scene) -> None:
    scene.add("api-server", 8)
    scene.run(1.0, beating=(7, 8))
    del scene.letters[7]
    scene.change(8, activity=Activity.CUT_OFF)
    found = next(filter(None, (scene.run(0.2, beating=(8,)) for _ in range(50))))
    assert found.reason == "the engine core (process 7) has ended"


@pytest.mark.attack(404)
def test_a_loop_that_hangs_is_told_soon_and_fatal_after_the_limit(scene: Scene) -> None:
    stopped = EPOCH + scene.now_s
    assert scene.run(LIMITS.slow - 1.0) is None
    slow = scene.run(2.0)
    assert slow is not None
    assert (slow.reason, slow.is_fatal) == ("the engine core (process 7) makes no progress", False)
    assert slow.since == pytest.approx(stopped, abs=0.5)
    assert scene.run(LIMITS.stall - LIMITS.slow - 3.0) == slow
    found = scene.run(4.0)
    assert found == replace(slow, is_fatal=True)


def test_a_loop_that_goes_on_again_is_well(scene: Scene) -> None:
    assert scene.run(20.0) is not None
    assert scene.run(1.0, beating=(7,)) is None


def test_loading_weights_may_take_minutes_and_is_told(scene: Scene) -> None:
    scene.change(7, activity=Activity.CALL)
    found = scene.run(LIMITS.stall * 2)
    assert found is not None
    assert (found.reason, found.is_fatal) == (
        "the engine core (process 7) is busy with one call",
        False,
    )
    found = scene.run(LIMITS.call)
    assert found is not None
    assert found.is_fatal


def test_a_process_that_starts_may_take_any_time_before_its_first_beat() -> None:
    scene = Scene()
    scene.add("worker", 7, beats=0)
    assert scene.run(3600.0) is None


@pytest.mark.attack(405)
def test_time_in_which_the_launcher_was_suspended_condemns_nobody(scene: Scene) -> None:
    scene.now_s += 3600.0  # Ctrl-Z, and fg an hour later
    assert scene.watch.look(list(scene.beats.values())) is None
    assert scene.run(2.0, beating=(7,)) is None


def test_a_dead_capture_writer_is_told_and_not_fatal_until_a_new_one_beats(scene: Scene) -> None:
    scene.add("capture-writer", 20)
    scene.run(1.0, beating=(7, 20))
    del scene.letters[20]
    found = scene.run(2.0, beating=(7,))
    assert found is not None
    assert (found.reason, found.is_fatal) == ("the capture writer (process 20) has ended", False)
    scene.add("capture-writer", 21)
    assert scene.run(2.0, beating=(7, 21)) is None


def test_the_capture_writers_of_all_engine_cores_are_watched(scene: Scene) -> None:
    scene.add("capture-writer", 20)
    scene.add("capture-writer", 21)
    assert scene.run(2.0, beating=(7, 20, 21)) is None
    scene.letters[20] = "T"  # not the last that was started
    found = scene.run(4.0, beating=(7, 21))
    assert found is not None
    assert found.reason == "the capture writer (process 20) is suspended"


def test_a_core_that_makes_no_progress_is_told_before_a_process_that_no_request_waits_for(
    scene: Scene,
) -> None:
    scene.add("capture-writer", 20)
    scene.run(1.0, beating=(7, 20))
    scene.letters[20] = "T"
    found = scene.run(4.0, beating=(7,))
    assert found is not None
    assert (found.reason, found.is_stalling) == (
        "the capture writer (process 20) is suspended",
        False,
    )
    found = scene.run(LIMITS.slow + 1.0)
    assert found is not None
    assert (found.reason, found.is_stalling) == (
        "the engine core (process 7) makes no progress",
        True,
    )


def test_a_suspended_guard_is_told_and_a_fatal_trouble_comes_first(scene: Scene) -> None:
    scene.add("process-guard", 5)
    scene.letters[5] = "T"
    found = scene.run(4.0, beating=(7,))
    assert found is not None
    assert not found.is_fatal
    scene.letters[7] = "T"
    found = scene.run(4.0)
    assert found is not None
    assert (found.reason, found.is_fatal) == ("the engine core (process 7) is suspended", True)


def test_the_guard_which_imports_nothing_of_ours_writes_the_same_heartbeat(tmp_path: Path) -> None:
    heartbeat = process_guard.Heartbeat(str(tmp_path))
    heartbeat.beat()
    heartbeat.beat()
    (found,) = read_heartbeats(tmp_path)
    state = read_process_state(os.getpid())
    assert state is not None
    assert found == Beat("process-guard", os.getpid(), state.start_ticks, 2)


@pytest.mark.attack(813)
def test_a_launcher_without_descriptors_condemns_nobody(scene: Scene) -> None:
    scene.is_blind = True
    assert scene.run(30.0, beating=(7,)) is None
