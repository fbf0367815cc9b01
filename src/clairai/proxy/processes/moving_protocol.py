"""A connection of the proxy that can move to another process between two requests.

It moves as a descriptor, with the bytes that were received of the next request. So whoever answers
sees the client's own address, and nothing about a client is forwarded that a client could forge.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final, Protocol

from clairai.proxy.completions.error_frames import write_error_frame
from clairai.proxy.connections import Allowance, Connections, OpenConnection
from clairai.proxy.http_protocol import BoundedProtocol, write_refusal
from clairai.proxy.responses import HttpRefusal

_UNSENT_PAUSE_S: Final = 0.01  # between two looks whether the last answer has been taken


@dataclass(frozen=True)
class HandedConnection:
    """A connection of this process; `received` and `is_placed` as in messages.TakeConnection."""

    number: int
    received: bytes = b""
    is_placed: bool = False


class ConnectionMover(Protocol):
    """Who knows where requests are answered."""

    def is_elsewhere(self, received: bytes) -> bool:
        """True if another process answers the request that begins so."""

    def move(self, number: int, received: bytes, fd: int) -> None:
        """Takes over the descriptor of connection `number`."""

    def note_closed(self, number: int) -> None: ...


class CountedConnections(Connections):
    """Stands in for connections that were counted when they were accepted."""

    def __init__(self) -> None:
        super().__init__(0)

    def open(self, peer: str, refuse: Callable[[], None]) -> OpenConnection:
        return OpenConnection(peer, Allowance.ANY, refuse)

    def close(self, connection: OpenConnection) -> None:
        connection.allowance = Allowance.NONE


class MovingProtocol(BoundedProtocol):
    """One connection, from when this process gets it until it closes or moves on."""

    def __init__(
        self, *args: Any, handed: HandedConnection, mover: ConnectionMover, **more: Any
    ) -> None:
        super().__init__(*args, connections=CountedConnections(), **more)
        self._handed, self._mover = handed, mover
        self._is_placed = handed.is_placed
        self._has_moved = False

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        if self._handed.received:
            self.data_received(self._handed.received)

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        if not self._has_moved:
            self._mover.note_closed(self._handed.number)

    @property
    def fd(self) -> int:
        return int(self.transport.get_extra_info("socket").fileno())

    def last_bytes(self, refusal: HttpRefusal) -> bytes:
        """What ends the answer of this connection; from any thread, if the event loop hangs."""
        exchange = self._exchange
        if self._beginning is not None:
            return write_refusal(refusal)
        if exchange is None or exchange.response_complete:
            return b""
        if not exchange.has_written:
            return write_refusal(refusal)
        head = exchange.response_head.lower()
        is_stream = b"content-type: text/event-stream" in head and b"chunked" in head
        if not is_stream or self.transport.get_write_buffer_size():
            return b""  # in the middle of a part
        frame = write_error_frame(
            exchange.scope["path"],
            refusal.code or "",
            refusal.message,
            is_named=b"\r\nx-clairai-run:" in head,
        )
        return b"%x\r\n%b\r\n0\r\n\r\n" % (len(frame), frame)

    def note_unused(self) -> None:
        """It never began."""
        self._mover.note_closed(self._handed.number)

    def data_received(self, data: bytes) -> None:
        if not self._has_moved:
            super().data_received(data)

    def _is_leaving(self) -> bool:
        if self._is_placed:  # this one request
            self._is_placed = False
            return False
        received = bytes(self._head)
        if not self._mover.is_elsewhere(received):
            return False
        self._stop_head_timer()
        self.transport.pause_reading()
        self._move(received, self.loop.time() + self._timeouts.stalled)
        return True

    def _move(self, received: bytes, deadline_s: float) -> None:
        """Move as soon as the client has taken the last answer."""
        if self.transport.is_closing():
            return
        if self.transport.get_write_buffer_size():
            if self.loop.time() > deadline_s:
                self.transport.abort()
            else:
                self.loop.call_later(_UNSENT_PAUSE_S, self._move, received, deadline_s)
            return
        fd = os.dup(self.transport.get_extra_info("socket").fileno())
        self._has_moved = True
        self.transport.abort()  # closes this process's descriptor alone: the client sees nothing
        self._mover.move(self._handed.number, received, fd)
