"""Takes the path of an engine's socket; gives its records, its banks, and word of its death."""

from __future__ import annotations

import contextlib
import os
import select
import socket
import time
import warnings
from pathlib import Path
from typing import Final, Self

from clairai.errors import EngineGoneError, HandshakeError
from clairai.local.private_socket import (
    RECEIVE_BYTES,
    FrameBuffer,
    encode_frame,
    peer_pid,
    peer_uid,
)
from clairai.ring.layout import RingShape
from clairai.ring.memory import HostMemory, RingMemory
from clairai.ring.reader import POLL_LIMIT, ReaderStatistics, Record, RingCursor, StartAt
from clairai.wire.ring_messages import (
    MAX_MESSAGE_BYTES,
    WIRE_VERSION,
    AskBank,
    Bank,
    Refusal,
    RingMessage,
    Welcome,
)

ANSWER_TIMEOUT_S: Final = 5.0
MIN_PAUSE_S: Final = 50e-6
MAX_PAUSE_S: Final = 2e-3


class RingReader:
    """One engine's ring and the socket it came by; the socket's end is the engine's death."""

    def __init__(
        self, link: _Connection, memory: RingMemory, welcome: Welcome, ring: RingCursor
    ) -> None:
        self.welcome = welcome
        self._link = link
        self._memory = memory
        self._ring = ring
        self._banks: dict[int, Bank] = {}

    @classmethod
    def attach(
        cls,
        socket_path: Path | str,
        *,
        start: StartAt = "oldest",
        timeout_s: float = ANSWER_TIMEOUT_S,
    ) -> Self:
        """Connect, check the peer, map its ring; EngineGoneError if nobody listens."""
        with contextlib.ExitStack() as undo:
            link = undo.enter_context(_Connection(Path(socket_path)))
            welcome, fds = link.receive_welcome(timeout_s)
            memory = undo.enter_context(_map_ring(welcome, fds, is_here=link.is_here()))
            ring = RingCursor(memory, start=start)
            _check_ring(ring, welcome)
            undo.pop_all()
        return cls(link, memory, welcome, ring)

    def poll(self, limit: int = POLL_LIMIT) -> list[Record]:
        """See Ring.poll; also after the engine's death, until all it published is read."""
        return self._ring.poll(limit)

    def bank(self, version: int) -> Bank:
        """The columns of the records with this bank version."""
        if version not in self._banks:
            self._banks[version] = self._link.ask_bank(version)
        return self._banks[version]

    def is_alive(self) -> bool:
        """Whether the engine still holds its end of the socket; never blocks."""
        return self._link.is_open()

    def wait(self, timeout_s: float) -> bool:
        """True once there is a record to poll or the engine has died; False after `timeout_s`."""
        deadline_s = time.monotonic() + timeout_s
        pause_s = MIN_PAUSE_S
        while self._ring.lag() == 0 and self.is_alive():
            left_s = deadline_s - time.monotonic()
            if left_s <= 0:
                return False
            time.sleep(min(pause_s, left_s))
            pause_s = min(2 * pause_s, MAX_PAUSE_S)
        return True

    def statistics(self) -> ReaderStatistics:
        """See Ring.statistics."""
        return self._ring.statistics()

    def close(self) -> None:
        """Unmap the ring and hang up."""
        self._memory.close()
        self._link.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class _Connection:
    """The reader's end of the socket; every wait on it has a deadline."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._inbox = FrameBuffer(MAX_MESSAGE_BYTES)
        self._sock = _connect(path)
        self._hangup = select.poll()
        self._hangup.register(self._sock, select.POLLRDHUP)

    def receive_welcome(self, timeout_s: float) -> tuple[Welcome, list[int]]:
        """The first message and the descriptors that must come with it."""
        deadline_s = time.monotonic() + timeout_s
        raw, fds, flags = self._receive_first(deadline_s)
        try:
            self._feed(raw)
            welcome = self._receive(deadline_s)
            if flags & socket.MSG_CTRUNC or not isinstance(welcome, Welcome):
                raise HandshakeError("peer did not send a Welcome; not ours")
            _check_welcome(welcome, fds)
        except BaseException:
            for fd in fds:
                os.close(fd)
            raise
        return welcome, fds

    def ask_bank(self, version: int) -> Bank:
        """Ask and wait for the answer; EngineGoneError if the engine dies meanwhile."""
        deadline_s = time.monotonic() + ANSWER_TIMEOUT_S
        try:
            self._sock.sendall(encode_frame(AskBank(version)))
        except OSError as error:
            raise self._gone() from error
        while True:
            answer = self._receive(deadline_s)
            if not isinstance(answer, Bank):
                raise HandshakeError(f"asked for bank {version}, got {type(answer).__name__}")
            if answer.version == version:  # else: the late answer to one that timed out
                return answer

    def is_here(self) -> bool:
        """Whether the engine is this very process."""
        return peer_pid(self._sock) == os.getpid()

    def is_open(self) -> bool:
        return not self._hangup.poll(0)

    def close(self) -> None:
        self._sock.close()

    def _receive(self, deadline_s: float) -> RingMessage:
        while (message := self._inbox.take()) is None:
            self._wait_readable(deadline_s)
            try:
                self._feed(self._sock.recv(RECEIVE_BYTES))
            except ConnectionResetError as error:
                raise self._gone() from error
        if isinstance(message, Refusal):
            raise HandshakeError(f"engine refused ({message.code}): {message.reason}")
        return message

    def _receive_first(self, deadline_s: float) -> tuple[bytes, list[int], int]:
        self._wait_readable(deadline_s)
        try:
            raw, fds, flags, _ = socket.recv_fds(
                self._sock, RECEIVE_BYTES, 1, socket.MSG_CMSG_CLOEXEC
            )
        except ConnectionResetError as error:
            raise self._gone() from error
        return raw, fds, flags

    def _feed(self, raw: bytes) -> None:
        if not raw:
            raise self._gone()
        self._inbox.feed(raw)

    def _wait_readable(self, deadline_s: float) -> None:
        poller = select.poll()
        poller.register(self._sock, select.POLLIN)
        left_ms = max(0.0, deadline_s - time.monotonic()) * 1e3
        if not poller.poll(left_ms):
            raise HandshakeError(
                f"engine at {self._path} did not answer in time; "
                "it is stopped or overloaded, try again"
            )

    def _gone(self) -> EngineGoneError:
        return EngineGoneError(f"engine at {self._path} has hung up; attach to the next one")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __del__(self) -> None:
        if (sock := getattr(self, "_sock", None)) is not None and sock.fileno() >= 0:
            warnings.warn(f"reader of {self._path} was dropped open", ResourceWarning, stacklevel=2)
            self.close()


def _connect(path: Path) -> socket.socket:
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
    sock.setblocking(False)
    try:
        sock.connect(os.fspath(path))
        if (uid := peer_uid(sock)) != os.geteuid():
            raise HandshakeError(f"{path} belongs to user {uid}, we are {os.geteuid()}; not ours")
    except OSError as error:
        sock.close()
        raise EngineGoneError(f"nobody listens at {path} ({error}); start the engine") from error
    except HandshakeError:
        sock.close()
        raise
    return sock


def _map_ring(welcome: Welcome, fds: list[int], *, is_here: bool) -> RingMemory:
    if welcome.home == "host":
        return HostMemory.attach(fds[0], welcome.nbytes)
    from clairai.local.gpu_memory import DeviceMemory

    if is_here and welcome.address:
        return DeviceMemory.borrow(welcome.address, welcome.nbytes, welcome.gpu)
    return DeviceMemory.attach(welcome.handle, welcome.nbytes, welcome.gpu)


def _check_welcome(welcome: Welcome, fds: list[int]) -> None:
    if len(fds) != (1 if welcome.home == "host" else 0):
        raise HandshakeError(
            f"peer sent {len(fds)} descriptors with a ring in {welcome.home} memory; not ours"
        )
    if welcome.wire_version != WIRE_VERSION:
        raise HandshakeError(
            f"engine speaks wire version {welcome.wire_version}, this reader {WIRE_VERSION}; "
            "run the same clairai in both"
        )


def _check_ring(ring: RingCursor, welcome: Welcome) -> None:
    header = ring.header
    promised = RingShape(welcome.slots, welcome.slot_bytes, header.shape.ahead)
    if header.epoch != welcome.epoch or header.shape != promised:
        raise HandshakeError(f"ring is {header}, engine promised {welcome}; not ours")
