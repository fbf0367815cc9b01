"""The socket of a spool: says where rows are, and hands out the files that hold them.

Runs in: the spool process, on a thread for each of a few connections.
"""

from __future__ import annotations

import logging
import os
import select
import socket
import threading
from pathlib import Path
from typing import Final, Protocol, Self

from clairai.errors import ClairaiError, HandshakeError
from clairai.local.private_socket import (
    Connection,
    MessageFormat,
    listen,
    peer_uid,
    remove_dead_sockets,
    socket_path,
)
from clairai.spool.spool import Spool
from clairai.wire.ring_messages import AskBank, Refusal
from clairai.wire.spool_messages import (
    DROPPED,
    SOCKET_KIND,
    AskRows,
    OpenSegment,
    SegmentFile,
    SpoolAnswer,
    SpooledRows,
    SpoolLosses,
    SpoolQuestion,
)

MAX_CONNECTIONS: Final = 64
MAX_QUESTION_BYTES: Final = 4096
ROUND_S: Final = 1.0  # how long a question waits for rows before it is answered without them
IDLE_S: Final = 600.0  # a connection that asks nothing is closed
CLOSE_TIMEOUT_S: Final = 5.0
_ACCEPTED: Final = MessageFormat[SpoolQuestion](
    SpoolQuestion, max_bytes=MAX_QUESTION_BYTES, error=HandshakeError
)
_log: Final = logging.getLogger(__name__)


class Progress(Protocol):
    """Who reads the ring."""

    def wait_until(self, seq: int, timeout_s: float) -> int: ...

    def losses(self) -> SpoolLosses: ...


class SpoolServer:
    """Answers processes of this user; one that misbehaves is disconnected alone."""

    def __init__(self, folder: Path, epoch: int, spool: Spool, progress: Progress) -> None:
        self.path = socket_path(folder, epoch, SOCKET_KIND)
        self._spool, self._progress = spool, progress
        remove_dead_sockets(folder, SOCKET_KIND)
        self._listener = listen(self.path)
        self._wake_fd = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._slots = threading.BoundedSemaphore(MAX_CONNECTIONS)
        self._thread = threading.Thread(target=self._accept, name="clairai-spool", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Remove the socket; connections end with the process."""
        self.path.unlink(missing_ok=True)
        os.eventfd_write(self._wake_fd, 1)
        self._thread.join(CLOSE_TIMEOUT_S)
        self._listener.close()
        os.close(self._wake_fd)

    def _accept(self) -> None:
        ready = select.poll()
        ready.register(self._listener, select.POLLIN)
        ready.register(self._wake_fd, select.POLLIN)
        while True:
            found = {fd for fd, _ in ready.poll()}
            if self._wake_fd in found:
                return
            try:
                sock, _ = self._listener.accept()
            except OSError:  # it hung up, or there are no descriptors left: others go on
                continue
            self._begin(sock)

    def _begin(self, sock: socket.socket) -> None:
        if peer_uid(sock) != os.geteuid() or not self._slots.acquire(blocking=False):
            sock.close()
            return
        name = "clairai-spool-ask"
        threading.Thread(target=self._serve, args=(sock,), name=name, daemon=True).start()

    def _serve(self, sock: socket.socket) -> None:
        connection = Connection[SpoolQuestion](sock, _ACCEPTED, max_fds=0)
        try:
            while True:
                question, _ = connection.receive(IDLE_S)
                self._answer(connection, question)
        except OSError:
            pass  # the peer has hung up, or asks nothing
        except ClairaiError as error:
            _log.warning("a peer of the spool is disconnected: %s", error.reason)
        finally:
            connection.close()
            self._slots.release()

    def _answer(self, connection: Connection[SpoolQuestion], question: SpoolQuestion) -> None:
        if not isinstance(question, OpenSegment):
            connection.send(self._find(question))
            return
        fd = self._spool.open_segment(question.number)
        if fd is None:
            connection.send(Refusal(DROPPED, f"segment {question.number} was dropped"))
            return
        try:
            connection.send(SegmentFile(question.number), [fd])
        finally:
            os.close(fd)

    def _find(self, question: AskRows | AskBank) -> SpoolAnswer:
        if isinstance(question, AskRows):
            reached = self._progress.wait_until(question.until, ROUND_S)
            segments = self._spool.rows_since(question.since)
            return SpooledRows(segments, reached, self._progress.losses())
        bank = self._spool.bank(question.version)
        return bank or Refusal("request", f"no row is of bank {question.version}")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
