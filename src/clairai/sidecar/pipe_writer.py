"""Writes to a pipe, a terminal or a file without hanging on a reader that sleeps."""

from __future__ import annotations

import os
import select
from collections.abc import Callable
from typing import Final

from clairai.errors import ConfigError

# A pipe that polls as writable takes this much without blocking: pipe(7).
_CHUNK_BYTES: Final = select.PIPE_BUF
_POLL_MS: Final = 100


class PipeWriter:
    """Writes in pieces, so that `stop` is checked even while nobody reads."""

    def __init__(self, descriptor: int, *, stop: Callable[[], bool]) -> None:
        self._descriptor = descriptor
        self._stop = stop
        self._writable = select.poll()
        self._writable.register(descriptor, select.POLLOUT)
        self._hangup = select.poll()
        self._hangup.register(descriptor, 0)

    def write(self, data: bytes) -> None:
        """Write everything; the rest is dropped if nobody reads when it is time to stop.

        Raises BrokenPipeError once the reader is gone, ConfigError if a file takes no more.
        """
        left = memoryview(data)
        while left:
            if self._writable.poll(_POLL_MS):
                left = left[self._write_some(left[:_CHUNK_BYTES]) :]
            elif self._stop():
                return

    def _write_some(self, part: memoryview) -> int:
        try:
            return os.write(self._descriptor, part)
        except BrokenPipeError:
            raise
        except OSError as error:
            raise ConfigError(
                f"the output takes no more ({error.strerror}); rows from here on are not shown: "
                f"make room, or write it elsewhere"
            ) from None

    def is_reader_gone(self) -> bool:
        """True if the reader has gone, known before there is anything to write."""
        return bool(self._hangup.poll(0))
