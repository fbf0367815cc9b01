"""Runs a clairai command as a server for the journeys: the demo, or a proxy without an engine."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Final

START_DEADLINE_S: Final = 900.0
STOP_DEADLINE_S: Final = 60.0
POLL_S: Final = 0.25
ENVIRONMENT: Final = {"HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1"}


def free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return int(sock.getsockname()[1])


@contextmanager
def running_server(folder: Path, *command: str, is_up: Callable[[int], bool]) -> Iterator[str]:
    """Run `clairai COMMAND` on a free port; yields once `is_up` accepts the status of /health."""
    port = free_port()
    log = folder / f"{command[0]}.log"
    with log.open("wb") as out:
        process = subprocess.Popen(
            [sys.executable, "-m", "clairai.cli", *command, "--port", str(port)],
            stdout=out,
            stderr=subprocess.STDOUT,
            env=_environ(folder),
        )
    url = f"http://127.0.0.1:{port}"
    try:
        _wait_until_up(process, log, lambda: is_up(health(url)))
        yield url
    finally:
        interrupt(process, STOP_DEADLINE_S)


def interrupt(process: subprocess.Popen[Any], deadline_s: float) -> None:
    """End a command as Ctrl-C does; one that has not ended in time is killed."""
    process.send_signal(signal.SIGINT)
    try:
        process.wait(deadline_s)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def health(url: str) -> int:
    """The HTTP status of /health; 0 while nothing listens."""
    try:
        with urllib.request.urlopen(f"{url}/health", timeout=30) as answer:  # noqa: S310
            return int(answer.status)
    except urllib.error.HTTPError as error:
        return error.code
    except OSError:
        return 0


def _environ(folder: Path) -> Mapping[str, str]:
    return os.environ | ENVIRONMENT | {"CLAIRAI_RUNTIME_DIR": str(folder)}


def _wait_until_up(process: subprocess.Popen[bytes], log: Path, is_up: Callable[[], bool]) -> None:
    deadline_s = time.monotonic() + START_DEADLINE_S
    while not is_up():
        assert time.monotonic() < deadline_s, (
            f"the server did not start within {START_DEADLINE_S} s"
        )
        # waiting on the process notices at once that it has ended
        with suppress(subprocess.TimeoutExpired):
            process.wait(POLL_S)
            raise AssertionError(f"the server ended by itself:\n{log.read_text()[-4000:]}")
