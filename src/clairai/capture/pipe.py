"""A socket pair that carries whole messages in order between an engine and its capture writer.

A message is its length in four bytes, then that many bytes. Only the two processes hold an end; a
message above the bound closes the pipe.
"""

from __future__ import annotations

import contextlib
import select
import socket
import threading
from typing import Final

import msgspec

from clairai.capture.pipe_messages import ENCODER

PREFIX: Final = 4
MAX_NBYTES: Final = 64 << 20
CHUNK: Final = 1 << 18
SEND_TIMEOUT_S: Final = 300.0  # an engine that is being debugged does not read


class Pipe:
    """One end. One thread receives; sending never blocks, except in `send_all`."""

    def __init__(self, end: socket.socket) -> None:
        self._socket = end
        self._unsent = bytearray()
        self._received = bytearray()
        self._lock = threading.Lock()
        end.setblocking(False)

    def add(self, message: msgspec.Struct) -> None:
        """Queue a message for the next `send`."""
        encoded = ENCODER.encode(message)
        with self._lock:
            self._unsent += len(encoded).to_bytes(PREFIX, "little")
            self._unsent += encoded

    @property
    def unsent_nbytes(self) -> int:
        return len(self._unsent)

    def send(self) -> None:
        """Send as much as the other end takes now; OSError if it is gone."""
        with self._lock:
            while self._unsent:
                try:
                    sent = self._socket.send(self._unsent)
                except BlockingIOError:
                    return
                del self._unsent[:sent]

    def send_all(self, timeout_s: float = SEND_TIMEOUT_S) -> None:
        """Send everything; TimeoutError if the other end reads nothing for so long."""
        self.send()
        if not self.unsent_nbytes:
            return
        room = select.poll()
        room.register(self._socket, select.POLLOUT)
        while self.unsent_nbytes:
            if not room.poll(1e3 * timeout_s):
                raise TimeoutError("the other end reads nothing")
            self.send()

    def receive(self) -> list[bytes] | None:
        """The messages that are there now; None if the pipe is closed."""
        try:
            read = self._socket.recv(CHUNK)
        except BlockingIOError:
            return []
        except OSError:
            return None
        if not read:
            return None
        self._received += read
        return self._split()

    def _split(self) -> list[bytes]:
        messages: list[bytes] = []
        first = 0
        while len(self._received) - first >= PREFIX:
            nbytes = int.from_bytes(self._received[first : first + PREFIX], "little")
            if nbytes > MAX_NBYTES:
                raise ValueError(f"a message of {nbytes} bytes, may have {MAX_NBYTES}")
            end = first + PREFIX + nbytes
            if end > len(self._received):
                break
            messages.append(bytes(self._received[first + PREFIX : end]))
            first = end
        del self._received[:first]
        return messages

    def shut_down(self) -> None:
        """Both ends receive None from now on."""
        with contextlib.suppress(OSError):  # the other end is gone already
            self._socket.shutdown(socket.SHUT_RDWR)

    def fileno(self) -> int:
        return self._socket.fileno()

    def close(self) -> None:
        self._socket.close()
