"""Takes nothing; gives the demo as a user starts it, and a proxy whose engine never comes up."""

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
from typing import Final

START_DEADLINE_S: Final = 240.0
STOP_DEADLINE_S: Final = 60.0
LOOK_EVERY_S: Final = 0.25
ENVIRONMENT: Final = {"HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1"}


def free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return int(sock.getsockname()[1])


@contextmanager
def served(folder: Path, *command: str, is_up: Callable[[int], bool]) -> Iterator[str]:
    """`clairai COMMAND` on a free port from when `is_up` likes its health; ended as Ctrl-C does."""
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
        _await(process, log, lambda: is_up(health(url)))
        yield url
    finally:
        process.send_signal(signal.SIGINT)
        try:
            process.wait(STOP_DEADLINE_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def health(url: str) -> int:
    """The status of /health; 0 while nobody answers."""
    try:
        with urllib.request.urlopen(f"{url}/health", timeout=5) as answer:  # noqa: S310
            return int(answer.status)
    except urllib.error.HTTPError as error:
        return error.code
    except OSError:
        return 0


def _environ(folder: Path) -> Mapping[str, str]:
    return os.environ | ENVIRONMENT | {"CLAIRAI_RUNTIME_DIR": str(folder)}


def _await(process: subprocess.Popen[bytes], log: Path, is_up: Callable[[], bool]) -> None:
    deadline_s = time.monotonic() + START_DEADLINE_S
    while not is_up():
        assert time.monotonic() < deadline_s, f"not within {START_DEADLINE_S} s"
        # the pause between two looks ends at once if the process does
        with suppress(subprocess.TimeoutExpired):
            process.wait(LOOK_EVERY_S)
            raise AssertionError(f"it ended by itself:\n{log.read_text()[-4000:]}")
