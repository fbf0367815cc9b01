"""Every check of the fault matrix can fail: each is shown what it must not let pass."""

from __future__ import annotations

import asyncio
import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.process import fault_cell, fault_injection, toy_engine
from tests.process.fault_cell import FaultRun, References, Seen, are_close, which_weights
from tests.process.fault_injection import SmallDisk
from tests.process.fault_load import Answer, Load
from tests.process.fault_matrix import Cell, Fault, Role, State
from tests.process.faulted_service import FaultedService, Sample, TooLate
from tests.process.run_faults import Record, _line, is_held, page, read_page
from tests.support.ring_engine import until

RIGHT = Answer(tokens=[1, 2, 3], scores=[[0.5], [0.25], [None]])
OTHER = Answer(tokens=[4, 5, 6], scores=[[0.1], [0.2], [None]])
KILLED = Cell(State.STREAMING, Role.WORKER, Fault.SIGKILL)


@pytest.fixture(autouse=True)
def short_limits(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("NOTICE_S", "STREAM_END_S", "GO_ON_S", "RECOVER_S", "READY_S"):
        monkeypatch.setattr(fault_cell, name, 0.2)


class Health:
    """What GET /health is said to have answered."""

    def __init__(self, *samples: Sample) -> None:
        self._samples = samples

    def since(self, at_s: float) -> list[Sample]:
        return [one for one in self._samples if one.at_s >= at_s]

    def last(self) -> Sample:
        return self._samples[-1]


def fault_run(cell: Cell = KILLED, **service: Any) -> FaultRun:
    """A fault that was planted just now."""
    given: Any = SimpleNamespace(**service)
    nowhere: Any = None
    made = FaultRun(given, (cell,), nowhere, Path(), Path(), References(RIGHT, OTHER))
    made._fault_s, made._fault_at, made._epoch = time.monotonic(), time.time(), "1"
    made._before = Sample(made._fault_s, "ready")
    return made


def sample(status: str, reason: str | None = "why", since: float | None = None) -> Sample:
    return Sample(time.monotonic() + 0.1, status, reason, since)


def clients(*answers: Answer) -> Load:
    """Clients with these answers as their last."""
    made: Any = [
        SimpleNamespace(
            answers=[one], failed=one if one.error else None, num_tokens=len(one.tokens)
        )
        for one in answers
    ]
    return Load(made)


def test_a_fault_that_health_hides_or_does_not_explain_is_caught() -> None:
    with pytest.raises(TooLate, match="GET /health"):
        fault_run(health=Health(sample("ready"))).check_notice()
    with pytest.raises(AssertionError, match="does not say why"):
        fault_run(health=Health(sample("failed", None))).check_notice()
    with pytest.raises(AssertionError, match="since when"):
        fault_run(health=Health(sample("failed"))).check_notice()
    with pytest.raises(AssertionError, match="s from the fault"):
        fault_run(health=Health(sample("failed", since=time.time() - 60))).check_notice()
    known = fault_run(health=Health(sample("degraded", "lost before")))
    known._before = sample("degraded", "lost before")
    with pytest.raises(TooLate, match="GET /health"):
        known.check_notice()
    good = fault_run(health=Health(sample("failed", since=time.time())))
    good.check_notice()
    assert good.seen[State.STREAMING].noticed_s is not None


def test_a_stream_that_hangs_or_breaks_off_is_caught() -> None:
    ended_s = time.monotonic()
    with pytest.raises(TooLate, match="every stream ends"):
        fault_run().check_streams(State.STREAMING, clients(Answer(tokens=[1])))
    broken = Answer(error="ReadError", was_broken=True, ended_s=ended_s)
    with pytest.raises(AssertionError, match="without an error"):
        fault_run().check_streams(State.STREAMING, clients(broken))
    fault_run().check_streams(
        State.STREAMING, clients(Answer(error="the engine is gone", ended_s=ended_s))
    )


def test_a_stream_that_should_go_on_and_does_not_is_caught() -> None:
    unharmed = fault_run(Cell(State.STREAMING, Role.SIDECAR, Fault.SIGKILL))
    with pytest.raises(TooLate, match="streams go on"):
        unharmed.check_streams(State.STREAMING, clients(Answer(tokens=[1])))
    with pytest.raises(AssertionError, match="a stream failed"):
        unharmed.check_streams(State.STREAMING, clients(Answer(error="gone", ended_s=1.0)))


def test_an_engine_that_does_not_come_back_or_should_have_stayed_is_caught() -> None:
    process = SimpleNamespace(poll=lambda: None)
    run = fault_run(process=process, health=Health(sample("failed")), epoch=lambda: "1")
    with pytest.raises(TooLate, match="a new engine serves"):
        run.check_back()
    assert run.is_service_over
    unharmed = fault_run(
        Cell(State.STREAMING, Role.SIDECAR, Fault.SIGKILL),
        health=Health(sample("ready")),
        epoch=lambda: "2",
    )
    with pytest.raises(AssertionError, match="started again"):
        unharmed.check_back()


def test_weights_that_are_mixed_and_scores_of_other_tokens_are_caught() -> None:
    references = References(RIGHT, OTHER)
    assert which_weights(RIGHT, references) == "old"
    assert which_weights(OTHER, references) == "new"
    mixed = Answer(tokens=[1, 2, 6], scores=RIGHT.scores)
    assert which_weights(mixed, references) == "neither the old nor the new"
    shifted = Answer(tokens=RIGHT.tokens, scores=[[0.25], [0.5], [None]])
    assert which_weights(shifted, references) == "old but wrongly scored"
    assert are_close([[None], [0.25], [None]], RIGHT.scores)  # lost on the way is not wrong
    assert not are_close([[None], [None], [None]], RIGHT.scores)


def test_what_a_service_leaves_behind_is_caught(tmp_path: Path) -> None:
    folders = {name: tmp_path / name for name in ("r", "shm", "tmp")}
    for folder in folders.values():
        folder.mkdir()
    environ = {**os.environ, "CLAIRAI_RUNTIME_DIR": str(folders["r"])}
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], env=environ)
    disks: Any = SimpleNamespace(
        runtime=SimpleNamespace(folder=folders["r"]),
        shm=folders["shm"],
        scratch=folders["tmp"],
        store=tmp_path / "none",
    )
    over: Any = SimpleNamespace(pid=-1, kill=lambda: None, wait=lambda: None, close=lambda: None)
    service = FaultedService(disks, {}, "toy", over, over, "", over)
    (folders["r"] / "engine-1.sock").touch()
    (folders["shm"] / "psm_1").touch()
    try:
        until(service.processes)
        left = service.leftovers(timeout_s=0.1)
    finally:
        child.kill()
        child.wait()
    assert [line.split()[2] for line in left] == ["process", "runtime/engine-1.sock", "shm/psm_1"]


@pytest.fixture
def child() -> Iterator[subprocess.Popen[bytes]]:
    """A process with one connection, that tries to open a file whenever it is told to."""
    ours, theirs = socket.socketpair()
    text = (
        "import socket, sys\n"
        "sock = socket.socket(fileno=int(sys.argv[1]))\n"
        "while word := sock.recv(1):\n"
        "    try: open('/dev/null').close(); sock.send(b'y')\n"
        "    except OSError: sock.send(b'n')\n"
    )
    command = [sys.executable, "-c", text, f"{theirs.fileno()}"]
    process = subprocess.Popen(command, pass_fds=(theirs.fileno(),))
    theirs.close()
    process.link = ours  # type: ignore[attr-defined]
    yield process
    process.kill()
    process.wait()
    ours.close()


def _can_open(child: Any) -> bool:
    child.link.send(b"?")
    return bool(child.link.recv(1) == b"y")


def test_the_page_keeps_what_an_earlier_run_has_seen() -> None:
    held, failed = Seen(notes=["as told"], noticed_s=1.0), Seen(problems=["it hangs | for good"])
    hung = Cell(State.IDLE, Role.COMPLETION, Fault.HANG)
    lines = {
        cell: _line(cell, Record.of(cell, seen)) for cell, seen in ((KILLED, held), (hung, failed))
    }
    text = page(lines)
    assert read_page(text) == lines
    assert [is_held(lines[cell]) for cell in (KILLED, hung)] == [True, False]
    assert "1 of 164 cells hold" in text
    assert text.count("| not run |") == 162
    changed = text.replace("streams end with an error; back", "streams go on; back")
    assert KILLED not in read_page(changed)  # of another expectation


def test_a_hang_is_of_the_main_thread_alone_and_ends(child: subprocess.Popen[bytes]) -> None:
    assert _can_open(child)
    try:
        go_on = fault_injection.spin(child.pid)
    except PermissionError:
        pytest.skip("needs the right to trace processes")
    child.link.settimeout(0.3)  # type: ignore[attr-defined]
    with pytest.raises(TimeoutError):
        _can_open(child)
    go_on()
    child.link.settimeout(20)  # type: ignore[attr-defined]
    assert child.link.recv(1) == b"y"  # type: ignore[attr-defined]
    assert _can_open(child)


def test_a_stream_of_another_process_that_ends_too_is_caught() -> None:
    run = fault_run(Cell(State.STREAMING, Role.COMPLETION, Fault.HANG))
    ended = Answer(error="the process was ended", ended_s=time.monotonic())
    with pytest.raises(AssertionError, match="other process ended, too"):
        run.check_streams(State.STREAMING, clients(ended, ended))
    with pytest.raises(TooLate, match="a stream ends"):
        run.check_streams(State.STREAMING, clients(Answer(tokens=[1]), Answer(tokens=[1])))
    broken = Answer(error="ReadError", was_broken=True, ended_s=time.monotonic())
    with pytest.raises(AssertionError, match="without an error"):
        run.check_streams(State.STREAMING, clients(broken, Answer(tokens=[1])))


def test_descriptors_run_out_and_come_back(child: subprocess.Popen[bytes]) -> None:
    assert _can_open(child)
    give_back = fault_injection.exhaust_fds(child.pid)
    assert not _can_open(child)
    give_back()
    assert _can_open(child)


def test_a_closed_connection_is_seen_by_both_ends(child: subprocess.Popen[bytes]) -> None:
    assert _can_open(child)
    fault_injection.close_connections(child.pid)
    assert child.link.recv(1) == b""  # type: ignore[attr-defined]
    assert child.wait(20) == 0


def test_a_full_disk_takes_no_byte_until_there_is_room(tmp_path: Path) -> None:
    disk = SmallDisk(tmp_path / "disk", 1 << 20)
    if not disk.is_mounted:
        pytest.skip("needs the right to mount")
    try:
        make_room = disk.fill()
        with pytest.raises(OSError, match="No space left"):
            (disk.folder / "more").write_bytes(b"1")
        make_room()
        (disk.folder / "more").write_bytes(b"1")
    finally:
        disk.close()


def test_an_asker_of_the_toy_that_is_cancelled_leaves_the_next_one_its_own_reply() -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        engine = toy_engine.Link(theirs)
        engine.send({"epoch": 1})
        client = toy_engine.EngineClient(toy_engine.Link(ours))

        async def ask() -> dict[str, Any]:
            gone = asyncio.create_task(client.ask(number=1))
            (asked,) = await asyncio.to_thread(engine.receive) or []
            gone.cancel()
            await asyncio.wait({gone})
            next_one = asyncio.create_task(client.ask(number=2))
            for _ in range(10):  # rounds of the loop, in which it would ask
                await asyncio.sleep(0)
            with pytest.raises(BlockingIOError):  # it waits until the first reply has been read
                theirs.recv(1, socket.MSG_DONTWAIT | socket.MSG_PEEK)
            engine.send(asked)
            (asked,) = await asyncio.to_thread(engine.receive) or []
            engine.send(asked)
            return await next_one

        assert asyncio.run(ask()) == {"number": 2}
