"""Takes a command line; runs it, and when it or whoever asked for it ends, leaves nothing of it.

A script of its own (`python -I keeper.py LIFELINE FOLDER COMMAND...`) with nothing of ours in it:
it starts in milliseconds and shares no fate with the process that asked for it. LIFELINE is the
read end of a pipe: `t` asks to end the command in order, `k` at once, and the pipe's end says that
the asking process is gone. FOLDER is removed at the end. The exit code is the command's, or 128 and
the number of the signal that killed it.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import select
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Final

TERM_S: Final = 8.0  # for a server that was asked to end
SETTLE_S: Final = 2.0  # for what it leaves to end by itself, and to take its shared memory away
WRITE_S: Final = 20.0  # for rows of an engine that is gone, on their way to a disk
KILLED_S: Final = 5.0  # for the kernel
LOOK_S: Final = 0.05
_PR_SET_PDEATHSIG: Final = 1  # prctl(2)
_PR_SET_CHILD_SUBREAPER: Final = 36
_TERMINATE, _KILL = b"t", b"k"
# Unlinks the shared memory of processes that were killed, once all of them are gone.
_TRACKER: Final = b"multiprocessing.resource_tracker"
# Takes captured rows to a disk, and ends by itself when its engine has ended.
_CAPTURE_WRITER: Final = b"clairai.capture.writer_process"


class ProcessGuard:
    """One command and all its descendants: orphans become children of this process."""

    def __init__(self, lifeline: int, command: list[str]) -> None:
        prctl = ctypes.CDLL(None).prctl
        prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
        self._lifeline = lifeline
        self._is_asked = self._is_hurried = False
        self._status: int | None = None
        self._poller = select.poll()
        self._poller.register(lifeline, select.POLLIN)
        self._poller.register(self._wake_on_signals(), select.POLLIN)
        self._server = subprocess.Popen(  # noqa: S603  # a list, no shell; the user's own arguments
            command,
            process_group=0,
            # Should this process be killed, nobody else is left to end the server.
            preexec_fn=lambda: prctl(_PR_SET_PDEATHSIG, signal.SIGTERM),
        )

    def run(self) -> int:
        """Return when nothing is left; the exit code to end with."""
        self._wait(lambda: self._is_asked or self._status is not None, None)
        if self._status is None and not self._is_hurried:
            self._server.terminate()
            self._wait(lambda: self._is_hurried or self._status is not None, TERM_S)
        self._clear()
        return _exit_code(self._status)

    def _clear(self) -> None:
        if self._status is not None:
            self._wait(lambda: self._is_hurried or not descendants(), SETTLE_S)
        if any(map(_is_capture_writer, descendants())):
            self._let_write()
        for is_sparing in (True, False):
            if not descendants():
                return
            self._kill_all(is_sparing)

    def _let_write(self) -> None:
        """All others end now; nobody waits for it who is in a hurry."""
        for pid in descendants():
            if not (_is_capture_writer(pid) or _is_tracker(pid)):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
        self._wait(
            lambda: self._is_hurried or not any(map(_is_capture_writer, descendants())), WRITE_S
        )

    def _kill_all(self, is_sparing: bool) -> None:
        """Again and again: one that forks while we look is found at the next look."""
        deadline_s = time.monotonic() + (SETTLE_S if is_sparing else KILLED_S)
        while time.monotonic() < deadline_s:
            found = descendants()
            doomed = [pid for pid in found if not (is_sparing and _is_tracker(pid))]
            for pid in doomed:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            self._look(LOOK_S)
            if not found:
                return

    def _wait(self, until: Callable[[], bool], timeout_s: float | None) -> None:
        deadline_s = float("inf") if timeout_s is None else time.monotonic() + timeout_s
        while not until() and time.monotonic() < deadline_s:
            self._look(None if timeout_s is None else LOOK_S)

    def _look(self, timeout_s: float | None) -> None:
        """Hear what is asked, and bury who has died."""
        for fd, _ in self._poller.poll(None if timeout_s is None else timeout_s * 1e3):
            heard = os.read(fd, 64)
            if fd != self._lifeline:
                self._is_asked |= signal.SIGTERM in heard
                continue
            self._is_asked = True
            self._is_hurried |= _KILL in heard
            if not heard:
                self._poller.unregister(fd)
        self._bury()

    def _bury(self) -> None:
        with contextlib.suppress(ChildProcessError):
            while True:
                pid, status = os.waitpid(-1, os.WNOHANG)
                if pid == 0:
                    return
                if pid == self._server.pid:
                    self._server.returncode = self._status = os.waitstatus_to_exitcode(status)

    def _wake_on_signals(self) -> int:
        """Its bytes are signal numbers. None of these ends us: that is the lifeline's to say."""
        reading, writing = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        for number in (signal.SIGCHLD, signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            # Not SIG_IGN, which the command would inherit.
            signal.signal(number, lambda *_: None)
        signal.set_wakeup_fd(writing, warn_on_full_buffer=False)
        return reading


def descendants() -> list[int]:
    """Every process below this one, wherever it has moved its group or session, until it is buried.

    A zombie counts: one of several threads can still be on its way out, and holds sockets and
    memory until it is. Who is left without a parent comes to us, and _bury() sees the end of it.
    """
    children: dict[int, list[int]] = {}
    for pid, parent in _parent_pids().items():
        children.setdefault(parent, []).append(pid)
    found = [os.getpid()]
    for pid in found:  # grows while it is walked
        found += children.get(pid, ())
    return found[1:]


def _parent_pids() -> dict[int, int]:
    """Of every process of the machine."""
    found = {}
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):  # it has ended since
            parent = (folder / "stat").read_text().rpartition(")")[2].split()[1]
            found[int(folder.name)] = int(parent)
    return found


def _is_tracker(pid: int) -> bool:
    return _TRACKER in _command_line(pid)


def _is_capture_writer(pid: int) -> bool:
    return _CAPTURE_WRITER in _command_line(pid)


def _command_line(pid: int) -> bytes:
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    return b""


def _exit_code(status: int | None) -> int:
    if status is None:
        return 128 + signal.SIGKILL
    return status if status >= 0 else 128 - status


def main(lifeline: str, folder: str, *command: str) -> None:
    try:
        code = ProcessGuard(int(lifeline), list(command)).run()
    finally:
        if folder:
            shutil.rmtree(folder, ignore_errors=True)
    raise SystemExit(code)


if __name__ == "__main__":
    main(*sys.argv[1:])
