"""Heartbeats of the processes of one engine: each counts in a small file that its launcher reads.

`clairai serve` names a private folder in an environment variable; without it nothing here does
anything. A beat is written by what has to make progress (an event loop, a busy loop), so that a
loop that hangs stops beating, and a process that is only there does not count as alive.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import stat
import struct
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from enum import IntEnum
from pathlib import Path
from typing import Final, Literal, NamedTuple, Self, get_args

VARIABLE: Final = "CLAIRAI_HEARTBEATS"
Role = Literal["api-server", "engine-core", "worker", "capture-writer", "process-guard"]
MAGIC: Final = b"clairai1"
# Magic, process id, activity, start time of the process in clock ticks, number of beats. The
# process guard, which imports nothing of clairai, writes the same (launch/process_guard.py).
LAYOUT: Final = struct.Struct("<8sIIQQ")
FILE_BYTES: Final = 64
MAX_FILES: Final = 1024  # a folder with more is not ours
_BEATS: Final = struct.Struct("<Q")
_BEATS_AT: Final = LAYOUT.size - _BEATS.size
_ACTIVITY: Final = struct.Struct("<I")
_ACTIVITY_AT: Final = 12
# Fields of /proc/PID/stat behind the name, which may hold anything: proc_pid_stat(5).
_STATE_FIELD, _START_FIELD = 0, 19


class Activity(IntEnum):
    """What a process is at, as far as it changes what its beats mean."""

    LOOP = 0
    CALL = 1  # loads weights or does something else that may take minutes
    CUT_OFF = 2  # its connection to the engine core is broken for good: it beats, and is no use


class ProcessState(NamedTuple):
    """A process according to the kernel."""

    letter: str  # R, S, D, T (suspended), t (traced), Z ...
    start_ticks: int  # tells it from a later process with the same id


@dataclass(frozen=True)
class Beat:
    """What one heartbeat file says."""

    role: Role
    pid: int
    start_ticks: int
    beats: int  # 0: it does not beat yet; only that it exists is known
    activity: Activity = Activity.LOOP


class Heartbeat:
    """The file of this process. Only the process that opened it may beat."""

    def __init__(self, path: Path, memory: mmap.mmap) -> None:
        self._path, self._memory = path, memory
        self._beats = 0

    @classmethod
    def open(cls, role: Role, environ: Mapping[str, str] = os.environ) -> Self | None:
        """None unless this process was started by a launcher that watches it.

        A process has one role: the last one it opened.
        """
        folder = environ.get(VARIABLE)
        if not folder or not is_private_folder(Path(folder)):
            return None
        state = read_process_state(os.getpid())
        if state is None:  # no /proc: nobody could tell this process from another
            return None
        path = Path(folder) / f"{role}-{os.getpid()}"
        opened = cls(path, _create(path, state.start_ticks))
        for beat in read_heartbeats(Path(folder)):
            if beat.pid == os.getpid() and beat.role != role:
                (Path(folder) / f"{beat.role}-{beat.pid}").unlink(missing_ok=True)
        return opened

    def beat(self) -> None:
        self._beats += 1
        _BEATS.pack_into(self._memory, _BEATS_AT, self._beats)

    @contextmanager
    def during_call(self) -> Iterator[None]:
        """Until the end of the block this process may be silent for minutes."""
        _ACTIVITY.pack_into(self._memory, _ACTIVITY_AT, Activity.CALL)
        try:
            yield
        finally:
            _ACTIVITY.pack_into(self._memory, _ACTIVITY_AT, Activity.LOOP)

    def report_cut_off(self) -> None:
        """From now on this process counts as cut off from the engine core."""
        _ACTIVITY.pack_into(self._memory, _ACTIVITY_AT, Activity.CUT_OFF)

    def close(self) -> None:
        """Remove the file: this process ends because it was asked to."""
        self._path.unlink(missing_ok=True)


def _create(path: Path, start_ticks: int) -> mmap.mmap:
    """A whole file appears at once."""
    new = path.with_name(f".{path.name}")
    fd = os.open(new, os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    try:
        head = LAYOUT.pack(MAGIC, os.getpid(), Activity.LOOP, start_ticks, 0)
        os.pwrite(fd, head.ljust(FILE_BYTES, b"\0"), 0)
        memory = mmap.mmap(fd, FILE_BYTES)
    finally:
        os.close(fd)
    new.rename(path)
    return memory


def is_private_folder(folder: Path) -> bool:
    """True for a folder of this user that nobody else can enter."""
    try:
        status = folder.lstat()
    except OSError:
        return False
    is_ours = stat.S_ISDIR(status.st_mode) and status.st_uid == os.geteuid()
    return is_ours and not stat.S_IMODE(status.st_mode) & 0o077


def has_heartbeat(pid: int, environ: Mapping[str, str] = os.environ) -> bool:
    """True if this process beats already, in whatever role."""
    folder = environ.get(VARIABLE)
    return bool(folder) and any(beat.pid == pid for beat in read_heartbeats(Path(folder or "")))


def read_heartbeats(folder: Path) -> list[Beat]:
    """Every heartbeat in the folder; files that are none are passed over."""
    try:
        names = sorted(os.listdir(folder))[:MAX_FILES]
    except OSError:
        return []
    found = (_read(folder / name) for name in names if not name.startswith("."))
    return [beat for beat in found if beat is not None]


def _read(path: Path) -> Beat | None:
    role = path.name.rpartition("-")[0]
    if role not in get_args(Role):
        return None
    with contextlib.suppress(OSError, struct.error, ValueError):
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
        try:
            data = os.pread(fd, FILE_BYTES, 0)
        finally:
            os.close(fd)
        magic, pid, activity, start_ticks, beats = LAYOUT.unpack_from(data)
        if magic == MAGIC:
            return Beat(role, pid, start_ticks, beats, Activity(activity))  # type: ignore[arg-type]
    return None


def read_process_state(pid: int) -> ProcessState | None:
    """None if there is no such process; OSError if that cannot be found out now."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text(errors="replace")
    except (FileNotFoundError, ProcessLookupError):
        return None
    fields = text.rpartition(")")[2].split()
    return ProcessState(fields[_STATE_FIELD], int(fields[_START_FIELD]))


def open_pidfd(pid: int) -> int | None:
    """A descriptor that becomes readable when the process ends; None if there can be none."""
    try:
        return os.pidfd_open(pid)
    except OSError:
        return None
