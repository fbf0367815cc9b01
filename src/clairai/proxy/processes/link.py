"""One end of the socket pair between the first process and a completion process.

Runs in: both, on the event loop. Nothing here waits: what the other end does not take yet is kept.
"""

from __future__ import annotations

import asyncio
import logging
import os
import socket
from collections import deque
from collections.abc import Callable
from typing import Final, Generic, TypeVar

import msgspec

from clairai.errors import HandshakeError
from clairai.local.private_socket import FrameBuffer, MessageFormat, close_all
from clairai.proxy.processes import messages

_LENGTH_BYTES: Final = 4
_READ_BYTES: Final = 1 << 16
_MAX_FDS: Final = 8
_log: Final = logging.getLogger(__name__)
_MessageT = TypeVar("_MessageT")


def accepted(types: object) -> MessageFormat[_MessageT]:
    return MessageFormat(types, max_bytes=messages.MAX_BYTES, error=HandshakeError)


class Link(Generic[_MessageT]):
    """Sends messages and connections, and calls `on_message` for each that comes."""

    def __init__(self, sock: socket.socket, accepts: MessageFormat[_MessageT]) -> None:
        """Takes over the socket."""
        sock.setblocking(False)
        self._sock = sock
        self._received: FrameBuffer[_MessageT] = FrameBuffer(accepts)
        self._fds: deque[int | None] = deque()  # received, in the order of their messages
        self._unsent: deque[tuple[bytes, int | None]] = deque()
        self._on_message: Callable[[_MessageT], None] | None = None
        self._on_end: Callable[[], None] | None = None

    def open(self, on_message: Callable[[_MessageT], None], on_end: Callable[[], None]) -> None:
        """`on_end` is called once, when the other end is gone, unless this end closes first."""
        self._on_message, self._on_end = on_message, on_end
        asyncio.get_running_loop().add_reader(self._sock, self._receive)

    @property
    def is_open(self) -> bool:
        return self._on_end is not None

    @property
    def has_unsent(self) -> bool:
        """True while the other end has not taken all."""
        return bool(self._unsent)

    def send(self, message: messages.Message, fd: int | None = None) -> None:
        """Takes over the descriptor. What cannot be sent because the other end is gone is lost."""
        body = msgspec.msgpack.encode(message)
        self._unsent.append((len(body).to_bytes(_LENGTH_BYTES, "little") + body, fd))
        if len(self._unsent) == 1:
            self._send_all()

    def take_fd(self) -> int | None:
        """The descriptor of the message that is being handled; None if there was no room for it."""
        if not self._fds:
            raise HandshakeError("a message came without its connection; not ours")
        return self._fds.popleft()

    def close(self) -> None:
        self._on_message = self._on_end = None
        if self._sock.fileno() >= 0:
            loop = asyncio.get_running_loop()
            loop.remove_reader(self._sock)
            loop.remove_writer(self._sock)
        self._sock.close()
        close_all(fd for fd in (*self._fds, *(fd for _, fd in self._unsent)) if fd is not None)
        self._fds.clear()
        self._unsent.clear()

    def _send_all(self) -> None:
        loop = asyncio.get_running_loop()
        try:
            while self._unsent:
                self._send_first()
        except BlockingIOError:
            loop.add_writer(self._sock, self._send_all)
            return
        except OSError:
            self._end()
            return
        loop.remove_writer(self._sock)

    def _send_first(self) -> None:
        frame, fd = self._unsent[0]
        num_sent = socket.send_fds(self._sock, [frame], [] if fd is None else [fd])
        if fd is not None:  # it went with the first byte
            os.close(fd)
        if num_sent < len(frame):
            self._unsent[0] = (frame[num_sent:], None)
        else:
            self._unsent.popleft()

    def _receive(self) -> None:
        try:
            data, fds, flags, _ = socket.recv_fds(
                self._sock, _READ_BYTES, _MAX_FDS, socket.MSG_CMSG_CLOEXEC
            )
        except BlockingIOError:
            return
        except OSError:
            data, fds, flags = b"", [], 0
        # One comes at a time. The kernel drops it if this process has no number left for it.
        self._fds += fds or ([None] if flags & socket.MSG_CTRUNC else [])
        if not data:
            self._end()
            return
        self._received.feed(data)
        try:
            while self._on_message is not None and (message := self._received.take()) is not None:
                self._on_message(message)
        except HandshakeError:
            _log.exception("a process of this proxy sent no message of ours")
            self._end()

    def _end(self) -> None:
        on_end = self._on_end
        self.close()
        if on_end is not None:
            on_end()
