"""Ends the answers of a completion process that has to end, each with the reason.

A thread waits for the word of the first process. It writes to the sockets itself, because the event
loop hangs; one that hangs with Python's lock held keeps this thread from running, too, and is
killed. Runs in: a completion process.
"""

from __future__ import annotations

import contextlib
import os
import socket
import threading
from collections.abc import Callable, Iterable
from http import HTTPStatus
from typing import Final, Protocol

from clairai.proxy.responses import HttpRefusal

CODE: Final = "process-ended"
EXIT_CODE: Final = 3
_MAX_REASON: Final = 256
_READ_BYTES: Final = 1 << 16


class EndableConnection(Protocol):
    """A connection of this process."""

    @property
    def fd(self) -> int: ...

    def last_bytes(self, refusal: HttpRefusal) -> bytes:
        """What ends its answer, if it has one and is not in the middle of a part."""


class LastAnswers:
    """The thread; `find_connections` is called in it."""

    def __init__(
        self, fd: int, find_connections: Callable[[], Iterable[EndableConnection]]
    ) -> None:
        """Takes over the descriptor, from which it reads the reason."""
        self._fd, self._find_connections = fd, find_connections
        threading.Thread(target=self._run, name="clairai-last-answers", daemon=True).start()

    def _run(self) -> None:
        reason = os.read(self._fd, _MAX_REASON).decode()
        if not reason:  # the first process is gone
            return
        refusal = make_refusal(reason)
        for connection in self._find_connections():
            with contextlib.suppress(OSError, AttributeError):  # it is being closed
                end_connection(connection.fd, connection.last_bytes(refusal))
        os._exit(EXIT_CODE)


def make_refusal(reason: str) -> HttpRefusal:
    return HttpRefusal(
        HTTPStatus.SERVICE_UNAVAILABLE,
        f"the process of the proxy that gave this answer {reason} and was ended; ask again",
        code=CODE,
        headers={"Retry-After": "1"},
    )


def end_connection(fd: int, data: bytes) -> None:
    """Send what the client takes at once, and close for sending; OSError if it has left."""
    with socket.socket(fileno=os.dup(fd)) as sock:
        sock.setblocking(False)
        if data:
            sock.send(data)
        sock.shutdown(socket.SHUT_WR)
        # A socket that is closed with unread data is reset, and the client may lose what was sent.
        with contextlib.suppress(BlockingIOError):
            while sock.recv(_READ_BYTES):
                pass
