"""A reader's connection to one engine: its ring, the banks of its records, and whether it lives.

Runs in: any reader (proxy, sidecar, the user's process, the engine core for stop rules).
"""

from __future__ import annotations

import contextlib
import time
import warnings
from pathlib import Path
from typing import Final, Self

from clairai.errors import EngineGoneError, HandshakeError
from clairai.local.private_socket import Connection, MessageFormat, close_all, connect
from clairai.ring.layout import RingShape
from clairai.ring.memory import DeviceMemory, HostMemory, RingMemory
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
_ACCEPTED: Final = MessageFormat[RingMessage](
    RingMessage, max_bytes=MAX_MESSAGE_BYTES, error=HandshakeError
)


class RingReader:
    """One engine's ring, and the socket it came from: when that closes, the engine is dead."""

    def __init__(
        self, connection: _EngineConnection, memory: RingMemory, welcome: Welcome, ring: RingCursor
    ) -> None:
        self.welcome = welcome
        self._connection = connection
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
        """Connect, check the peer and map its ring; EngineGoneError if no engine listens."""
        with contextlib.ExitStack() as undo:
            connection = _EngineConnection(Path(socket_path))
            undo.callback(connection.close)
            welcome, fds = connection.receive_welcome(timeout_s)
            memory = _map_ring(welcome, fds, is_same_process=connection.is_same_process)
            undo.enter_context(memory)
            ring = RingCursor(memory, start=start)
            _check_ring(ring, welcome)
            undo.pop_all()
        return cls(connection, memory, welcome, ring)

    def poll(self, limit: int = POLL_LIMIT) -> list[Record]:
        """See RingCursor.poll; works after the engine's death until everything is read."""
        return self._ring.poll(limit)

    def bank(self, version: int) -> Bank:
        """The columns of the records with this bank version."""
        if version not in self._banks:
            self._banks[version] = self._connection.ask_bank(version)
        return self._banks[version]

    def is_alive(self) -> bool:
        """True while the engine holds its end of the socket; never blocks."""
        return self._connection.is_open

    def wait(self, timeout_s: float) -> bool:
        """Wait for a record or the engine's death; False after `timeout_s`."""
        # Polling here is cheaper for the engine than waking this process at every step.
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
        """See RingCursor.statistics."""
        return self._ring.statistics()

    def close(self) -> None:
        """Unmap the ring and hang up."""
        self._memory.close()
        self._connection.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class _EngineConnection(Connection[RingMessage]):
    """The reader's end of the socket."""

    def __init__(self, path: Path) -> None:
        self._path = path
        try:
            # Without waiting: an engine that does not accept at once is dead or stopped.
            sock = connect(path, timeout_s=0.0, error=HandshakeError)
        except OSError as error:
            raise EngineGoneError(
                f"nobody listens at {path} ({error}); start the engine"
            ) from error
        super().__init__(sock, _ACCEPTED, max_fds=1)

    def receive_welcome(self, timeout_s: float) -> tuple[Welcome, list[int]]:
        """The first message, and the descriptors that must come with it."""
        welcome, fds = self._receive_from_engine(timeout_s)
        try:
            if not isinstance(welcome, Welcome):
                raise HandshakeError("peer did not send a Welcome; not ours")
            _check_welcome(welcome, fds)
        except BaseException:
            close_all(fds)
            raise
        return welcome, fds

    def ask_bank(self, version: int) -> Bank:
        """Ask and wait for the answer; EngineGoneError if the engine dies meanwhile."""
        deadline_s = time.monotonic() + ANSWER_TIMEOUT_S
        try:
            self.send(AskBank(version))
        except OSError as error:
            raise self._gone() from error
        while True:
            answer, fds = self._receive_from_engine(deadline_s - time.monotonic())
            close_all(fds)
            if not isinstance(answer, Bank):
                raise HandshakeError(f"asked for bank {version}, got {type(answer).__name__}")
            if answer.version == version:  # else: the late answer to a question that timed out
                return answer

    def _receive_from_engine(self, timeout_s: float) -> tuple[RingMessage, list[int]]:
        try:
            message, fds = self.receive(timeout_s)
        except TimeoutError:
            raise HandshakeError(
                f"engine at {self._path} did not answer in time; "
                "it is stopped or overloaded, try again"
            ) from None
        except OSError as error:
            raise self._gone() from error
        if isinstance(message, Refusal):
            close_all(fds)
            raise HandshakeError(f"engine refused ({message.code}): {message.reason}")
        return message, fds

    def _gone(self) -> EngineGoneError:
        return EngineGoneError(f"engine at {self._path} has hung up; attach to the next one")

    def __del__(self) -> None:
        if hasattr(self, "_sock") and not self.is_closed:
            warnings.warn(f"reader of {self._path} was dropped open", ResourceWarning, stacklevel=2)
            self.close()


def _map_ring(welcome: Welcome, fds: list[int], *, is_same_process: bool) -> RingMemory:
    if welcome.home == "host":
        return HostMemory.attach(fds[0], welcome.nbytes)
    if is_same_process and welcome.address:
        return DeviceMemory.at_address(welcome.address, welcome.nbytes, welcome.gpu)
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
