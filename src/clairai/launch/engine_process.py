"""Starts a vLLM server under a process guard, waits until it serves, and stops all of it."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
import warnings
from collections.abc import Callable
from typing import Final, Self

from clairai.errors import EngineGoneError
from clairai.launch import process_guard
from clairai.launch.engine_command import EngineCommand
from clairai.launch.engine_folder import clean_up, make_folder
from clairai.launch.engine_log import EngineLog
from clairai.launch.listen_watch import ListenWatch
from clairai.launch.liveness import LivenessLimits, LivenessWatch, Trouble
from clairai.library.http_client import ServerClient
from clairai.local.heartbeat import read_heartbeats, read_process_state

POLL_S: Final = 0.2
HEALTH_TIMEOUT_S: Final = 1.0
STOP_TIMEOUT_S: Final = process_guard.TERM_S + 2 * process_guard.SETTLE_S + process_guard.WRITE_S
UNREADY_STOP_TIMEOUT_S: Final = 1.0
KILL_TIMEOUT_S: Final = 30.0  # for the kernel to end large processes on a busy machine
_SIGNAL_CODE: Final = 128


class EngineProcess:
    """One vLLM server. Its guard ends it, and every process it made, even if we are killed."""

    def __init__(
        self,
        command: EngineCommand,
        *,
        log: EngineLog | None = None,
        limits: LivenessLimits | None = None,
    ) -> None:
        """Start it. Its output goes to `log`, or where ours goes."""
        self.command = command
        self.log = log
        self._client = ServerClient(command.address.url)
        self._was_ready = False
        self._watch = LivenessWatch(limits or LivenessLimits())
        self._listen_watch = None if command.socket is None else ListenWatch(command.socket)
        self._death: Trouble | None = None
        self._guard, self._control_fd, self._lock_fd = _start_guard(command, log)

    @property
    def pid(self) -> int:
        """Of the guard: every process of the engine is below it."""
        return self._guard.pid

    def is_alive(self) -> bool:
        """True while any process of the engine is left."""
        return self._guard.poll() is None

    def find_trouble(self) -> Trouble | None:
        """Which of its processes makes no progress; the first fatal trouble is its death."""
        folder = self.command.heartbeat_folder
        if folder is None:
            return None
        trouble = self._watch.look(read_heartbeats(folder))
        if self._was_ready and self._listen_watch is not None and trouble is None:
            trouble = self._listen_watch.look()
        if trouble is not None and trouble.is_fatal:
            self._death = self._death or trouble
            self._tell_guard(b"b")
        self._wake_guard()
        return trouble

    def _wake_guard(self) -> None:
        with contextlib.suppress(OSError):  # without a descriptor we cannot look
            state = read_process_state(self._guard.pid)
            if state is not None and state.letter == "T" and self._guard.poll() is None:
                self._guard.send_signal(signal.SIGCONT)

    def wait_ready(
        self, *, stop: Callable[[], bool] = lambda: False, tick: Callable[[], None] = lambda: None
    ) -> bool:
        """True once it serves, False if `stop()` came first; EngineGoneError if it died.

        There is no time limit, because a large model takes many minutes; `tick` is called often.
        """
        while not stop():
            tick()
            trouble = self.find_trouble()
            if not self.is_alive() or (trouble is not None and trouble.is_fatal):
                raise EngineGoneError(self.describe_death())
            if self._client.is_healthy(HEALTH_TIMEOUT_S):
                self._was_ready = True
                return True
            time.sleep(POLL_S)
        return False

    def describe_death(self) -> str:
        """How it ended, with the end of its log."""
        tail = "its log is above" if self.log is None else self.log.describe_death()
        return f"{self.exit_reason()}; {tail}"

    def exit_reason(self) -> str:
        """How it ended, without anything of its log, which may name paths."""
        if self._death is not None:
            return self._death.reason
        code = self._guard.poll()
        if code is None:
            return "vLLM has not ended"
        names = {number.value: number.name for number in signal.Signals}
        if -code in names:
            return f"the process guard was killed by {names[-code]}"
        if code > _SIGNAL_CODE and code - _SIGNAL_CODE in names:
            return f"vLLM was killed by {names[code - _SIGNAL_CODE]}"
        return f"vLLM ended with exit code {code}"

    def stop(self, *, is_urgent: Callable[[], bool] = lambda: False) -> None:
        """Ask the server to end, then kill what is left; at once if `is_urgent()`. Repeatable."""
        self._tell_guard(b"t")
        # One that is still starting hardly reacts to signals, and has nothing to lose.
        timeout_s = STOP_TIMEOUT_S if self._was_ready else UNREADY_STOP_TIMEOUT_S
        deadline_s = time.monotonic() + timeout_s
        while self.is_alive() and not is_urgent() and time.monotonic() < deadline_s:
            time.sleep(process_guard.POLL_S)
        self._end_guard()
        self._clean_up(is_urgent)

    def kill(self) -> None:
        """Kill every process of the engine now."""
        self._end_guard()
        self._clean_up(lambda: True)

    def _end_guard(self) -> None:
        self._tell_guard(b"k")
        self._guard.send_signal(signal.SIGCONT)  # a guard that was stopped could not obey
        try:
            self._guard.wait(KILL_TIMEOUT_S)
        except subprocess.TimeoutExpired:  # a process that even SIGKILL does not end
            self._guard.kill()
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._guard.wait(KILL_TIMEOUT_S)

    def _clean_up(self, is_urgent: Callable[[], bool]) -> None:
        """Close what is open; do the guard's work if it was killed."""
        if self._control_fd < 0:
            return
        if (self._guard.poll() or 0) < 0:
            clean_up(self.command.private_folder, self.command.runtime_folder, is_urgent)
        for fd in (self._control_fd, self._lock_fd):
            if fd >= 0:
                os.close(fd)
        self._control_fd = self._lock_fd = -1

    def _tell_guard(self, word: bytes) -> None:
        if self._control_fd >= 0:
            with contextlib.suppress(BrokenPipeError):
                os.write(self._control_fd, word)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def __del__(self) -> None:
        guard = getattr(self, "_guard", None)
        if guard is not None and self._control_fd >= 0:
            warnings.warn(f"vLLM {guard.pid} was not stopped", ResourceWarning, stacklevel=2)
            self.stop()


def _start_guard(
    command: EngineCommand, log: EngineLog | None
) -> tuple[subprocess.Popen[bytes], int, int]:
    """The guard, the write end of its control pipe, which no other process holds, and the lock."""
    folder, runtime = command.private_folder, command.runtime_folder
    reading, control_fd = os.pipe()
    with contextlib.ExitStack() as opened:
        opened.callback(os.close, reading)
        undo = opened.enter_context(contextlib.ExitStack())
        undo.callback(os.close, control_fd)
        lock_fd = -1 if folder is None else make_folder(folder)
        if lock_fd >= 0:
            undo.callback(os.close, lock_fd)
        output = None if log is None else opened.enter_context(log.create())
        # -I: the environment's Python settings are meant for vLLM.
        guard = [sys.executable, "-I", process_guard.__file__]
        process = subprocess.Popen(  # noqa: S603  # a list, no shell; the user's own arguments
            [*guard, str(reading), str(folder or ""), str(runtime or ""), *command.argv()],
            env=command.environ(os.environ),
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=None if output is None else subprocess.STDOUT,
            pass_fds=(reading, *((lock_fd,) if lock_fd >= 0 else ())),
            # Ctrl-C in the terminal is for us to answer: vLLM is stopped in order, once.
            start_new_session=True,
        )
        undo.pop_all()
    return process, control_fd, lock_fd
