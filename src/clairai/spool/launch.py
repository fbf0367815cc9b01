"""Starts the spool process of an engine, and starts it again if it has died.

Runs in: the worker, between steps.
"""

from __future__ import annotations

import contextlib
import logging
import os
import subprocess
import tempfile
from pathlib import Path
from typing import Final

from clairai.errors import ConfigError
from clairai.local.run_module import module_command, module_environment
from clairai.settings import SpoolSettings
from clairai.spool.read_position import ReadPosition

MODULE: Final = "clairai.spool.process"
END_S: Final = 10.0  # for a spool to end by itself, once the engine has hung up
LARGE_FILES: Final = "/var/tmp"  # noqa: S108  # files without a name; often a disk where /tmp is not
MAX_RESTARTS: Final = 5
_log: Final = logging.getLogger("clairai.spool")


class SpoolLauncher:
    """The spool process of one engine."""

    def __init__(self, socket: Path, settings: SpoolSettings) -> None:
        """Start it; it attaches to the ring while the engine goes on starting."""
        folder = find_folder(settings.folder)
        memory_nbytes, disk_nbytes = settings.memory_mib << 20, settings.disk_gib << 30
        self._position = ReadPosition.create()
        bounds = (f"{memory_nbytes}", f"{disk_nbytes}")
        self._arguments = (f"{socket}", f"{folder}", *bounds, f"{self._position.fd}")
        self._num_restarts = 0
        self._process = self._start()

    def ensure_running(self) -> bool:
        """Replace a spool that has died: rows from now on are kept again. False: given up."""
        if self._process.poll() is None:
            return True
        if self._num_restarts >= MAX_RESTARTS:
            return False
        self._num_restarts += 1
        _log.warning(
            "the spool of scores ended with %s and is started again; rows it alone had are lost",
            self._process.returncode,
        )
        self._process = self._start()
        return True

    @property
    def num_read(self) -> int:
        """Records of the ring that it has read, or lost."""
        return self._position.num_read

    @property
    def returncode(self) -> int | None:
        """None while the process runs."""
        return self._process.poll()

    def close(self) -> None:
        """The engine has hung up: wait for the spool to end, and end it if it does not."""
        self._position.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(END_S)
            return
        self._process.kill()
        self._process.wait()

    def _start(self) -> subprocess.Popen[bytes]:
        try:
            return subprocess.Popen(  # noqa: S603  # a list, no shell; our own module
                module_command(MODULE, *self._arguments),
                env=module_environment(),
                stdin=subprocess.DEVNULL,
                pass_fds=(self._position.fd,),
                start_new_session=True,  # a terminal's signals are for the engine
            )
        except OSError as error:
            raise ConfigError(
                f"the spool of scores cannot be started: {error}; "
                f'scores are not kept with "scores": false'
            ) from error


def find_folder(chosen: str | None) -> Path:
    """Where files may get large; ConfigError if no file can be made there."""
    folder = chosen or os.environ.get("TMPDIR") or LARGE_FILES
    if chosen is None and not os.access(folder, os.W_OK | os.X_OK):
        folder = tempfile.gettempdir()
    try:
        tempfile.TemporaryFile(dir=folder).close()
    except OSError as error:
        raise ConfigError(
            f"no files for scores can be made in {folder} ({error.strerror}); name another "
            f'folder with "scores": {{"folder": ...}}'
        ) from error
    return Path(folder)
