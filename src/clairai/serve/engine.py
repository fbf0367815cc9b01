"""Takes a Launch; gives a vLLM server process: started, waited for, stopped with all it made."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import socket
import subprocess
import time
import warnings
from collections.abc import Callable
from typing import Final, Self

from clairai.errors import ConfigError, EngineGoneError
from clairai.serve.calls import Server
from clairai.serve.launch import Launch
from clairai.serve.log import EngineLog

LOOK_PAUSE_S: Final = 0.2
HEALTH_TIMEOUT_S: Final = 1.0
STOP_TIMEOUT_S: Final = 15.0
_PR_SET_PDEATHSIG: Final = 1  # prctl(2)


class EngineProcess:
    """One vLLM server in a process group of its own; the group never outlives this object."""

    def __init__(self, launch: Launch, *, log: EngineLog | None = None) -> None:
        """Start it. Its output goes to `log`, or where ours goes."""
        _require_free(launch)
        self.launch = launch
        self.log = log
        self._server = Server(launch.bind.url)
        self._is_stopped = False
        self._process = _start(launch, log)

    @property
    def pid(self) -> int:
        """Of the server, and of its process group."""
        return self._process.pid

    def is_alive(self) -> bool:
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
                raise EngineGoneError(self.epitaph())
            if self._server.is_healthy(HEALTH_TIMEOUT_S):
                return True
            time.sleep(LOOK_PAUSE_S)
        return False

    def epitaph(self) -> str:
        """How it ended, in words, with what its log says of it."""
        told = "its log is above" if self.log is None else self.log.epitaph()
        return f"vLLM ended with exit code {self._process.poll()}; {told}"

    def stop(self) -> None:
        """Ask the server to end, then end whatever is left of its group; any number of times."""
        if self.is_alive():
            self._process.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(STOP_TIMEOUT_S)
        # Also when it ended by itself: an engine core may outlive a server that was killed.
        self.kill()

    def kill(self) -> None:
        """End the whole group at once, as a machine that runs out of memory would."""
        if self._is_stopped:
            return  # the group's number may belong to others by now
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)
        self._process.wait()
        self._is_stopped = True

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def __del__(self) -> None:
        process = getattr(self, "_process", None)
        if process is not None and process.returncode is None:
            warnings.warn(f"vLLM {process.pid} was dropped running", ResourceWarning, stacklevel=2)
            self.stop()


def _start(launch: Launch, log: EngineLog | None) -> subprocess.Popen[bytes]:
    with contextlib.ExitStack() as opened:
        output = None if log is None else opened.enter_context(log.create())
        return subprocess.Popen(  # noqa: S603  # a list, no shell; the user's own arguments
            launch.argv(),
            env=launch.environ(os.environ),
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=None if output is None else subprocess.STDOUT,
            # Ctrl-C in the terminal is for us to answer: vLLM is stopped in order, once.
            start_new_session=True,
            preexec_fn=_death_note(),
        )


def _death_note() -> Callable[[], None]:
    """Have the kernel end the server if we are killed and cannot."""
    prctl = ctypes.CDLL(None).prctl  # looked up before the fork
    return lambda: prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)


def _require_free(launch: Launch) -> None:
    family = socket.AF_INET6 if ":" in launch.bind.host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as sock:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            sock.bind((launch.bind.host, launch.bind.port))
        except OSError as error:
            raise ConfigError(
                f"{launch.bind.host} port {launch.bind.port} cannot be used ({error.strerror}); "
                f"choose another with --port"
            ) from None
