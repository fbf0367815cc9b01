"""Notices a server whose process goes on and that no longer listens.

Runs in: the process of `clairai serve` or `clairai demo`.
"""

from __future__ import annotations

import socket
import time
from collections.abc import Callable
from pathlib import Path
from typing import Final

from clairai.launch.liveness import Trouble

LOOK_EVERY_S: Final = 1.0
REFUSED_S: Final = 3.0  # for so long nobody may listen
_REASON: Final = "the API server no longer listens on its socket"


class ListenWatch:
    """Connects to the server's socket now and then; only a refusal counts, slowness does not."""

    def __init__(
        self,
        path: Path,
        *,
        clock: Callable[[], float] = time.monotonic,
        wall_clock: Callable[[], float] = time.time,
    ) -> None:
        self._path, self._clock, self._wall_clock = path, clock, wall_clock
        self._looked_s = float("-inf")
        self._refused_s: float | None = None
        self._refused_at = 0.0

    def look(self) -> Trouble | None:
        """Call it often, once the server has served."""
        now_s = self._clock()
        if now_s >= self._looked_s + LOOK_EVERY_S:
            self._looked_s = now_s
            self._note(is_refused(self._path), now_s)
        if self._refused_s is None or now_s < self._refused_s + REFUSED_S:
            return None
        return Trouble(_REASON, self._refused_at, is_fatal=True)

    def _note(self, is_refusing: bool, now_s: float) -> None:
        if not is_refusing:
            self._refused_s = None
        elif self._refused_s is None:
            self._refused_s, self._refused_at = now_s, self._wall_clock()


def is_refused(path: Path) -> bool:
    """True if nobody listens there; a server that is only busy accepts later."""
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK) as sock:
            sock.connect(str(path))
    except (ConnectionRefusedError, FileNotFoundError):
        return True
    except OSError:  # its queue is full, or we have no descriptor
        return False
    return False
