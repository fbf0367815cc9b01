"""Takes one end of a socket pair; gives messages through it, in order, each as a whole.

A message is four bytes that say how long it is, and that many bytes. Nobody but the two processes
holds an end; a message that is longer than any can be ends the line.
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


class Pipe:
    """One thread listens; whoever speaks never waits, unless it asks to."""

    def __init__(self, end: socket.socket) -> None:
        self._end = end
        self._said = bytearray()
        self._heard = bytearray()
        self._lock = threading.Lock()
        end.setblocking(False)

    def say(self, message: msgspec.Struct) -> None:
        """Goes with the next post()."""
        said = ENCODER.encode(message)
        with self._lock:
            self._said += len(said).to_bytes(PREFIX, "little")
            self._said += said

    @property
    def unsent_nbytes(self) -> int:
        """What was said and has not gone."""
        return len(self._said)

    def post(self) -> None:
        """All that was said goes now, as far as the other end takes it; OSError if it is gone."""
        with self._lock:
            while self._said:
                try:
                    sent = self._end.send(self._said)
                except BlockingIOError:
                    return
                del self._said[:sent]

    def send_all(self, timeout_s: float | None = None) -> None:
        """The same, and wait until it has gone; TimeoutError if it does not."""
        self.post()
        room = select.poll()
        room.register(self._end, select.POLLOUT)
        while self.unsent_nbytes:
            if not room.poll(None if timeout_s is None else 1e3 * timeout_s):
                raise TimeoutError("the other end reads nothing")
            self.post()

    def listen(self) -> list[bytes] | None:
        """What there is to read now; None at the line's end."""
        try:
            read = self._end.recv(CHUNK)
        except BlockingIOError:
            return []
        except OSError:
            return None
        if not read:
            return None
        self._heard += read
        return self._whole()

    def _whole(self) -> list[bytes]:
        found: list[bytes] = []
        first = 0
        while len(self._heard) - first >= PREFIX:
            nbytes = int.from_bytes(self._heard[first : first + PREFIX], "little")
            if nbytes > MAX_NBYTES:
                raise ValueError(f"a message of {nbytes} bytes, may have {MAX_NBYTES}")
            end = first + PREFIX + nbytes
            if end > len(self._heard):
                break
            found.append(bytes(self._heard[first + PREFIX : end]))
            first = end
        del self._heard[:first]
        return found

    def end(self) -> None:
        """Nothing comes or goes any more; who listens at either end hears that."""
        with contextlib.suppress(OSError):  # the other end is gone already
            self._end.shutdown(socket.SHUT_RDWR)

    def fileno(self) -> int:
        return self._end.fileno()

    def close(self) -> None:
        self._end.close()
