"""The heartbeat of an engine core: it beats when the busy loop takes what is in its queue."""

from __future__ import annotations

import queue
from pathlib import Path
from typing import Any

import msgspec
import pytest

from clairai.compat.loop_heartbeat import LoopHeartbeat, expect_long_call, install_heartbeat
from clairai.local.heartbeat import VARIABLE, Activity, Heartbeat, read_heartbeats
from clairai.wire import control_messages, weights_messages
from tests.support.ring_engine import until


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    made = tmp_path / "beats"
    made.mkdir(mode=0o700)
    monkeypatch.setenv(VARIABLE, str(made))
    return made


def beats(folder: Path) -> int:
    (found,) = read_heartbeats(folder)
    return found.beats


def opened() -> Heartbeat:
    found = Heartbeat.open("engine-core")
    assert found is not None
    return found


def test_it_beats_once_for_every_entry_that_the_loop_has_taken(folder: Path) -> None:
    inputs: Any = queue.Queue()
    loop = LoopHeartbeat(opened(), inputs, ("wake up", None))
    loop.go_round()
    assert (beats(folder), inputs.qsize()) == (0, 1)
    for taken in (1, 2, 3):
        assert inputs.get_nowait() == ("wake up", None)
        loop.go_round()
        assert beats(folder) == taken


def test_a_loop_that_hangs_gets_no_second_entry_and_no_beat(folder: Path) -> None:
    inputs: Any = queue.Queue()
    loop = LoopHeartbeat(opened(), inputs, ("wake up", None))
    inputs.put(("wake up", None))  # somebody else's, which is the same and not ours
    for _ in range(10):
        loop.go_round()
    assert (beats(folder), inputs.qsize()) == (0, 2)
    inputs.get_nowait()
    loop.go_round()
    assert beats(folder) == 0
    inputs.get_nowait()
    loop.go_round()
    assert beats(folder) == 1


class Core:
    """What a heartbeat uses of EngineCoreProc."""

    def __init__(self) -> None:
        self.input_queue: Any = queue.Queue()
        self.seen: list[Activity] = []

    def run_busy_loop(self) -> None:
        for _ in range(3):
            self.input_queue.get(timeout=20)

    def __getattr__(self, name: str) -> Any:
        """`_invoke_utility_method`, until the heartbeat wraps it."""
        assert name == "_invoke_utility_method"
        return lambda _, get_result: get_result()


class DataParallelCore(Core):
    def run_busy_loop(self) -> None:
        super().run_busy_loop()


@pytest.fixture
def core(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Core:
    del folder
    for kind in (Core, DataParallelCore):  # undone after the test
        monkeypatch.setattr(kind, "run_busy_loop", kind.run_busy_loop)
    install_heartbeat(Core, ("wake up", None))
    made = DataParallelCore()
    made.run_busy_loop()
    return made


def test_a_core_beats_from_its_first_round_on(folder: Path, core: Core) -> None:
    del core
    until(lambda: beats(folder) >= 2)


def test_a_call_that_may_take_minutes_is_announced_and_another_is_not(
    folder: Path, core: Core
) -> None:
    def activity() -> Activity:
        return read_heartbeats(folder)[0].activity

    assert core._invoke_utility_method("add_lora", activity) is Activity.CALL
    assert core._invoke_utility_method("collective_rpc", activity) is Activity.LOOP
    for message, expected in (
        (weights_messages.CommitWeights(b"{}"), Activity.CALL),
        (control_messages.ListProbes(), Activity.LOOP),
    ):
        args = (msgspec.msgpack.encode(message),)
        with expect_long_call(core, control_messages.CONTROL_METHOD, args):
            assert activity() is expected
    with expect_long_call(core, control_messages.CONTROL_METHOD, (b"\xff nonsense",)):
        assert activity() is Activity.LOOP
    with expect_long_call(core, "reload_weights", ()):
        assert activity() is Activity.CALL


def test_without_a_launcher_nothing_is_put_into_the_queue(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(VARIABLE, raising=False)
    core = Core()
    with expect_long_call(core, "reload_weights", ()):
        pass
    assert core.input_queue.empty()
