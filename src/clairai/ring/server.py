"""The engine's socket for readers: it hands out the ring's memory and answers questions for banks.

Runs in: the worker, on one daemon thread.
"""

from __future__ import annotations

import logging
import os
import selectors
import socket
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final, Protocol, Self

from clairai.errors import HandshakeError
from clairai.local.private_socket import (
    FrameBuffer,
    MessageFormat,
    call_in_forked_child,
    encode_frame,
    listen,
    peer_uid,
    remove_dead_sockets,
    socket_path,
)
from clairai.wire.ring_messages import AskBank, Bank, Refusal, RingMessage, Welcome

GetBank = Callable[[int], Bank | None]

MAX_REQUEST_BYTES: Final = 4096  # the longest message of a reader
MAX_READERS: Final = 64
CLOSE_TIMEOUT_S: Final = 5.0
ACCEPT_PAUSE_S: Final = 0.1
_log: Final = logging.getLogger(__name__)
_ACCEPTED: Final = MessageFormat[RingMessage](
    RingMessage, max_bytes=MAX_REQUEST_BYTES, error=HandshakeError
)


class _ShareableMemory(Protocol):
    """Memory that can be handed to readers."""

    @property
    def fds(self) -> Sequence[int]:
        """Descriptors of the memory; none if the first message alone describes it."""


class RingServer:
    """Serves every reader of this user; a reader that misbehaves is disconnected alone."""

    def __init__(
        self, folder: Path, memory: _ShareableMemory, welcome: Welcome, get_bank: GetBank
    ) -> None:
        self.path = socket_path(folder, welcome.epoch)
        self._memory = memory
        self._welcome = welcome
        self._get_bank = get_bank
        self._sessions: set[_Session] = set()
        self._pid = os.getpid()
        self._is_closing = threading.Event()
        remove_dead_sockets(folder)
        self._listener = listen(self.path)
        self._wake_fd = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._listener, selectors.EVENT_READ)
        self._selector.register(self._wake_fd, selectors.EVENT_READ)
        self._accept_lock = threading.Lock()  # held from accept until a session has the socket
        call_in_forked_child(self._release_in_child, self._accept_lock)
        self._thread = threading.Thread(target=self._serve, name="clairai-ring", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Remove the socket and disconnect every reader; does nothing in a forked child."""
        if self._is_closing.is_set() or os.getpid() != self._pid:
            return
        self._is_closing.set()
        self.path.unlink(missing_ok=True)
        os.eventfd_write(self._wake_fd, 1)
        self._thread.join(CLOSE_TIMEOUT_S)
        if self._thread.is_alive():
            _log.warning("readers are still being served after %s s", CLOSE_TIMEOUT_S)
        else:
            self._release()

    def _release(self) -> None:
        """Close this process's descriptors, and nothing else."""
        for session in self._sessions:
            session.sock.close()
        self._sessions.clear()
        self._listener.close()
        self._selector.close()
        os.close(self._wake_fd)

    def _release_in_child(self) -> None:
        if not self._is_closing.is_set():
            self._release()

    def _serve(self) -> None:
        while not self._is_closing.is_set():
            for key, _ in self._selector.select():
                if key.fileobj is self._listener:
                    self._accept()
                elif isinstance(key.data, _Session):
                    self._serve_reader(key.data)

    def _accept(self) -> None:
        with self._accept_lock:
            try:
                sock, _ = self._listener.accept()
            except OSError as error:
                failure = error
            else:
                self._try_to_admit(sock)
                return
        # Out of descriptors: the reader stays in the queue; try again, but not at once.
        _log.warning("no reader can attach for now: %s", failure)
        self._is_closing.wait(ACCEPT_PAUSE_S)

    def _try_to_admit(self, sock: socket.socket) -> None:
        try:
            self._admit(sock)
        except Exception as error:
            _log.log(_log_level(error), "a reader could not attach: %s", error)
            sock.close()

    def _admit(self, sock: socket.socket) -> None:
        sock.setblocking(False)
        session = _Session(sock, self._get_bank)
        if (uid := peer_uid(sock)) != os.geteuid():
            refusal = Refusal("foreign-user", f"you are user {uid}, only {os.geteuid()} may read")
        elif len(self._sessions) >= MAX_READERS:
            refusal = Refusal("full", f"{MAX_READERS} readers are attached; detach one")
        else:
            session.greet(self._welcome, self._memory.fds)
            self._selector.register(sock, session.events, session)
            self._sessions.add(session)
            return
        session.send(refusal)
        raise HandshakeError(refusal.reason)

    def _serve_reader(self, session: _Session) -> None:
        try:
            if session.serve():
                self._selector.modify(session.sock, session.events, session)
                return
        except Exception as error:
            _log.log(_log_level(error), "a reader is disconnected: %s", error)
        self._selector.unregister(session.sock)
        self._sessions.discard(session)
        session.sock.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class _Session:
    """One attached reader; nothing is read from it while an answer waits to be sent."""

    def __init__(self, sock: socket.socket, get_bank: GetBank) -> None:
        self.sock = sock
        self._get_bank = get_bank
        self._received = FrameBuffer(_ACCEPTED)
        self._unsent = bytearray()

    @property
    def events(self) -> int:
        """The selector events to wait for."""
        return selectors.EVENT_WRITE if self._unsent else selectors.EVENT_READ

    def greet(self, welcome: Welcome, fds: Sequence[int]) -> None:
        """Send the first message together with the ring's descriptors."""
        frame = encode_frame(welcome)
        num_sent = socket.send_fds(self.sock, [frame], fds) if fds else self.sock.send(frame)
        self._unsent += frame[num_sent:]

    def serve(self) -> bool:
        """Read or write as far as the socket allows; False once the reader has hung up."""
        if self._unsent:
            self._flush()
        else:
            raw = self.sock.recv(MAX_REQUEST_BYTES)
            if not raw:
                return False
            self._received.feed(raw)
        while not self._unsent and (message := self._received.take()) is not None:
            self._reply(message)
        return True

    def send(self, message: RingMessage) -> None:
        """Send what the socket accepts now; the rest follows when it is writable."""
        self._unsent += encode_frame(message)
        self._flush()

    def _flush(self) -> None:
        try:
            num_sent = self.sock.send(self._unsent)
        except BlockingIOError:
            return
        del self._unsent[:num_sent]

    def _reply(self, message: RingMessage) -> None:
        answer = self._answer(message)
        try:
            self.send(answer)
        except HandshakeError as error:
            self.send(Refusal("too-large", error.reason))

    def _answer(self, message: RingMessage) -> Bank | Refusal:
        if not isinstance(message, AskBank):
            raise HandshakeError(f"reader sent {type(message).__name__}, may send AskBank")
        bank = self._get_bank(message.version)
        if bank is None:
            return Refusal("unknown-bank", f"there is no bank {message.version}")
        return bank


def _log_level(error: Exception) -> int:
    # A reader may disappear at any moment; anything else is worth a warning.
    return logging.DEBUG if isinstance(error, ConnectionError) else logging.WARNING
