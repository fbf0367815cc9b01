"""The engine's socket for weights: one sender at a time brings the buffers of its transfer.

Runs in: the worker, on one daemon thread.
"""

from __future__ import annotations

import logging
import os
import socket
import threading
from contextlib import suppress
from pathlib import Path
from typing import Final, Self

from clairai.errors import ClairaiError, WeightsError
from clairai.local.private_socket import (
    Connection,
    MessageFormat,
    call_in_forked_child,
    close_all,
    listen,
    peer_uid,
    remove_dead_sockets,
    socket_path,
)
from clairai.weights.pending_transfer import TransferTracker
from clairai.wire.ring_messages import Refusal
from clairai.wire.weights_messages import BufferFilled, BufferOffer, BufferReceived, WeightsGreeting

SOCKET_KIND: Final = "weights"
WIRE_VERSION: Final = 2
MAX_FRAME_BYTES: Final = 4096
MAX_FDS: Final = 4
IDLE_TIMEOUT_S: Final = 600.0  # a sender that is silent for so long is disconnected
LOAD_TIMEOUT_S: Final = 600.0  # loading a model takes less
CLOSE_TIMEOUT_S: Final = 5.0
SenderMessage = BufferOffer | BufferFilled
EngineMessage = WeightsGreeting | BufferReceived | Refusal
_FROM_SENDER: Final = MessageFormat[SenderMessage](
    SenderMessage, max_bytes=MAX_FRAME_BYTES, error=WeightsError
)
FROM_ENGINE: Final = MessageFormat[EngineMessage](
    EngineMessage, max_bytes=MAX_FRAME_BYTES, error=WeightsError
)
_log: Final = logging.getLogger(__name__)


def rank_socket_path(folder: Path, epoch: int, rank: int) -> Path:
    """Where a rank takes weights: each has a socket of its own, and all have one epoch."""
    return socket_path(folder, epoch, f"{SOCKET_KIND}-{rank}" if rank else SOCKET_KIND)


class BufferServer:
    """Serves one sender at a time; the next one waits in the socket's queue."""

    def __init__(
        self, folder: Path, epoch: int, device: str, tracker: TransferTracker, *, rank: int = 0
    ) -> None:
        self.path = rank_socket_path(folder, epoch, rank)
        self._greeting = WeightsGreeting(WIRE_VERSION, f"{epoch:016x}", device, os.getpid())
        self._tracker = tracker
        self._pid = os.getpid()
        self._is_closing = threading.Event()
        self._sender: Connection[SenderMessage] | None = None
        remove_dead_sockets(folder, SOCKET_KIND)
        self._listener = listen(self.path)
        self._listener.setblocking(True)
        call_in_forked_child(self._listener.close)
        self._thread = threading.Thread(target=self._serve, name="clairai-weights", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Remove the socket and disconnect the sender; does nothing in a forked child."""
        if self._is_closing.is_set() or os.getpid() != self._pid:
            return
        self._is_closing.set()
        self.path.unlink(missing_ok=True)
        with suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        with suppress(OSError):
            if self._sender is not None:
                self._sender.shut_down()
        self._thread.join(CLOSE_TIMEOUT_S)
        self._listener.close()
        self._tracker.drop()

    def _serve(self) -> None:
        while not self._is_closing.is_set():
            try:
                sock, _ = self._listener.accept()
            except OSError as error:
                if not self._is_closing.is_set():
                    _log.warning("no sender can connect for now: %s", error)
                    self._is_closing.wait(0.1)
                continue
            sender = self._sender = Connection(sock, _FROM_SENDER, max_fds=MAX_FDS)
            try:
                self._serve_sender(sender, sock)
            finally:
                self._sender = None
                sender.close()

    def _serve_sender(self, sender: Connection[SenderMessage], sock: socket.socket) -> None:
        transfers: set[str] = set()
        try:
            self._receive_buffers(sender, sock, transfers)
        except (ClairaiError, ConnectionAbortedError) as error:
            reason = error.reason if isinstance(error, ClairaiError) else str(error)
            _log.warning("a sender is disconnected: %s", reason)
            with suppress(OSError):
                sender.send(Refusal(getattr(error, "code", WeightsError.code), reason))
        except OSError as error:
            _log.debug("a sender has hung up: %s", error)
        except Exception:
            _log.exception("a sender is disconnected")
        # The sender waits for this end to close before it frees what is being read here.
        for transfer in transfers:
            if not self._tracker.release(transfer, LOAD_TIMEOUT_S):
                _log.warning("still loading %.0f s after the sender left", LOAD_TIMEOUT_S)

    def _receive_buffers(
        self, sender: Connection[SenderMessage], sock: socket.socket, transfers: set[str]
    ) -> None:
        """Until the sender leaves or misbehaves; `transfers` collects what it brought."""
        if (uid := peer_uid(sock)) != os.geteuid():
            raise WeightsError(f"you are user {uid}, only {os.geteuid()} may send weights")
        sender.send(self._greeting)
        while not self._is_closing.is_set():
            message, fds = sender.receive(IDLE_TIMEOUT_S)
            transfers.add(message.transfer)
            if isinstance(message, BufferOffer):
                reply = self._tracker.accept_offer(message, fds)
            else:
                close_all(fds)
                reply = self._tracker.read_full(message)
            if reply is not None:
                sender.send(reply)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
