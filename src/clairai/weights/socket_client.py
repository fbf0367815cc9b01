"""The sender's end of the engine's socket for weights.

Runs in: the trainer, or the API server for weights that come over HTTP.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Final, Protocol, Self

from clairai.errors import EngineGoneError, WeightsError
from clairai.local.private_socket import Connection, close_all, connect
from clairai.weights.socket_server import (
    FROM_ENGINE,
    LOAD_TIMEOUT_S,
    WIRE_VERSION,
    EngineMessage,
    rank_socket_path,
)
from clairai.wire.ring_messages import Refusal
from clairai.wire.weights_messages import (
    BufferFilled,
    BufferOffer,
    BufferReceived,
    WeightsGreeting,
    WeightsRank,
)

GREETING_TIMEOUT_S: Final = 10.0
READ_TIMEOUT_S: Final = 60.0
READ_BYTES_PER_S: Final = 100 << 20  # slower than any machine that serves a model
_log: Final = logging.getLogger(__name__)


class BufferTaker(Protocol):
    """Takes the buffers of a transfer: one rank of an engine, or several at once."""

    @property
    def is_same_process(self) -> bool: ...

    def offer(self, offer: BufferOffer, fds: tuple[int, ...]) -> None: ...

    def close(self) -> None: ...


class BufferClient:
    """A connection to one rank of an engine; every wait has a deadline."""

    def __init__(self, folder: Path, epoch: str, rank: int = 0) -> None:
        self._path = rank_socket_path(folder, int(epoch, 16), rank)
        self._connection = _connect(self._path)
        try:
            _check_greeting(self._receive(GREETING_TIMEOUT_S), epoch)
        except BaseException:
            self._connection.close()
            raise

    @property
    def is_same_process(self) -> bool:
        """True if the engine is in this process."""
        return self._connection.is_same_process

    def offer(self, offer: BufferOffer, fds: tuple[int, ...]) -> None:
        """Hand over a full buffer; returns once the engine has read it."""
        self.begin_offer(offer, fds)
        self.await_read(offer.index, offer.nbytes)

    def begin_offer(self, offer: BufferOffer, fds: tuple[int, ...]) -> None:
        """Hand over a full buffer; `await_read` says when the engine has read it."""
        try:
            self._connection.send(offer, fds)
        except OSError as error:
            raise self._gone() from error

    def offer_early(self, offer: BufferOffer) -> None:
        """Hand over a buffer that is still being filled; `finish` raises if this failed."""
        with suppress(OSError):
            self._connection.send(offer)

    def finish(self, full: BufferFilled, nbytes: int) -> None:
        """Say that an early buffer is full; returns once the engine has read it."""
        with suppress(OSError):  # the engine has refused: the reason is its last message
            self._connection.send(full)
        self.await_read(full.index, nbytes)

    def await_read(self, index: int, nbytes: int) -> None:
        answer = self._receive(READ_TIMEOUT_S + nbytes / READ_BYTES_PER_S)
        if not isinstance(answer, BufferReceived) or answer.index != index:
            raise WeightsError(f"the engine answered {type(answer).__name__} to buffer {index}")

    def close(self) -> None:
        """Hang up; on return the engine reads none of the buffers any more, or is dead."""
        try:
            self._connection.hang_up(LOAD_TIMEOUT_S)
        except OSError as error:
            _log.debug("the engine has not released its buffers: %s", error)
        finally:
            self._connection.close()

    def _receive(self, timeout_s: float) -> WeightsGreeting | BufferReceived:
        try:
            answer, fds = self._connection.receive(timeout_s)
        except TimeoutError:
            raise WeightsError(
                f"the engine did not answer within {timeout_s:.0f} s; another sender may be at "
                f"work, try again"
            ) from None
        except ConnectionAbortedError as error:
            raise WeightsError(str(error)) from error
        except OSError as error:
            raise self._gone() from error
        close_all(fds)
        if isinstance(answer, Refusal):
            raise WeightsError(f"the engine refused: {answer.reason}")
        return answer

    def _gone(self) -> EngineGoneError:
        return EngineGoneError(f"engine at {self._path} has hung up; send again to the next one")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class RankClients:
    """Connections to all ranks of an engine: they read a buffer at the same time."""

    def __init__(self, clients: Sequence[BufferClient]) -> None:
        self.clients = tuple(clients)

    @property
    def is_same_process(self) -> bool:
        return any(client.is_same_process for client in self.clients)

    def offer(self, offer: BufferOffer, fds: tuple[int, ...]) -> None:
        for client in self.clients:
            client.begin_offer(offer, fds)
        for client in self.clients:
            client.await_read(offer.index, offer.nbytes)

    def close(self) -> None:
        with ExitStack() as closing:
            for client in self.clients:
                closing.callback(client.close)


def connect_ranks(folder: Path, ranks: Sequence[WeightsRank]) -> RankClients:
    """Connect to ranks of an engine; EngineGoneError if one of them does not answer.

    In their order: two senders that hold a rank each would wait for each other.
    """
    with ExitStack() as opened:
        clients = [opened.enter_context(BufferClient(folder, one.epoch, one.rank)) for one in ranks]
        opened.pop_all()
    return RankClients(clients)


def has_socket(folder: Path, epoch: str) -> bool:
    """True if the engine of this epoch takes weights here; a starting one removes dead sockets."""
    return rank_socket_path(folder, int(epoch, 16), 0).is_socket()


def _connect(path: Path) -> Connection[EngineMessage]:
    try:
        sock = connect(path, timeout_s=GREETING_TIMEOUT_S, error=WeightsError)
    except OSError as error:
        raise EngineGoneError(
            f"nobody takes weights at {path} ({error}): send from the engine's own machine, as its "
            f"own user, with the same CLAIRAI_RUNTIME_DIR"
        ) from error
    return Connection(sock, FROM_ENGINE, max_fds=0)


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
