"""The servers of a proxy with completion processes: one accepts, all take connections.

Runs in: the first process and each completion process, on the event loop.
"""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Final, Protocol

import uvicorn

from clairai.proxy.connections import Connections, peer_name
from clairai.proxy.http_protocol import BACKLOG, BacklogServer
from clairai.proxy.processes.first_process import CompletionProcesses
from clairai.proxy.processes.moving_protocol import (
    ConnectionMover,
    HandedConnection,
    MovingProtocol,
)

ACCEPT_PAUSE_S: Final = 1.0  # when there is no descriptor for another connection
_log: Final = logging.getLogger(__name__)

MakeProtocol = Callable[..., MovingProtocol]


class TakingServer(BacklogServer):
    """Answers on connections that it is given."""

    def __init__(self, config: uvicorn.Config, make_protocol: MakeProtocol) -> None:
        super().__init__(config)
        self._make_protocol = make_protocol
        self._taking: set[asyncio.Task[Any]] = set()

    def take(self, handed: HandedConnection, fd: int) -> None:
        """Takes over the descriptor."""
        sock = socket.socket(fileno=fd)
        sock.setblocking(False)
        protocol = self._make_protocol(
            config=self.config,
            server_state=self.server_state,
            app_state=self.lifespan.state,
            handed=handed,
        )
        self.start_connection(sock, protocol, protocol.note_unused)

    def connections(self) -> list[MovingProtocol]:
        """Those that are open; from any thread."""
        found = list(self.server_state.connections)
        return [one for one in found if isinstance(one, MovingProtocol)]

    def start_connection(
        self, sock: socket.socket, protocol: asyncio.Protocol, on_failure: Callable[[], None]
    ) -> None:
        task = asyncio.ensure_future(self._start(sock, protocol, on_failure))
        self._taking.add(task)
        task.add_done_callback(self._taking.discard)

    async def _start(
        self, sock: socket.socket, protocol: asyncio.Protocol, on_failure: Callable[[], None]
    ) -> None:
        try:
            await asyncio.get_running_loop().connect_accepted_socket(lambda: protocol, sock)
        except OSError:  # the client is gone already
            sock.close()
            on_failure()


class SharingServer(TakingServer):
    """The server of the first process: accepts connections and hands them out."""

    def __init__(
        self,
        config: uvicorn.Config,
        make_protocol: MakeProtocol,
        processes: CompletionProcesses,
        connections: Connections,
    ) -> None:
        super().__init__(config, make_protocol)
        self._processes, self._connections = processes, connections
        self._listeners: list[socket.socket] = []

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup([])
        self._processes.open(self._connections, self.take)
        self._listeners = list(sockets or [])
        for listener in self._listeners:
            listener.setblocking(False)
            listener.listen(BACKLOG)
            self._start_accepting(listener)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        for listener in self._listeners:
            asyncio.get_running_loop().remove_reader(listener)
        stopping = asyncio.ensure_future(self._processes.close())
        await super().shutdown(sockets)
        await stopping

    def _start_accepting(self, listener: socket.socket) -> None:
        if listener.fileno() >= 0 and not self.should_exit:
            asyncio.get_running_loop().add_reader(listener, self._accept, listener)

    def _accept(self, listener: socket.socket) -> None:
        """A few at a time, of as many as are waiting."""
        try:
            for _ in range(self._connections.most_at_once):
                self._place(*listener.accept())
        except (BlockingIOError, ConnectionAbortedError):
            return
        except OSError as error:
            _log.error("no connection can be accepted now: %s", error.strerror)
            loop = asyncio.get_running_loop()
            loop.remove_reader(listener)
            loop.call_later(ACCEPT_PAUSE_S, self._start_accepting, listener)

    def _place(self, sock: socket.socket, address: Any) -> None:
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        peer = peer_name(address[0])
        if self._connections.has_room(peer):
            self._processes.take_new(peer, sock.detach())
            return
        # It may ask for health alone, or is refused: here, as the count of such is here.
        sock.setblocking(False)
        protocol: asyncio.Protocol = self.config.http_protocol_class(  # type: ignore[call-arg]
            config=self.config, server_state=self.server_state, app_state=self.lifespan.state
        )
        self.start_connection(sock, protocol, lambda: None)


class FirstProcess(ConnectionMover, Protocol):
    """The first process, as a completion process sees it."""

    def open(self, server: CompletionServer) -> None:
        """Take what it sends."""

    def beat(self, counter: int) -> None:
        """Called ten times a second, with the number of the call."""


class CompletionServer(TakingServer):
    """The server of a completion process."""

    def __init__(
        self, config: uvicorn.Config, make_protocol: MakeProtocol, first: FirstProcess
    ) -> None:
        super().__init__(config, make_protocol)
        self._first = first

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self._first.open(self)

    async def on_tick(self, counter: int) -> bool:
        self._first.beat(counter)
        return await super().on_tick(counter)

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """None: the first process says when to end."""
        yield
