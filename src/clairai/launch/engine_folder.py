"""The private folder of one engine: locked while it is in use, and removed whoever died first.

The process guard removes it in the ordinary case. If the guard itself was killed the launcher does,
and a launcher that starts later removes the folders of launches that ended without either.

Runs in: the process of `clairai serve` or `clairai demo`.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Final

from clairai.launch import process_guard
from clairai.local.heartbeat import VARIABLE, is_private_folder

PREFIX: Final = "s-"
BEATS: Final = "beats"
_LOCK: Final = "lock"
_KILL_TIMEOUT_S: Final = 30.0  # for the kernel to end large processes on a busy machine


def make_folder(folder: Path) -> int:
    """Make it, or take it over from the engine before; a descriptor that keeps it locked."""
    folder.mkdir(mode=0o700, exist_ok=True)
    shutil.rmtree(folder / BEATS, ignore_errors=True)
    (folder / BEATS).mkdir(mode=0o700)
    flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
    lock = os.open(folder / _LOCK, flags, 0o600)
    fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
    return lock


def remove_stale_folders(runtime: Path) -> list[Path]:
    """Remove the folders of launches of which no process is left; gives what was removed."""
    removed = []
    for folder in sorted(runtime.glob(f"{PREFIX}*")):
        if is_private_folder(folder) and _is_abandoned(folder):
            shutil.rmtree(folder, ignore_errors=True)
            removed.append(folder)
    return removed


def _is_abandoned(folder: Path) -> bool:
    """True if launcher and guard are dead, which both held the lock; False if there is none."""
    try:
        lock = os.open(folder / _LOCK, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
    except OSError:
        return False  # one that is just being made
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    finally:
        os.close(lock)
    return True


def clean_up(folder: Path | None, runtime: Path | None, is_urgent: Callable[[], bool]) -> None:
    """Do what a guard that was killed could not: end what is left, remove folder and sockets."""
    if folder is None:
        return
    end_leftovers(folder / BEATS, is_urgent)
    shutil.rmtree(folder, ignore_errors=True)
    if runtime is not None:
        process_guard.remove_dead_sockets(runtime)


def end_leftovers(beats: Path, is_urgent: Callable[[], bool]) -> None:
    """Kill every process of the engine.

    Capture writers first get time to write their rows, and resource trackers, which end by
    themselves, to unlink the shared memory of the others.
    """
    deadline_s = time.monotonic() + process_guard.WRITE_S
    while (found := find_processes(beats)) and time.monotonic() < deadline_s and not is_urgent():
        _kill([pid for pid in found if not _ends_by_itself(pid)])
        time.sleep(process_guard.POLL_S)
    _kill_until_gone(beats, lambda pid: not process_guard.is_tracker(pid))
    deadline_s = time.monotonic() + process_guard.TRACKER_S
    while find_processes(beats) and time.monotonic() < deadline_s:
        time.sleep(process_guard.POLL_S)
    _kill_until_gone(beats, lambda _: True)


def _kill_until_gone(beats: Path, is_doomed: Callable[[int], bool]) -> None:
    deadline_s = time.monotonic() + _KILL_TIMEOUT_S
    while doomed := list(filter(is_doomed, find_processes(beats))):
        if time.monotonic() >= deadline_s:
            return
        _kill(doomed)
        time.sleep(process_guard.POLL_S)


def _ends_by_itself(pid: int) -> bool:
    return process_guard.is_capture_writer(pid) or process_guard.is_tracker(pid)


def find_processes(beats: Path) -> list[int]:
    """Every process that was started for this folder, the guard included.

    By its environment, because orphans of a dead guard are nobody's children.
    """
    mark, found = f"{VARIABLE}={beats}".encode(), []
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):  # another user's, or it has ended since
            if mark in (process / "environ").read_bytes().split(b"\0"):
                found.append(int(process.name))
    return found


def _kill(pids: list[int]) -> None:
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
