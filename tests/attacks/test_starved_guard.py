"""A process guard without descriptors still guards, and ends all that it has to end."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from clairai.launch import process_guard
from clairai.local.heartbeat import VARIABLE
from tests.process.fault_injection import exhaust_fds
from tests.support.ring_engine import DEADLINE_S, until

# A server with a child of its own in another session, which only a look into /proc can find.
SERVER = (
    "import os, pathlib, sys, time\n"
    "if os.fork() == 0: os.setsid()\n"
    "else: pathlib.Path(sys.argv[1]).touch()\n"
    "time.sleep(600)\n"
)


@contextmanager
def guarding(folder: Path) -> Iterator[tuple[subprocess.Popen[bytes], int]]:
    """A guard whose server runs, and the write end of its pipe."""
    reading, control = os.pipe()
    private = folder / "private"
    private.mkdir(mode=0o700)
    ready = folder / "ready"
    command = [sys.executable, "-I", process_guard.__file__, f"{reading}", str(private), ""]
    guard = subprocess.Popen(
        [*command, sys.executable, "-c", SERVER, str(ready)],
        pass_fds=(reading,),
        env={**os.environ, VARIABLE: str(private)},
    )
    os.close(reading)
    try:
        until(ready.exists)
        yield guard, control
    finally:
        os.close(control)
        guard.wait(DEADLINE_S)


def beats(folder: Path) -> bytes:
    (file,) = (folder / "private").glob("process-guard-*")
    return file.read_bytes()


def children(pid: int) -> list[str]:
    return Path(f"/proc/{pid}/task/{pid}/children").read_text().split()


@pytest.mark.attack(810)
def test_a_guard_without_descriptors_goes_on_and_ends_every_process(tmp_path: Path) -> None:
    with guarding(tmp_path) as (guard, _):
        (server,) = children(guard.pid)
        until(lambda: children(int(server)))
        (detached,) = children(int(server))
        exhaust_fds(guard.pid)
        before = beats(tmp_path)
        until(lambda: beats(tmp_path) != before)  # it looks around as before
        assert guard.poll() is None
    assert guard.returncode == 128 + 15
    assert not Path(f"/proc/{detached}").exists()
    assert not (tmp_path / "private").exists()
