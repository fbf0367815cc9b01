"""Runs one command and, when it or its owner ends, ends every process and file it leaves behind.

Runs as a script of its own: `python -I process_guard.py CONTROL FOLDER RUNTIME COMMAND...`. It
imports nothing of clairai, so it starts in milliseconds and survives whatever ends its owner.
CONTROL is the read end of a pipe: `t` asks to end the command in order, `k` at once, `b` without
asking a server that no longer works; the end of the pipe means that the owner is gone. When no
process is left, the guard removes FOLDER and the sockets in RUNTIME on which nobody listens any
more. The exit code is the command's, or 128 plus the number of the signal that killed it.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import resource
import select
import shutil
import signal
import socket
import stat
import struct
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Final

TERM_S: Final = 8.0  # for a server that was asked to end
SETTLE_S: Final = 2.0  # for its children to end by themselves and unlink their shared memory
TRACKER_S: Final = 10.0  # for trackers to unlink the shared memory of processes that are gone
WRITE_S: Final = 20.0  # for captured rows on their way to a disk
POLL_S: Final = 0.05
_MAX_POLL_S: Final = 1.0
OWNER_STOPPED_S: Final = 5.0  # until a suspended owner is reported
_PR_SET_PDEATHSIG: Final = 1  # prctl(2)
_PR_SET_CHILD_SUBREAPER: Final = 36
_KILL, _BROKEN = b"k", b"b"
# A heartbeat, as clairai.local.heartbeat has it: magic, process id, 0, start time, beats.
_HEARTBEATS: Final = "CLAIRAI_HEARTBEATS"
_BEAT: Final = struct.Struct("<8sIIQQ24x")
_BEAT_MAGIC: Final = b"clairai1"
# Unlinks the shared memory of killed processes, once all of them are gone. Python's own, and
# joblib's (joblib/externals/loky/backend/resource_tracker.py), which vLLM's imports bring.
_TRACKER: Final = b".resource_tracker import main"
# Writes captured rows to a disk, and ends by itself when its engine has ended.
_CAPTURE_WRITER: Final = b"clairai.capture.writer_process"


class ProcessGuard:
    """One command and all its descendants: orphans become children of this process."""

    def __init__(self, control_fd: int, command: list[str]) -> None:
        prctl = ctypes.CDLL(None).prctl
        prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
        self._control_fd = control_fd
        self._is_stopping = self._is_urgent = self._is_broken = False
        self._heartbeat = Heartbeat(os.environ.get(_HEARTBEATS, ""))
        self._owner = OwnerWatch(os.getppid())
        self._status: int | None = None
        self._poller = select.poll()
        self._poller.register(control_fd, select.POLLIN)
        self._poller.register(self._open_signal_pipe(), select.POLLIN)
        self._server = subprocess.Popen(  # noqa: S603  # a list, no shell; the user's own arguments
            command,
            process_group=0,
            # If this process is killed, nobody else is left to end the server.
            preexec_fn=lambda: prctl(_PR_SET_PDEATHSIG, signal.SIGTERM),
        )

    def run(self) -> int:
        """Return the exit code when no process is left."""
        self._wait(lambda: self._is_stopping or self._status is not None, None)
        if self._status is None and not self._is_urgent and not self._is_broken:
            _send_signal(self._server.pid, signal.SIGTERM)
            self._wait(lambda: self._is_urgent or self._status is not None, TERM_S)
        _allow_descriptors()
        self._end_descendants()
        return _exit_code(self._status)

    def _end_descendants(self) -> None:
        if self._status is not None and not self._is_broken:
            self._wait(lambda: self._is_urgent or not descendants(), SETTLE_S)
        if any(map(is_capture_writer, descendants())):
            self._wait_for_writers()
        # No deadline: under load the kernel takes seconds to end a large process, and until then
        # its sockets look alive to whoever would remove them, and trackers wait for it.
        self._kill(lambda pid: not is_tracker(pid))
        self._wait(lambda: not descendants(), TRACKER_S)
        self._kill(lambda _: True)

    def _wait_for_writers(self) -> None:
        """End all others and let captured rows reach the disk, unless this is urgent."""
        for pid in descendants():
            if not (is_capture_writer(pid) or is_tracker(pid)):
                _send_signal(pid, signal.SIGKILL)
        self._wait(
            lambda: self._is_urgent or not any(map(is_capture_writer, descendants())), WRITE_S
        )

    def _kill(self, is_doomed: Callable[[int], bool]) -> None:
        """Until none of them is left. Repeated, because a process may fork while we look."""
        pause_s = POLL_S
        while doomed := list(filter(is_doomed, descendants())):
            for pid in doomed:
                _send_signal(pid, signal.SIGKILL)
            self._poll(pause_s)
            pause_s = min(2 * pause_s, _MAX_POLL_S)

    def _wait(self, until: Callable[[], bool], timeout_s: float | None) -> None:
        deadline_s = float("inf") if timeout_s is None else time.monotonic() + timeout_s
        while not until() and time.monotonic() < deadline_s:
            self._poll(_MAX_POLL_S if timeout_s is None else POLL_S)

    def _poll(self, timeout_s: float) -> None:
        """Read what is asked of us, and reap dead children."""
        self._heartbeat.beat()
        self._owner.look()
        for fd, _ in self._poller.poll(timeout_s * 1e3):
            data = os.read(fd, 64)
            if fd != self._control_fd:
                self._is_stopping |= signal.SIGTERM in data
                continue
            self._is_stopping = True
            self._is_urgent |= _KILL in data
            self._is_broken |= _BROKEN in data
            if not data:
                self._poller.unregister(fd)
        self._reap()

    def _reap(self) -> None:
        with contextlib.suppress(ChildProcessError):
            while True:
                pid, status = os.waitpid(-1, os.WNOHANG)
                if pid == 0:
                    return
                if pid == self._server.pid:
                    self._server.returncode = self._status = os.waitstatus_to_exitcode(status)

    def _open_signal_pipe(self) -> int:
        """A pipe of signal numbers. None of these signals ends us: only CONTROL does."""
        reading, writing = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        for number in (signal.SIGCHLD, signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            # Not SIG_IGN, which the command would inherit.
            signal.signal(number, lambda *_: None)
        signal.set_wakeup_fd(writing, warn_on_full_buffer=False)
        return reading


class Heartbeat:
    """The guard's own: it beats whenever the guard looks around, at least once a second."""

    def __init__(self, folder: str) -> None:
        self._fd, self._beats = -1, 0
        self._start_ticks = int(_stat_fields(os.getpid())[19])
        if folder:
            flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
            path = os.path.join(folder, f"process-guard-{os.getpid()}")
            with contextlib.suppress(OSError):  # nobody learns of our pulse; we guard anyway
                self._fd = os.open(path, flags, 0o600)

    def beat(self) -> None:
        if self._fd < 0:
            return
        self._beats += 1
        beat = _BEAT.pack(_BEAT_MAGIC, os.getpid(), 0, self._start_ticks, self._beats)
        with contextlib.suppress(OSError):
            os.pwrite(self._fd, beat, 0)


class OwnerWatch:
    """Reports an owner that is suspended. The engine goes on: somebody may have pressed Ctrl-Z."""

    def __init__(self, pid: int) -> None:
        self._pid = pid
        self._since_s: float | None = None
        self._is_reported = False

    def look(self) -> None:
        if self._state() != "T":
            if self._is_reported:
                _report(f"process {self._pid}, which started this engine, goes on")
            self._since_s, self._is_reported = None, False
            return
        now_s = time.monotonic()
        self._since_s = self._since_s or now_s
        if now_s - self._since_s >= OWNER_STOPPED_S and not self._is_reported:
            self._is_reported = True
            _report(
                f"process {self._pid}, which started this engine and is its proxy, is suspended: "
                f"nobody is answered until it goes on (kill -CONT {self._pid})"
            )

    def _state(self) -> str:
        with contextlib.suppress(OSError, IndexError):
            return _stat_fields(self._pid)[0]
        return ""


def _allow_descriptors() -> None:
    """Whoever ends others has to read /proc, whatever limit was left to us."""
    with contextlib.suppress(OSError, ValueError):
        _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def _report(line: str) -> None:
    """To where the engine's log goes."""
    with contextlib.suppress(OSError):
        sys.stderr.write(f"clairai process guard: {line}\n")
        sys.stderr.flush()


def _stat_fields(pid: int) -> list[str]:
    """The fields of /proc/PID/stat behind the name; OSError if there is no such process."""
    text = Path(f"/proc/{pid}/stat").read_text(errors="replace")
    return text.rpartition(")")[2].split()


def descendants() -> list[int]:
    """Every process below this one that is not reaped yet, in whatever group or session.

    A zombie counts: one of its threads may still be exiting, and holds sockets and memory until
    then. An orphan becomes our child, and _reap() sees its end.
    """
    children: dict[int, list[int]] = {}
    for pid, parent in _parent_pids().items():
        children.setdefault(parent, []).append(pid)
    found = [os.getpid()]
    for pid in found:  # grows during the walk
        found += children.get(pid, ())
    return found[1:]


def _parent_pids() -> dict[int, int]:
    """The parent of every process of the machine."""
    found = {}
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):  # it has ended since
            found[int(folder.name)] = int(_stat_fields(int(folder.name))[1])
    return found


def is_tracker(pid: int) -> bool:
    """True if this process unlinks the shared memory of others that were killed."""
    return _TRACKER in _command_line(pid)


def is_capture_writer(pid: int) -> bool:
    """True if this process writes captured rows to a disk."""
    return _CAPTURE_WRITER in _command_line(pid)


def _command_line(pid: int) -> bytes:
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    return b""


def _send_signal(pid: int, number: signal.Signals) -> None:
    # Popen.terminate() would reap the server behind _reap()'s back.
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, number)


def _exit_code(status: int | None) -> int:
    if status is None:
        return 128 + signal.SIGKILL
    return status if status >= 0 else 128 - status


def remove_dead_sockets(runtime: Path) -> None:
    """As clairai.local.private_socket does: sockets of our user that refuse a connection."""
    for path in runtime.glob("*.sock"):
        with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX) as sock:
            status = path.lstat()
            if not stat.S_ISSOCK(status.st_mode) or status.st_uid != os.geteuid():
                continue
            sock.setblocking(False)
            try:
                sock.connect(os.fspath(path))
            except ConnectionRefusedError:
                path.unlink(missing_ok=True)


def main(control_fd: str, folder: str, runtime: str, *command: str) -> None:
    try:
        code = ProcessGuard(int(control_fd), list(command)).run()
    finally:
        if folder:
            shutil.rmtree(folder, ignore_errors=True)
        if runtime:
            remove_dead_sockets(Path(runtime))
    raise SystemExit(code)


if __name__ == "__main__":
    main(*sys.argv[1:])
