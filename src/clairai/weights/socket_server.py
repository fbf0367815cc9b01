"""Takes the worker's dock; gives senders of our own user a private socket to bring buffers to."""

from __future__ import annotations

import logging
import os
import socket
import struct
import threading
import weakref
from pathlib import Path
from typing import Final, Self, TypeVar

import msgspec

from clairai.errors import ClairaiError, WeightsError
from clairai.local.private_socket import (
    encode_frame,
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
IDLE_TIMEOUT_S: Final = 600.0  # a sender that says nothing for so long is let go
LOAD_TIMEOUT_S: Final = 600.0  # to load a model takes less
CLOSE_TIMEOUT_S: Final = 5.0
_LENGTH: Final = struct.Struct("<I")
_FROM_SENDER: Final = msgspec.msgpack.Decoder(BufferOffer | BufferFilled)
_log: Final = logging.getLogger(__name__)

MessageT = TypeVar("MessageT")


class BufferServer:
    """One daemon thread, one sender at a time: the next one waits in the socket's queue."""

    def __init__(self, folder: Path, epoch: int, device: str, dock: TransferTracker) -> None:
        self.path = socket_path(folder, epoch, SOCKET_KIND)
        self._greeting = WeightsGreeting(WIRE_VERSION, f"{epoch:016x}", device, os.getpid())
        self._dock = dock
        self._pid = os.getpid()
        self._is_closing = threading.Event()
        self._session: socket.socket | None = None
        remove_dead_sockets(folder, SOCKET_KIND)
        self._listener = listen(self.path)
        self._listener.setblocking(True)
        _release_in_forked_child(self)
        self._thread = threading.Thread(target=self._serve, name="clairai-weights", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Remove the socket and let the sender go; in a forked child a no-op."""
        if self._is_closing.is_set() or os.getpid() != self._pid:
            return
        self._is_closing.set()
        self.path.unlink(missing_ok=True)
        for sock in (self._listener, self._session):
            _shut_down(sock)
        self._thread.join(CLOSE_TIMEOUT_S)
        self._listener.close()
        self._dock.drop()

    def _serve(self) -> None:
        while not self._is_closing.is_set():
            try:
                sock, _ = self._listener.accept()
            except OSError as error:
                if not self._is_closing.is_set():
                    _log.warning("no sender can come for now: %s", error)
                    self._is_closing.wait(0.1)
                continue
            with sock:
                self._session = sock
                self._attend(sock)
                self._session = None

    def _attend(self, sock: socket.socket) -> None:
        transfers: set[str] = set()
        self._listen(sock, transfers)
        # The sender waits for our end of the socket before it frees what is being read here.
        for transfer in transfers:
            if not self._dock.let_go(transfer, LOAD_TIMEOUT_S):
                _log.warning(
                    "weights are being loaded %.0f s after their sender left", LOAD_TIMEOUT_S
                )

    def _listen(self, sock: socket.socket, transfers: set[str]) -> None:
        """Until the sender goes, or says what it may not; `transfers` are those it brought to."""
        try:
            self._admit(sock)
            while not self._is_closing.is_set():
                message, fds = receive_message(sock, _FROM_SENDER)
                transfers.add(message.transfer)
                held = self._taken(message, fds)
                if held is not None:
                    sock.sendall(encode_frame(held))
        except ClairaiError as error:
            _log.warning("a sender is let go: %s", error.reason)
            _send_refusal(sock, error)
        except OSError as error:
            _log.debug("a sender has gone: %s", error)
        except Exception:
            _log.exception("a sender is let go")

    def _taken(self, message: BufferOffer | BufferFilled, fds: list[int]) -> BufferReceived | None:
        if isinstance(message, BufferOffer):
            return self._dock.land(message, fds)
        for fd in fds:
            os.close(fd)
        return self._dock.read(message)

    def _admit(self, sock: socket.socket) -> None:
        if (uid := peer_uid(sock)) != os.geteuid():
            raise WeightsError(f"you are user {uid}, only {os.geteuid()} may send weights")
        sock.settimeout(IDLE_TIMEOUT_S)
        sock.sendall(encode_frame(self._greeting))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def receive_message(
    sock: socket.socket, decoder: msgspec.msgpack.Decoder[MessageT]
) -> tuple[MessageT, list[int]]:
    """The next message and what descriptors came with it; OSError once the peer has gone."""
    head, fds, flags, _ = socket.recv_fds(sock, _LENGTH.size, MAX_FDS, socket.MSG_CMSG_CLOEXEC)
    try:
        if flags & socket.MSG_CTRUNC:
            raise WeightsError(f"more than {MAX_FDS} descriptors came at once; not ours")
        head += _receive_exactly(sock, _LENGTH.size - len(head), is_begun=bool(head))
        (nbytes,) = _LENGTH.unpack(head)
        if nbytes > MAX_FRAME_BYTES:
            raise WeightsError(f"peer sends {nbytes} bytes, may send {MAX_FRAME_BYTES}; not ours")
        return _decode(_receive_exactly(sock, nbytes, is_begun=True), decoder), fds
    except BaseException:
        for fd in fds:
            os.close(fd)
        raise


def _receive_exactly(sock: socket.socket, nbytes: int, *, is_begun: bool) -> bytes:
    raw = bytearray()
    while len(raw) < nbytes:
        part = sock.recv(nbytes - len(raw))
        if not part:
            raise _hangup_error(is_begun=is_begun)
        raw += part
    return bytes(raw)


def _hangup_error(*, is_begun: bool) -> Exception:
    if is_begun:
        return WeightsError("peer hung up in the middle of a message")
    return ConnectionResetError("peer has hung up")


def _decode(body: bytes, decoder: msgspec.msgpack.Decoder[MessageT]) -> MessageT:
    try:
        return decoder.decode(body)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise WeightsError(f"peer sent no message of ours ({str(error)[:200]})") from error


def _send_refusal(sock: socket.socket, error: ClairaiError) -> None:
    try:
        sock.sendall(encode_frame(Refusal(error.code, error.reason)))
    except OSError:
        _log.debug("the sender has gone before it could be told")


def _release_in_forked_child(link: BufferServer) -> None:
    # A forked child would keep the socket open, and senders would wait for an engine that is dead.
    reference = weakref.ref(link)

    def release() -> None:
        if (inherited := reference()) is not None:
            inherited._listener.close()

    os.register_at_fork(after_in_child=release)


def _shut_down(sock: socket.socket | None) -> None:
    try:
        if sock is not None:
            sock.shutdown(socket.SHUT_RDWR)
    except OSError:
        _log.debug("already closed")


EngineMessage = WeightsGreeting | BufferReceived | Refusal
FROM_ENGINE: Final = msgspec.msgpack.Decoder(EngineMessage)
