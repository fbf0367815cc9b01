"""The log file of a vLLM server: bounded on disk, and read for the state of its start.

The folder may be shared with others: the file is made anew and used by descriptor from then on, so
whatever others put under its names is neither followed nor overwritten.
"""

from __future__ import annotations

import contextlib
import logging
import os
import re
import stat
import weakref
from collections.abc import Callable
from errno import EEXIST, EPERM
from pathlib import Path
from typing import IO, Final

from clairai.errors import ConfigError, describe_os_error, quote
from clairai.launch.death_cause import find_death_cause

_log: Final = logging.getLogger(__name__)

MAX_BYTES: Final = 32 << 20  # of the log, and of the one before it
_SPARE_BYTES: Final = 1 << 20  # for what is written while the rest is copied
_TAIL_BYTES: Final = 1 << 20
_TAIL_LINES: Final = 15
_MAX_LINE_CHARS: Final = 1000
# A client's text may be in the log; none of it may act on a terminal.
_CONTROL: Final = re.compile(r"[\x00-\x08\x0a-\x1f\x7f-\x9f\u2028\u2029]")
_PREFIX: Final = re.compile(r"^(?:\([^)]*\) )?(?:[A-Z]+ \S+ \S+ \[[^]]*\] )?")
# Lines that vLLM 0.26 to 0.32 writes while it starts; the newest match counts.
_STAGES: Final = (
    (re.compile("Initializing a V1 LLM engine"), "setting up"),
    (re.compile("Starting to load model|Loading .*checkpoint shards"), "loading the weights"),
    (re.compile("Model loading took|Loading weights took"), "warming up"),
    (re.compile("Dynamo bytecode|Compiling a graph|torch.compile t[ao]"), "compiling"),
    (re.compile("KV cache size"), "warming up"),
    (re.compile("Capturing CUDA graphs"), "capturing graphs"),
    (re.compile("Graph capturing finished|Starting vLLM server"), "opening its server"),
)
_FIRST_STAGE: Final = "importing vLLM"
_NEW_FILE: Final = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC


class EngineLog:
    """The log of one server after the other, at `path`; the log before is `.old` beside it."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._folder_fd = self._fd = -1
        self._close_fds: Callable[[], object] = lambda: None  # nothing is open yet
        self._old_nbytes = 0  # that trim() has put into `.old`
        self._dropped_nbytes = 0
        self._has_warned = False

    def create(self) -> IO[bytes]:
        """A new file for one server; the log before it is kept as `.old`.

        ConfigError if there can be no such file. After the first server the present file is used
        on instead: an engine is not refused its restart for want of a log.
        """
        try:
            self._create_file()
        except OSError as error:
            if self._fd < 0:
                raise ConfigError(
                    f"{self._quoted} cannot be a log file, {describe_os_error(error)}; "
                    f"give --vllm-log another file, or `-` for this process's own output"
                ) from error
            self._warn(error)
        return os.fdopen(os.dup(self._fd), "wb")

    def _create_file(self) -> None:
        folder_fd = os.open(self.path.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            self._move_to_old(folder_fd)
            # Appending, so that the writer continues at the start after trim() empties the file.
            fd = os.open(self.path.name, _NEW_FILE | os.O_APPEND, 0o600, dir_fd=folder_fd)
        except BaseException:
            os.close(folder_fd)
            raise
        self._close_fds()
        self._folder_fd, self._fd = folder_fd, fd
        self._old_nbytes = self._dropped_nbytes = 0
        self._close_fds = weakref.finalize(self, _close, folder_fd, fd)

    def _move_to_old(self, folder_fd: int) -> None:
        found = _look(self.path.name, folder_fd)
        if found is None:
            return
        if not stat.S_ISREG(found.st_mode) or found.st_uid != os.geteuid():
            raise FileExistsError(EEXIST, "it is there, and not a plain file of this user")
        self._require_own_old(folder_fd)
        os.rename(self.path.name, self._old_name, src_dir_fd=folder_fd, dst_dir_fd=folder_fd)

    def _require_own_old(self, folder_fd: int) -> None:
        """PermissionError if another user has put something under the name of the old log."""
        found = _look(self._old_name, folder_fd)
        if found is not None and found.st_uid != os.geteuid():
            raise PermissionError(EPERM, f"{self._old_name} belongs to user {found.st_uid}")

    @property
    def _old_name(self) -> str:
        return f"{self.path.name}.old"

    @property
    def _quoted(self) -> str:
        return quote(str(self.path), 200)

    def trim(self) -> None:
        """Move a long log to `.old` and go on with an empty one; never raises an OSError.

        Without room for the copy its text is dropped. The new log begins with what was dropped.
        """
        try:
            if self._fd >= 0 and os.fstat(self._fd).st_size > MAX_BYTES - _SPARE_BYTES:
                self._trim()
        except OSError as error:
            self._warn(error)

    def _trim(self) -> None:
        try:
            kept, why = self._copy_to_old(), ""
        except OSError as error:
            self._warn(error)
            kept, why = 0, f", {describe_os_error(error)}"
        # What vLLM writes between these two calls is the only text that is not counted.
        self._dropped_nbytes += os.fstat(self._fd).st_size - kept
        os.ftruncate(self._fd, 0)
        self._old_nbytes = kept
        note = f"[clairai] {kept} bytes of this log are in {self._old_name}; "
        note += f"{self._dropped_nbytes} bytes of it were dropped so far{why}\n"
        os.write(self._fd, note.encode())

    def _copy_to_old(self) -> int:
        """Copy the end of the log; return how much."""
        self._require_own_old(self._folder_fd)
        with contextlib.suppress(FileNotFoundError):
            os.unlink(self._old_name, dir_fd=self._folder_fd)  # first: there is room for two
        self._dropped_nbytes += self._old_nbytes
        self._old_nbytes = 0
        old_fd = os.open(self._old_name, _NEW_FILE, 0o600, dir_fd=self._folder_fd)
        try:
            return self._copy_tail(old_fd)
        except OSError:
            os.unlink(self._old_name, dir_fd=self._folder_fd)  # a part would only take room
            raise
        finally:
            os.close(old_fd)

    def _copy_tail(self, target_fd: int) -> int:
        offset = max(0, os.fstat(self._fd).st_size - (MAX_BYTES - _SPARE_BYTES))
        kept = 0
        while count := os.sendfile(target_fd, self._fd, offset + kept, MAX_BYTES - kept):
            kept += count
        return kept

    def _warn(self, error: OSError) -> None:
        """Once: the disk may stay full for days."""
        if not self._has_warned:
            _log.warning("%s cannot be kept: %s", self._quoted, describe_os_error(error))
        self._has_warned = True

    def lines(self) -> list[str]:
        """The last lines, without empty ones, each cut and without control characters."""
        return [_clean(line) for line in self._tail_lines()]

    def newest(self) -> str:
        """The last line, without vLLM's prefix of process, time and file."""
        lines = self._tail_lines()
        shown = lines[-1].rpartition("\r")[2] if lines else ""  # of a progress bar, its last state
        return _PREFIX.sub("", _clean(shown)).strip()

    def _tail_lines(self) -> list[str]:
        if self._fd < 0:
            return []
        try:
            start = max(0, os.fstat(self._fd).st_size - _TAIL_BYTES)
            text = os.pread(self._fd, _TAIL_BYTES, start).decode(errors="replace")
        except OSError as error:
            self._warn(error)
            return []
        # Not splitlines(): it also cuts at characters that a client can send.
        return [line.rstrip() for line in text.split("\n") if line.strip()]

    def stage(self) -> str:
        """How far the start is, in fixed words: nothing of the log itself is repeated."""
        for line in reversed(self.lines()):
            for pattern, stage in _STAGES:
                if pattern.search(line):
                    return stage
        return _FIRST_STAGE

    def describe_death(self) -> str:
        """The last lines, and the error that ended the server if the log has it."""
        lines = self.lines()
        shown = [f"last lines of {self.path}:", *lines[-_TAIL_LINES:]]
        cause = find_death_cause(lines)
        return "\n".join(shown if cause is None else [*shown, f"cause: {cause}"])


def _look(name: str, folder_fd: int) -> os.stat_result | None:
    """What has this name, itself and not what a link leads to; None if nothing has."""
    try:
        return os.stat(name, dir_fd=folder_fd, follow_symlinks=False)
    except FileNotFoundError:
        return None


def _clean(line: str) -> str:
    return _CONTROL.sub("\ufffd", line[:_MAX_LINE_CHARS])


def _close(*fds: int) -> None:
    for fd in fds:
        os.close(fd)
