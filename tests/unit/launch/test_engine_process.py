"""Takes a Launch; gives a process under a keeper, and nothing of it is left when either ends."""

from __future__ import annotations

import os
import signal
import stat
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import pytest

from clairai.errors import EngineGoneError
from clairai.launch import process_guard
from clairai.launch.engine_command import EngineCommand, PrivateSocket
from clairai.launch.engine_log import EngineLog
from clairai.launch.engine_process import EngineProcess
from tests.process.parts import until

# Stands in for vLLM: a server with a child of its own, which has moved to a session of its own and
# does not mind SIGTERM.
SERVER = """
import os, signal, socketserver, sys, time
from http.server import BaseHTTPRequestHandler
if len(sys.argv) > 2 and os.fork() == 0:
    os.setsid()
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    open(sys.argv[2], "w").write(str(os.getpid()))
    time.sleep(600)
class Handler(BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.end_headers()
    def log_request(self, *_): pass
socketserver.UnixStreamServer(sys.argv[1], Handler).serve_forever()
"""
SLEEPER = "import time; time.sleep(600)"
DEAF = """
import signal, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
print("deaf", flush=True)
time.sleep(600)
"""


@dataclass(frozen=True)
class OtherLaunch(EngineCommand):
    program: tuple[str, ...] = ()

    def argv(self) -> list[str]:
        return [sys.executable, "-c", *self.program]


def launch(folder: Path, *program: str) -> OtherLaunch:
    return OtherLaunch("m", {}, PrivateSocket.within(folder), program=program)


def serving(folder: Path, *child_file: Path) -> OtherLaunch:
    bind = PrivateSocket.within(folder)
    return OtherLaunch("m", {}, bind, program=(SERVER, str(bind.path), *map(str, child_file)))


def is_running(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return False
    return state not in "ZX"


def number_in(file: Path) -> int:
    until(lambda: file.exists() and file.read_text())
    return int(file.read_text())


def test_a_server_and_its_children_are_gone_after_the_block(tmp_path: Path) -> None:
    with EngineProcess(serving(tmp_path, tmp_path / "child")) as engine:
        assert engine.wait_ready()
        child = number_in(tmp_path / "child")
        assert is_running(child)
        assert stat.S_IMODE(engine.launch.private_folder.stat().st_mode) == 0o700  # type: ignore[union-attr]
    assert not engine.is_alive()
    assert not is_running(child)
    assert [entry.name for entry in tmp_path.iterdir()] == ["child"]


def test_a_server_that_was_stopped_can_be_started_again_at_the_same_address(
    tmp_path: Path,
) -> None:
    again = serving(tmp_path)
    for _ in range(2):
        with EngineProcess(again) as engine:
            assert engine.wait_ready()


def test_nothing_is_left_when_we_are_killed(tmp_path: Path) -> None:
    program = (
        "import sys; from pathlib import Path\n"
        "from tests.unit.launch.test_engine_process import EngineProcess, serving\n"
        "engine = EngineProcess(serving(Path(sys.argv[1]), Path(sys.argv[1], 'child')))\n"
        "engine.wait_ready(); Path(sys.argv[1], 'keeper').write_text(str(engine.pid))\n"
        "engine._process.wait()"
    )
    parent = subprocess.Popen([sys.executable, "-c", program, str(tmp_path)])
    child, kept = number_in(tmp_path / "child"), number_in(tmp_path / "keeper")
    os.kill(parent.pid, signal.SIGKILL)
    parent.wait()
    until(lambda: not is_running(kept))
    assert not is_running(child)
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["child", "keeper"]


def test_a_server_ends_also_when_its_keeper_is_killed(tmp_path: Path) -> None:
    engine = EngineProcess(launch(tmp_path, SLEEPER))
    servers = _children_of(engine.pid)
    os.kill(engine.pid, signal.SIGKILL)
    until(lambda: not any(map(is_running, servers)))
    engine.stop()


def _children_of(pid: int) -> list[int]:
    def found() -> list[int]:
        return [child for child, parent in process_guard._parent_pids().items() if parent == pid]

    until(found)
    return found()


def test_a_server_that_dies_tells_its_last_lines_and_its_first_error(tmp_path: Path) -> None:
    log = EngineLog(tmp_path / "log")
    program = "print('(EngineCore pid=1) ERROR 01-01 ConfigError: the cause'); raise SystemExit(3)"
    with (
        EngineProcess(launch(tmp_path, program), log=log) as engine,
        pytest.raises(EngineGoneError) as caught,
    ):
        engine.wait_ready()
    assert "vLLM ended with exit code 3" in caught.value.reason
    assert "first error: ConfigError: the cause" in caught.value.reason
    assert engine.ending() == "vLLM ended with exit code 3"


def test_a_server_that_is_killed_says_by_what(tmp_path: Path) -> None:
    program = "import os; os.kill(os.getpid(), 9)"
    with EngineProcess(launch(tmp_path, program)) as engine, pytest.raises(EngineGoneError):
        engine.wait_ready()
    assert engine.ending() == "vLLM was killed by SIGKILL"


def test_a_server_that_does_not_listen_is_killed_at_once_when_there_is_a_hurry(
    tmp_path: Path,
) -> None:
    log = EngineLog(tmp_path / "log")
    with EngineProcess(launch(tmp_path, DEAF), log=log) as engine:
        until(lambda: "deaf" in log.lines())
        engine._was_ready = True  # else there is little patience anyway
        began_s = time.monotonic()
        engine.stop(hurry=lambda: True)
        assert time.monotonic() - began_s < process_guard.TERM_S / 2
    assert not engine.is_alive()


# Takes rows to a disk for longer than others have to end, after its engine has ended.
CLERK = """
import os, signal, sys, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
open(sys.argv[2], "w").write(str(os.getpid()))
time.sleep(float(sys.argv[3]))
open(sys.argv[2], "w").write("written")
"""
HIRING = """
import subprocess, sys
name = "clairai.capture.writer_process"
subprocess.Popen([sys.executable, "-c", sys.argv[1], name, *sys.argv[2:]], start_new_session=True)
"""


def test_rows_of_an_engine_that_has_died_are_let_be_written(tmp_path: Path) -> None:
    rows, longer_s = tmp_path / "rows", process_guard.SETTLE_S + 0.5
    hiring = launch(tmp_path, HIRING, CLERK, str(rows), str(longer_s))
    with EngineProcess(hiring) as engine:
        until(lambda: not engine.is_alive())
    assert rows.read_text() == "written"


def test_rows_are_not_waited_for_by_who_is_in_a_hurry(tmp_path: Path) -> None:
    rows = tmp_path / "rows"
    with EngineProcess(launch(tmp_path, HIRING, CLERK, str(rows), "600")) as engine:
        clerk = number_in(rows)
        engine.kill()
    assert not is_running(clerk)


def test_waiting_ends_when_told_to(tmp_path: Path) -> None:
    with EngineProcess(launch(tmp_path, SLEEPER)) as engine:
        assert not engine.wait_ready(stop=lambda: True)


def test_an_engine_that_is_dropped_is_stopped_and_complained_about(tmp_path: Path) -> None:
    engine = EngineProcess(launch(tmp_path, SLEEPER))
    kept = engine.pid
    with pytest.warns(ResourceWarning, match="dropped unstopped"):
        del engine
    assert not is_running(kept)
