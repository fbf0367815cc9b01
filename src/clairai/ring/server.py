"""Takes a ring's memory and its banks; gives them to every reader of our user that connects."""

from __future__ import annotations

import logging
import os
import selectors
import socket
import threading
import weakref
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final, Protocol, Self

from clairai.errors import HandshakeError
from clairai.local.private_socket import (
    MAX_REQUEST_BYTES,
    FrameBuffer,
    encode_frame,
    listen,
    peer_uid,
    remove_dead_sockets,
    socket_path,
)
from clairai.wire.ring_messages import AskBank, Bank, Refusal, RingMessage, Welcome

GetBank = Callable[[int], Bank | None]

MAX_READERS: Final = 64
CLOSE_TIMEOUT_S: Final = 5.0
ACCEPT_PAUSE_S: Final = 0.1
_log: Final = logging.getLogger(__name__)


class ShareableMemory(Protocol):
    """Memory that readers are let into."""

    @property
    def fds(self) -> Sequence[int]:
        """The descriptors it travels as; none if the first message says it all."""


class RingServer:
    """One daemon thread; whatever a reader does, only that reader is let go."""

    def __init__(
        self, folder: Path, memory: ShareableMemory, welcome: Welcome, bank_of: GetBank
    ) -> None:
        self.path = socket_path(folder, welcome.epoch)
        self._memory = memory
        self._welcome = welcome
        self._bank_of = bank_of
        self._sessions: set[_Session] = set()
        self._pid = os.getpid()
        self._is_closing = threading.Event()
        remove_dead_sockets(folder)
        self._listener = listen(self.path)
        self._wake_fd = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._listener, selectors.EVENT_READ)
        self._selector.register(self._wake_fd, selectors.EVENT_READ)
        _release_in_forked_child(self)
        self._thread = threading.Thread(target=self._serve, name="clairai-ring", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Remove the socket and let every reader go; in a forked child a no-op."""
        if self._is_closing.is_set() or os.getpid() != self._pid:
            return
        self._is_closing.set()
        self.path.unlink(missing_ok=True)
        os.eventfd_write(self._wake_fd, 1)
        self._thread.join(CLOSE_TIMEOUT_S)
        if self._thread.is_alive():
            _log.warning("readers are still being served after %s s", CLOSE_TIMEOUT_S)
        else:
            self.release()

    def release(self) -> None:
        """Close this process's descriptors and nothing else."""
        for session in self._sessions:
            session.sock.close()
        self._sessions.clear()
        self._listener.close()
        self._selector.close()
        os.close(self._wake_fd)

    def _serve(self) -> None:
        while not self._is_closing.is_set():
            for key, _ in self._selector.select():
                if key.fileobj is self._listener:
                    self._accept()
                elif isinstance(key.data, _Session):
                    self._attend(key.data)

    def _accept(self) -> None:
        try:
            sock, _ = self._listener.accept()
        except OSError as error:
            # Out of descriptors: the reader stays in the queue, so look again, but not at once.
            _log.warning("no reader can attach for now: %s", error)
            self._is_closing.wait(ACCEPT_PAUSE_S)
            return
        try:
            self._admit(sock)
        except Exception as error:
            _log.log(_log_level(error), "a reader could not attach: %s", error)
            sock.close()

    def _admit(self, sock: socket.socket) -> None:
        sock.setblocking(False)
        session = _Session(sock, self._bank_of)
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

    def _attend(self, session: _Session) -> None:
        try:
            if session.serve():
                self._selector.modify(session.sock, session.events, session)
                return
        except Exception as error:
            _log.log(_log_level(error), "a reader is let go: %s", error)
        self._selector.unregister(session.sock)
        self._sessions.discard(session)
        session.sock.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class _Session:
    """One attached reader; while it has an answer to fetch, nothing more is read from it."""

    def __init__(self, sock: socket.socket, bank_of: GetBank) -> None:
        self.sock = sock
        self._bank_of = bank_of
        self._inbox = FrameBuffer(MAX_REQUEST_BYTES)
        self._outbox = bytearray()

    @property
    def events(self) -> int:
        """What to wait for next."""
        return selectors.EVENT_WRITE if self._outbox else selectors.EVENT_READ

    def greet(self, welcome: Welcome, fds: Sequence[int]) -> None:
        """Send the first message, and the ring with it."""
        frame = encode_frame(welcome)
        num_sent = socket.send_fds(self.sock, [frame], fds) if fds else self.sock.send(frame)
        self._outbox += frame[num_sent:]

    def serve(self) -> bool:
        """Do what the socket allows; False once the reader has gone."""
        if self._outbox:
            self._flush()
        else:
            raw = self.sock.recv(MAX_REQUEST_BYTES)
            if not raw:
                return False
            self._inbox.feed(raw)
        while not self._outbox and (message := self._inbox.take()) is not None:
            self._reply(message)
        return True

    def send(self, message: RingMessage) -> None:
        """Send what the socket takes now, keep the rest for later."""
        self._outbox += encode_frame(message)
        self._flush()

    def _flush(self) -> None:
        try:
            num_sent = self.sock.send(self._outbox)
        except BlockingIOError:
            return
        del self._outbox[:num_sent]

    def _reply(self, message: RingMessage) -> None:
        answer = self._answer(message)
        try:
            self.send(answer)
        except HandshakeError as error:
            self.send(Refusal("too-large", error.reason))

    def _answer(self, message: RingMessage) -> Bank | Refusal:
        if not isinstance(message, AskBank):
            raise HandshakeError(f"reader sent {type(message).__name__}, may send AskBank")
        bank = self._bank_of(message.version)
        if bank is None:
            return Refusal("unknown-bank", f"there is no bank {message.version}")
        return bank


def _log_level(error: Exception) -> int:
    # A reader may vanish at any moment; anything else is worth a look.
    return logging.DEBUG if isinstance(error, ConnectionError) else logging.WARNING


def _release_in_forked_child(server: RingServer) -> None:
    # A forked child would keep the readers' sockets open, and they would not see the engine die.
    reference = weakref.ref(server)

    def release() -> None:
        if (inherited := reference()) is not None and not inherited._is_closing.is_set():
            inherited.release()

    os.register_at_fork(after_in_child=release)
