"""Takes an engine's epoch; gives the sender's end of its socket: buffers go, word comes back."""

from __future__ import annotations

import logging
import os
import socket
import threading
from contextlib import suppress
from pathlib import Path
from typing import Final, Self

from clairai.errors import EngineGoneError, WeightsError
from clairai.local.private_socket import encode_frame, peer_pid, peer_uid, socket_path
from clairai.weights.socket_server import (
    FROM_ENGINE,
    LOAD_TIMEOUT_S,
    MAX_FRAME_BYTES,
    SOCKET_KIND,
    WIRE_VERSION,
    receive_message,
)
from clairai.wire.ring_messages import Refusal
from clairai.wire.weights_messages import BufferFilled, BufferOffer, BufferReceived, WeightsGreeting

GREETING_TIMEOUT_S: Final = 10.0
READ_TIMEOUT_S: Final = 60.0
READ_BYTES_PER_S: Final = 100 << 20  # slower than any machine that serves a model
_log: Final = logging.getLogger(__name__)


class BufferClient:
    """A connection to one engine; every wait on it has a deadline."""

    def __init__(self, folder: Path, epoch: str) -> None:
        self._path = socket_path(folder, int(epoch, 16), SOCKET_KIND)
        self._sock = _connect(self._path)
        self._sending = threading.Lock()  # one buffer is shown while another is said to be full
        try:
            greeting = self._receive(GREETING_TIMEOUT_S)
            _check_greeting(greeting, epoch)
        except BaseException:
            self._sock.close()
            raise

    @property
    def is_here(self) -> bool:
        """Whether the engine is this very process."""
        return peer_pid(self._sock) == os.getpid()

    def offer(self, offer: BufferOffer, fds: tuple[int, ...]) -> None:
        """Hand a full buffer over; returns once the engine has read it."""
        try:
            self._send(encode_frame(offer), fds)
        except OSError as error:
            raise self._gone() from error
        self._await(offer.index, offer.nbytes)

    def show(self, offer: BufferOffer) -> None:
        """A buffer that is not full yet; if this fails, whoever says `full` is told why."""
        with suppress(OSError):
            self._send(encode_frame(offer), ())

    def full(self, full: BufferFilled, nbytes: int) -> None:
        """A buffer that was shown; returns once the engine has read it."""
        with suppress(OSError):  # it has refused: why is what it said last
            self._send(encode_frame(full), ())
        self._await(full.index, nbytes)

    def _send(self, frame: bytes, fds: tuple[int, ...]) -> None:
        with self._sending:
            num_sent = socket.send_fds(self._sock, [frame], fds) if fds else 0
            if rest := frame[num_sent:]:  # to send nothing fails too, once the engine has refused
                self._sock.sendall(rest)

    def _await(self, index: int, nbytes: int) -> None:
        held = self._receive(READ_TIMEOUT_S + nbytes / READ_BYTES_PER_S)
        if not isinstance(held, BufferReceived) or held.index != index:
            raise WeightsError(f"the engine answered {type(held).__name__} to buffer {index}")

    def close(self) -> None:
        """On return the engine reads none of the buffers any more, or has gone."""
        try:
            self._sock.shutdown(socket.SHUT_WR)
            self._sock.settimeout(LOAD_TIMEOUT_S)
            while self._sock.recv(MAX_FRAME_BYTES):  # an answer that nobody waits for any more
                pass
        except OSError as error:
            _log.debug("the engine has gone before it let go: %s", error)
        finally:
            self._sock.close()

    def _receive(self, timeout_s: float) -> WeightsGreeting | BufferReceived:
        self._sock.settimeout(timeout_s)
        try:
            answer, fds = receive_message(self._sock, FROM_ENGINE)
        except TimeoutError:
            raise WeightsError(
                f"the engine did not answer within {timeout_s:.0f} s; another sender may be at "
                f"work, try again"
            ) from None
        except OSError as error:
            raise self._gone() from error
        for fd in fds:
            os.close(fd)
        if isinstance(answer, Refusal):
            raise WeightsError(f"the engine refused: {answer.reason}")
        assert isinstance(answer, WeightsGreeting | BufferReceived)
        return answer

    def _gone(self) -> EngineGoneError:
        return EngineGoneError(f"engine at {self._path} has hung up; send again to the next one")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def has_socket(folder: Path, epoch: str) -> bool:
    """Whether the engine of this epoch takes weights here; one that comes removes dead ones'."""
    return socket_path(folder, int(epoch, 16), SOCKET_KIND).is_socket()


def _connect(path: Path) -> socket.socket:
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
    sock.settimeout(GREETING_TIMEOUT_S)
    try:
        sock.connect(os.fspath(path))
        if (uid := peer_uid(sock)) != os.geteuid():
            raise WeightsError(f"{path} belongs to user {uid}, we are {os.geteuid()}; not ours")
    except OSError as error:
        sock.close()
        raise EngineGoneError(
            f"nobody takes weights at {path} ({error}): send from the engine's own machine, as its "
            f"own user, with the same CLAIRAI_RUNTIME_DIR"
        ) from error
    except WeightsError:
        sock.close()
        raise
    return sock


def _check_greeting(greeting: WeightsGreeting | BufferReceived, epoch: str) -> None:
    if not isinstance(greeting, WeightsGreeting):
        raise WeightsError(f"the engine began with {type(greeting).__name__}; not ours")
    if greeting.wire_version != WIRE_VERSION:
        raise WeightsError(
            f"engine speaks version {greeting.wire_version}, this sender {WIRE_VERSION}; run the "
            f"same clairai in both"
        )
    if greeting.epoch != epoch:
        raise WeightsError(f"epoch {greeting.epoch} answers in place of {epoch}; ask again")
