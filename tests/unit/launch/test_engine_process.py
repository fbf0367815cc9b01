"""A server under its process guard: nothing of it is left, whichever process ends first."""

from __future__ import annotations

import os
import signal
import stat
import subprocess
import sys
import threading
import time
from dataclasses import dataclass
from pathlib import Path

import pytest

from clairai.errors import EngineGoneError
from clairai.launch import engine_process, process_guard
from clairai.launch.engine_command import EngineCommand, PrivateSocket
from clairai.launch.engine_log import EngineLog
from clairai.launch.engine_process import EngineProcess
from clairai.local.private_socket import socket_path
from tests.support.ring_engine import until

# Stands in for vLLM: a server with a child in a session of its own that ignores SIGTERM.
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
IGNORES_SIGTERM = """
import signal, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
print("deaf", flush=True)
time.sleep(600)
"""


@dataclass(frozen=True)
class OtherCommand(EngineCommand):
    """Starts any program in the place of vLLM."""

    program: tuple[str, ...] = ()

    def argv(self) -> list[str]:
        return [sys.executable, "-c", *self.program]


def command(folder: Path, *program: str) -> OtherCommand:
    settings = {"clairai": {"runtime_dir": str(folder)}}
    return OtherCommand("m", settings, PrivateSocket.within(folder), program=program)


def serving(folder: Path, *child_file: Path) -> OtherCommand:
    address = PrivateSocket.within(folder)
    return OtherCommand(
        "m", {}, address, program=(SERVER, str(address.path), *map(str, child_file))
    )


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
        assert stat.S_IMODE(engine.command.private_folder.stat().st_mode) == 0o700  # type: ignore[union-attr]
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
        "engine.wait_ready(); Path(sys.argv[1], 'guard').write_text(str(engine.pid))\n"
        "engine._guard.wait()"
    )
    parent = subprocess.Popen([sys.executable, "-c", program, str(tmp_path)])
    child, guard = number_in(tmp_path / "child"), number_in(tmp_path / "guard")
    os.kill(parent.pid, signal.SIGKILL)
    parent.wait()
    until(lambda: not is_running(guard))
    assert not is_running(child)
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["child", "guard"]


def test_a_server_also_ends_when_its_guard_is_killed(tmp_path: Path) -> None:
    engine = EngineProcess(command(tmp_path, SLEEPER))
    servers = _children_of(engine.pid)
    os.kill(engine.pid, signal.SIGKILL)
    until(lambda: not any(map(is_running, servers)))
    engine.stop()


def test_a_guard_that_was_suspended_still_ends_its_server(tmp_path: Path) -> None:
    engine = EngineProcess(command(tmp_path, SLEEPER))
    servers = _children_of(engine.pid)
    os.kill(engine.pid, signal.SIGSTOP)
    engine.stop(is_urgent=lambda: True)
    assert not any(map(is_running, servers))
    assert list(tmp_path.iterdir()) == []


def _children_of(pid: int) -> list[int]:
    def found() -> list[int]:
        return [child for child, parent in process_guard._parent_pids().items() if parent == pid]

    until(found)
    return found()


# A server that ends when it is asked to, and a worker below it that listens on the ring's socket.
WORKER = """
import signal, sys, time
from pathlib import Path
from clairai.local.private_socket import listen
signal.signal(signal.SIGTERM, signal.SIG_IGN)
listener = listen(Path(sys.argv[1]))
time.sleep(600)
"""
STARTS_WORKER = """
import subprocess, sys, time
subprocess.Popen([sys.executable, "-c", *sys.argv[1:]], start_new_session=True)
time.sleep(600)
"""
# A machine on which SIGKILL takes effect only when the gate file is there.
SLOW_KILL_GUARD = """
import importlib.util, os, signal, sys
spec = importlib.util.spec_from_file_location("guard", {guard!r})
guard = importlib.util.module_from_spec(spec)
spec.loader.exec_module(guard)
kill = os.kill
def slow_kill(pid, number):
    if number != signal.SIGKILL or os.path.exists({gate!r}):
        kill(pid, number)
    else:
        open({asked!r}, "w").close()
os.kill = slow_kill
guard.SETTLE_S = guard.KILLED_S = 0.05
guard.main(*sys.argv[1:])
"""


def test_the_rings_socket_is_removed_however_long_the_kernel_takes_to_end_the_worker(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While a killed worker has not closed its files, its socket still accepts connections."""
    runtime, gate, asked = tmp_path / "r", tmp_path / "gate", tmp_path / "asked"
    runtime.mkdir()
    ring = socket_path(runtime, 7)
    script = tmp_path / "slow_guard.py"
    script.write_text(
        SLOW_KILL_GUARD.format(guard=process_guard.__file__, gate=str(gate), asked=str(asked))
    )
    monkeypatch.setattr(process_guard, "__file__", str(script))
    engine = EngineProcess(command(runtime, STARTS_WORKER, WORKER, str(ring)))
    until(ring.is_socket)
    engine._was_ready = True  # so that stop() waits as it does for an engine that serves
    stopping = threading.Thread(target=engine.stop)
    stopping.start()
    until(asked.exists)
    stopping.join(1.0)  # many times the guard's patience, were it to give up
    gate.touch()
    stopping.join(60)
    assert not stopping.is_alive()
    assert [entry.name for entry in runtime.iterdir()] == []


SHARES_MEMORY = """
import sys, time
from pathlib import Path
from multiprocessing.shared_memory import SharedMemory
memory = SharedMemory(create=True, size=64)
Path(sys.argv[1]).write_text("/dev/shm/" + memory.name)
time.sleep(600)
"""
HAS_SEMAPHORE = """
import sys, time
from pathlib import Path
from joblib.externals.loky.backend.synchronize import Lock
lock = Lock()
Path(sys.argv[1]).write_text("/dev/shm/sem." + lock._semlock.name.lstrip("/"))
time.sleep(600)
"""


@pytest.mark.parametrize("program", [SHARES_MEMORY, HAS_SEMAPHORE])
def test_trackers_unlink_shared_memory_however_long_the_kernel_takes_to_end_its_users(
    program: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate, asked, told = (tmp_path / name for name in ("gate", "asked", "told"))
    script = tmp_path / "slow_guard.py"
    script.write_text(
        SLOW_KILL_GUARD.format(guard=process_guard.__file__, gate=str(gate), asked=str(asked))
    )
    monkeypatch.setattr(process_guard, "__file__", str(script))
    engine = EngineProcess(command(tmp_path, STARTS_WORKER, program, str(told)))
    until(lambda: told.exists() and told.read_text())
    memory = Path(told.read_text())
    assert memory.exists()
    killing = threading.Thread(target=engine.kill)
    killing.start()
    until(asked.exists)
    killing.join(0.5)  # many times the guard's patience with processes that end by themselves
    gate.touch()
    killing.join(60)
    assert not killing.is_alive()
    assert not memory.exists()


def test_the_rings_socket_is_removed_when_we_are_killed(tmp_path: Path) -> None:
    ring = socket_path(tmp_path, 7)
    program = (
        "import sys; from pathlib import Path\n"
        "from tests.unit.launch.test_engine_process import *\n"
        "ring = Path(sys.argv[1])\n"
        "engine = EngineProcess(command(ring.parent, STARTS_WORKER, WORKER, str(ring)))\n"
        "engine._guard.wait()"
    )
    parent = subprocess.Popen([sys.executable, "-c", program, str(ring)])
    until(ring.is_socket)
    parent.kill()
    parent.wait()
    until(lambda: not list(tmp_path.iterdir()))


def test_sockets_that_somebody_listens_on_and_other_files_are_not_removed(tmp_path: Path) -> None:
    (tmp_path / "notes.sock").write_text("no socket")
    live = subprocess.Popen([sys.executable, "-c", WORKER, str(tmp_path / "engine-1.sock")])
    try:
        until((tmp_path / "engine-1.sock").is_socket)
        process_guard.remove_dead_sockets(tmp_path)
        names = sorted(entry.name for entry in tmp_path.iterdir())
    finally:
        live.kill()
        live.wait()
    assert names == ["engine-1.sock", "notes.sock"]
    process_guard.remove_dead_sockets(tmp_path)
    assert [entry.name for entry in tmp_path.iterdir()] == ["notes.sock"]


def test_a_server_that_dies_reports_its_last_lines_and_the_cause(tmp_path: Path) -> None:
    log = EngineLog(tmp_path / "log")
    head = "(EngineCore pid=1) ERROR 01-01 00:00:00 [core.py:9]"
    program = (
        f"print('an older line'); print('(APIServer pid=0) INFO 01-01 00:00:00 [api.py:1] up');"
        f"print('{head} EngineCore failed to start.'); print('{head} ConfigError: the cause');"
        f"raise SystemExit(3)"
    )
    with (
        EngineProcess(command(tmp_path, program), log=log) as engine,
        pytest.raises(EngineGoneError) as caught,
    ):
        engine.wait_ready()
    assert "vLLM ended with exit code 3" in caught.value.reason
    assert "cause: ConfigError: the cause" in caught.value.reason
    assert engine.exit_reason() == "vLLM ended with exit code 3"


def test_a_server_that_is_killed_reports_the_signal(tmp_path: Path) -> None:
    program = "import os; os.kill(os.getpid(), 9)"
    with EngineProcess(command(tmp_path, program)) as engine, pytest.raises(EngineGoneError):
        engine.wait_ready()
    assert engine.exit_reason() == "vLLM was killed by SIGKILL"


# Waits for a server that was asked to end for longer than its owner waits for the guard.
PATIENT_GUARD = """
import importlib.util, sys
spec = importlib.util.spec_from_file_location("guard", {guard!r})
guard = importlib.util.module_from_spec(spec)
spec.loader.exec_module(guard)
guard.TERM_S = 600.0
guard.main(*sys.argv[1:])
"""


def test_a_server_that_ignores_sigterm_is_killed_at_once_when_it_is_urgent(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    script = tmp_path / "patient_guard.py"
    script.write_text(PATIENT_GUARD.format(guard=process_guard.__file__))
    monkeypatch.setattr(process_guard, "__file__", str(script))
    log = EngineLog(tmp_path / "log")
    with EngineProcess(command(tmp_path, IGNORES_SIGTERM), log=log) as engine:
        until(lambda: "deaf" in log.lines())
        engine._was_ready = True  # otherwise it is killed soon anyway
        began_s = time.monotonic()
        engine.stop(is_urgent=lambda: True)
        assert time.monotonic() - began_s < 0.8 * engine_process.KILL_TIMEOUT_S
    assert not engine.is_alive()
    assert engine.exit_reason() == "vLLM was killed by SIGKILL"


# Writes rows to a disk for longer than other processes may take, after its engine has ended.
CAPTURE_WRITER = """
import os, signal, sys, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
open(sys.argv[2], "w").write(str(os.getpid()))
time.sleep(float(sys.argv[3]))
open(sys.argv[2], "w").write("written")
"""
STARTS_WRITER = """
import subprocess, sys
name = "clairai.capture.writer_process"
subprocess.Popen([sys.executable, "-c", sys.argv[1], name, *sys.argv[2:]], start_new_session=True)
"""


def test_captured_rows_of_an_engine_that_has_died_are_still_written(tmp_path: Path) -> None:
    rows, longer_s = tmp_path / "rows", process_guard.SETTLE_S + 0.5
    starting = command(tmp_path, STARTS_WRITER, CAPTURE_WRITER, str(rows), str(longer_s))
    with EngineProcess(starting) as engine:
        until(lambda: not engine.is_alive())
    assert rows.read_text() == "written"


def test_captured_rows_are_not_waited_for_when_it_is_urgent(tmp_path: Path) -> None:
    rows = tmp_path / "rows"
    starting = command(tmp_path, STARTS_WRITER, CAPTURE_WRITER, str(rows), "600")
    with EngineProcess(starting) as engine:
        writer = number_in(rows)
        engine.kill()
    assert not is_running(writer)


def test_waiting_ends_when_told_to(tmp_path: Path) -> None:
    with EngineProcess(command(tmp_path, SLEEPER)) as engine:
        assert not engine.wait_ready(stop=lambda: True)


def test_an_engine_that_is_dropped_is_stopped_with_a_warning(tmp_path: Path) -> None:
    engine = EngineProcess(command(tmp_path, SLEEPER))
    guard = engine.pid
    with pytest.warns(ResourceWarning, match="was not stopped"):
        del engine
    assert not is_running(guard)
