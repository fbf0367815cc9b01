"""Takes a Launch; gives a vLLM server process: started, waited for, stopped with all it made."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Final, Self

from clairai.errors import EngineGoneError
from clairai.launch import process_guard
from clairai.launch.engine_command import EngineCommand
from clairai.launch.engine_log import EngineLog
from clairai.library.http_client import ServerClient
from clairai.local.private_socket import remove_dead_sockets

LOOK_PAUSE_S: Final = 0.2
HEALTH_TIMEOUT_S: Final = 1.0
STOP_TIMEOUT_S: Final = process_guard.TERM_S + 2 * process_guard.SETTLE_S + process_guard.WRITE_S
UNREADY_STOP_TIMEOUT_S: Final = 1.0
KILL_TIMEOUT_S: Final = process_guard.SETTLE_S + process_guard.KILLED_S + 1.0
_SIGNALLED: Final = 128


class EngineProcess:
    """One vLLM server under a keeper, which ends it and all it made also if we cannot."""

    def __init__(self, launch: EngineCommand, *, log: EngineLog | None = None) -> None:
        """Start it. Its output goes to `log`, or where ours goes."""
        self.launch = launch
        self.log = log
        self._server = ServerClient(launch.bind.url)
        self._was_ready = False
        self._process, self._lifeline = _start(launch, log)

    @property
    def pid(self) -> int:
        """Of the keeper: every process of the engine is below it."""
        return self._process.pid

    def is_alive(self) -> bool:
        """Whether anything of it is left."""
        return self._process.poll() is None

    def wait_ready(
        self, *, stop: Callable[[], bool] = lambda: False, tick: Callable[[], None] = lambda: None
    ) -> bool:
        """True once it serves, False if `stop()` came first; EngineGoneError if it died.

        A large model takes many minutes, so there is no time limit; `tick` comes every moment.
        """
        while not stop():
            tick()
            if not self.is_alive():
                raise EngineGoneError(self.describe_death())
            if self._server.is_healthy(HEALTH_TIMEOUT_S):
                self._was_ready = True
                return True
            time.sleep(LOOK_PAUSE_S)
        return False

    def describe_death(self) -> str:
        """How it ended, in words, with what its log says of it."""
        told = "its log is above" if self.log is None else self.log.describe_death()
        return f"{self.ending()}; {told}"

    def ending(self) -> str:
        """How it ended, in words."""
        code = self._process.poll()
        if code is None:
            return "vLLM has not ended"
        names = {number.value: number.name for number in signal.Signals}
        if code > _SIGNALLED and code - _SIGNALLED in names:
            return f"vLLM was killed by {names[code - _SIGNALLED]}"
        return f"vLLM ended with exit code {code}"

    def stop(self, *, hurry: Callable[[], bool] = lambda: False) -> None:
        """Ask the server to end, then end whatever is left; at once if `hurry()`. Repeatable."""
        self._say(b"t")
        # One that is still starting hardly listens, and has nothing to lose.
        timeout_s = STOP_TIMEOUT_S if self._was_ready else UNREADY_STOP_TIMEOUT_S
        deadline_s = time.monotonic() + timeout_s
        while self.is_alive() and not hurry() and time.monotonic() < deadline_s:
            time.sleep(process_guard.LOOK_S)
        self.kill()

    def kill(self) -> None:
        """End everything at once, as a machine that runs out of memory would."""
        self._say(b"k")
        try:
            self._process.wait(KILL_TIMEOUT_S)
        except subprocess.TimeoutExpired:  # a keeper that was stopped with SIGSTOP
            self._process.kill()
            self._process.wait()
        if self._lifeline >= 0:
            os.close(self._lifeline)
            self._lifeline = -1
            # A worker that was killed leaves its ring's socket; nobody can be listening there.
            if self.launch.runtime_folder is not None:
                remove_dead_sockets(self.launch.runtime_folder)

    def _say(self, word: bytes) -> None:
        if self._lifeline >= 0:
            with contextlib.suppress(BrokenPipeError):
                os.write(self._lifeline, word)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def __del__(self) -> None:
        process = getattr(self, "_process", None)
        if process is not None and self._lifeline >= 0:
            warnings.warn(
                f"vLLM {process.pid} was dropped unstopped", ResourceWarning, stacklevel=2
            )
            self.stop()


def _start(launch: EngineCommand, log: EngineLog | None) -> tuple[subprocess.Popen[bytes], int]:
    """The keeper, and the end of its lifeline that nobody but us holds."""
    if launch.private_folder is not None:
        launch.private_folder.mkdir(mode=0o700, exist_ok=True)  # the last keeper took it away
    hearing, lifeline = os.pipe()
    with contextlib.ExitStack() as opened:
        opened.callback(os.close, hearing)
        undo = opened.enter_context(contextlib.ExitStack())
        undo.callback(os.close, lifeline)
        output = None if log is None else opened.enter_context(log.create())
        process = subprocess.Popen(  # noqa: S603  # a list, no shell; the user's own arguments
            [*_guard_command(hearing, launch.private_folder), *launch.argv()],
            env=launch.environ(os.environ),
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=None if output is None else subprocess.STDOUT,
            pass_fds=(hearing,),
            # Ctrl-C in the terminal is for us to answer: vLLM is stopped in order, once.
            start_new_session=True,
        )
        undo.pop_all()
    return process, lifeline


def _guard_command(hearing: int, folder: Path | None) -> list[str]:
    # -I: whatever the environment says of Python is meant for vLLM.
    return [sys.executable, "-I", process_guard.__file__, str(hearing), str(folder or "")]
