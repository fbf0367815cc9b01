"""The HTTP connections of the proxy: uvicorn's, with bounds on time, number and form.

A connection is allowed or refused, sends a whole head in time, in the strict form of
request_head.py, and is closed when it is idle, stalled or no longer in step. Runs in: the proxy, on
the event loop.
"""

from __future__ import annotations

import asyncio
import logging
import os
import socket
from collections import deque
from collections.abc import Callable
from functools import partial
from http import HTTPStatus
from typing import Any, Final, cast

import h11
import msgspec
import uvicorn
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from uvicorn.config import Config
from uvicorn.protocols.http.flow_control import HIGH_WATER_LIMIT
from uvicorn.protocols.http.h11_impl import H11Protocol, RequestResponseCycle
from uvicorn.server import ServerState

from clairai.proxy.connections import Allowance, Connections, OpenConnection, peer_name
from clairai.proxy.plain_exchange import PlainExchange, make_scope
from clairai.proxy.proxy_settings import ProxySettings
from clairai.proxy.request_guard import SECURITY_HEADERS
from clairai.proxy.request_head import END, RequestHead, check_line_ends, read_head
from clairai.proxy.responses import HttpRefusal, PartWriter
from clairai.proxy.send_at_once import send_at_once

BACKLOG: Final = 2048
LINGER_S: Final = 2.0  # how long a refused client may go on sending
LINGER_BYTES: Final = 16 << 20
REQUESTS_PER_ROUND: Final = 16  # that begin in one round of the event loop
DISCARD_PAUSE_S: Final = 0.05  # after each part of what it sends, of 256 KiB at most
# Also answered to connections that are open beyond the bound.
HEALTH_PATHS: Final = (b"/health", b"/health/live", b"/health/ready")
_CLOSE: Final = (b"connection", b"close")
# uvicorn warns of every request that is not HTTP: a client could fill the log.
_LOG: Final = logging.getLogger("uvicorn.error.connection")


def quiet_connection_log() -> None:
    _LOG.setLevel(logging.ERROR)


class BacklogServer(uvicorn.Server):
    """Accepts a few connections at a time, of as many as are waiting.

    asyncio has one number for both, and would accept more connections than there are descriptors
    before it hands over the first of them.
    """

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        for listener in (one for server in self.servers for one in server.sockets):
            with socket.socket(fileno=os.dup(listener.fileno())) as again:
                again.listen(BACKLOG)


class LingeringTransport:
    """A transport that lets a client finish sending before it is closed.

    A socket that is closed with unread data resets the connection, and the client may lose the
    answer that says why.
    """

    def __init__(self, inner: asyncio.Transport, *, stall_s: float) -> None:
        self._inner = inner
        self.write = inner.write  # called for every token
        self._stall_s = stall_s
        self._num_discarded = 0
        self._abort: asyncio.TimerHandle | None = None
        self._resume: asyncio.TimerHandle | None = None
        self.is_lingering = False
        self.is_mid_request = False  # set by the protocol: the client has not sent all

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def is_closing(self) -> bool:
        return self.is_lingering or self._inner.is_closing()

    def close(self) -> None:
        if self.is_closing():
            return
        loop = asyncio.get_running_loop()
        if self.is_mid_request and self._inner.can_write_eof():
            self.is_lingering = True
            self._inner.write_eof()
            self._inner.resume_reading()
            self._abort = loop.call_later(LINGER_S, self._inner.abort)
            return
        if self._inner.get_write_buffer_size():  # closing waits for a client that takes nothing
            self._abort = loop.call_later(self._stall_s, self._inner.abort)
        self._inner.close()

    def discard(self, data: bytes) -> None:
        """Read on after a pause, so that a client that tries again at once is slowed down."""
        self._num_discarded += len(data)
        if self._num_discarded > LINGER_BYTES:
            self._inner.abort()
        elif not self._inner.is_closing():
            self._inner.pause_reading()
            loop = asyncio.get_running_loop()
            self._resume = loop.call_later(DISCARD_PAUSE_S, self._inner.resume_reading)

    def forget(self) -> None:
        """The connection has ended."""
        for timer in (self._abort, self._resume):
            if timer is not None:
                timer.cancel()


class Turns:
    """Lets requests begin in the order in which they came, a few in each round of the event loop.

    When many come at once, tokens of other answers are passed on in between. With fewer a round,
    the last of many requests would wait for as many rounds, which are long under load.
    """

    def __init__(self) -> None:
        self._waiting: deque[Callable[[], None]] = deque()
        self._num_begun = 0  # in this round

    def take(self, begin: Callable[[], None]) -> None:
        """Call `begin` now, or in the first round that has room for it."""
        if self._waiting or self._num_begun == REQUESTS_PER_ROUND:
            self._waiting.append(begin)
            return
        if self._num_begun == 0:
            asyncio.get_running_loop().call_soon(self._next_round)
        self._num_begun += 1
        begin()

    def _next_round(self) -> None:
        self._num_begun = min(len(self._waiting), REQUESTS_PER_ROUND)
        loop = asyncio.get_running_loop()
        for _ in range(self._num_begun):  # each by itself: one that fails holds up no other
            loop.call_soon(self._waiting.popleft())
        if self._num_begun:
            loop.call_soon(self._next_round)


class ChunkWriter(PartWriter):
    """Frames the parts of one response as HTTP chunks, as h11 would.

    What it writes is between the head, from which on h11 is in SEND_BODY, and the end, which h11
    writes: its writer of chunks keeps no state in between (0.16 h11/_writers.py, ChunkedWriter).
    """

    def __init__(self, cycle: RequestResponseCycle) -> None:
        self._cycle = cycle
        self._flow = cycle.flow
        self._transport = cycle.transport

    async def write(self, part: bytes) -> None:
        if self._flow.write_paused and not self._cycle.disconnected:
            await self._flow.drain()
        if part and not self._cycle.disconnected:
            self.write_now(part)

    @property
    def is_ready(self) -> bool:
        return not self._flow.write_paused and not self._cycle.disconnected

    def write_now(self, part: bytes) -> None:
        self._transport.write(b"%x\r\n%b\r\n" % (len(part), part))


class BoundedProtocol(H11Protocol):
    """One connection; written against uvicorn 0.34 to 0.54, protocols/http/h11_impl.py."""

    transport: LingeringTransport  # type: ignore[assignment]

    def __init__(
        self,
        config: Config,
        server_state: ServerState,
        app_state: dict[str, Any],
        _loop: asyncio.AbstractEventLoop | None = None,
        *,
        settings: ProxySettings,
        connections: Connections,
        turns: Turns,
        on_refusal: Callable[[int], None],
    ) -> None:
        super().__init__(config, server_state, app_state, _loop)
        self.logger = _LOG
        self._app = self.app  # of plain requests
        self.app = cast(Any, partial(self._answer, self._app))
        self._limits, self._timeouts = settings.limits, settings.timeouts
        self._connections = connections
        self._on_refusal = on_refusal
        self._turns = turns
        self._head = bytearray()
        self._beginning: bytearray | None = None  # a whole head, and what follows, until its turn
        self._exchange: PlainExchange | None = None  # of a plain request, until it is answered
        self._head_timer: asyncio.TimerHandle | None = None
        self._num_unsent = 0
        self._connection: OpenConnection | None = None

    # Called by the event loop

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        send_at_once(transport)
        lingering = LingeringTransport(transport, stall_s=self._timeouts.stalled)
        super().connection_made(cast(asyncio.Transport, lingering))
        self._connection_scope: Scope = {
            "type": "http",
            "asgi": {"version": self.asgi_version, "spec_version": "2.3"},
            "http_version": "1.1",
            "server": self.server,
            "client": self.client,
            "scheme": self.scheme,
            "root_path": self.root_path,
        }
        peer = peer_name(None if self.client is None else self.client[0])
        self._connection = self._connections.open(peer, self._refuse_connection)
        if self._connection.allowance is Allowance.NONE:
            self._refuse_connection()
            return
        self._start_head_timer()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_head_timer()
        if self._connection is not None:
            self._connections.close(self._connection)
        self.transport.forget()
        if self._exchange is not None:
            self._exchange.leave()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if self.transport.is_closing():
            self.transport.discard(data)
        elif self._beginning is not None:
            self._beginning += data
            if len(self._beginning) > HIGH_WATER_LIMIT:
                self.flow.pause_reading()
        elif self._exchange is not None:
            self._receive_plain(self._exchange, data)
        elif self.conn.their_state is h11.IDLE:
            self._receive_head(data)
        else:
            self._receive_body(data)

    # The head

    def _receive_head(self, data: bytes) -> None:
        if not self._head:
            self._unset_keepalive_if_required()
            self._start_head_timer()
        searched = max(0, len(self._head) - len(END) + 1)
        self._head += data
        end = self._head.find(END, searched)
        try:
            if end < 0:
                self._check_unfinished(searched)
                return
            self._check_size(end)
            head = read_head(bytes(self._head[:end]), self._limits)
            is_health = head.target.partition(b"?")[0] in HEALTH_PATHS
            if self._allowance is Allowance.HEALTH and not is_health:
                raise _overloaded()
        except HttpRefusal as refusal:
            self._refuse(refusal)
            return
        if self._is_leaving():
            return
        self._stop_head_timer()
        if self._connection is not None:
            self._connections.note_request(self._connection)
        self._beginning, self._head = self._head, bytearray()
        self._turns.take(partial(self._begin_request, head, end + len(END)))

    def _is_leaving(self) -> bool:
        """True if the connection goes to another process, with what it has sent of a request."""
        return False

    def _begin_request(self, head: RequestHead, length: int) -> None:
        """`length` is that of the head, of which the bytes are still there."""
        assert self._beginning is not None
        received, self._beginning = bytes(self._beginning), None
        if self.transport.is_closing():
            return
        if head.is_plain:
            self._begin_plain(head, received[length:])
        else:
            self._receive_body(received)
        if self._allowance is Allowance.HEALTH:
            self._close_after_response()

    @property
    def _allowance(self) -> Allowance:
        return Allowance.NONE if self._connection is None else self._connection.allowance

    def _check_unfinished(self, searched: int) -> None:
        check_line_ends(bytes(self._head[searched:]))
        self._check_size(len(self._head))

    def _check_size(self, nbytes: int) -> None:
        if nbytes > self._limits.header_bytes:
            raise HttpRefusal(
                HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE,
                f"at most {self._limits.headers} headers with {self._limits.header_bytes} bytes "
                "in all",
            )

    def _start_head_timer(self) -> None:
        if self._head_timer is None:
            self._head_timer = self.loop.call_later(self._timeouts.head, self._refuse_late_head)

    def _stop_head_timer(self) -> None:
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None

    def _refuse_late_head(self) -> None:
        self._head_timer = None
        if not self.transport.is_closing():
            reason = f"the head of a request has to come within {self._timeouts.head:.0f} s"
            self._refuse(HttpRefusal(HTTPStatus.REQUEST_TIMEOUT, reason))

    # The rest of a request

    def _begin_plain(self, head: RequestHead, data: bytes) -> None:
        scope = make_scope(head, connection=self._connection_scope, state=self.app_state)
        exchange = self._exchange = self.cycle = PlainExchange(
            head,
            scope,
            transport=self.transport,
            flow=self.flow,
            logger=self.logger,
            default_headers=self.server_state.default_headers,
            on_response=self.on_response_complete,
        )
        task = self.loop.create_task(exchange.run_asgi(cast(Any, self._app)))
        task.add_done_callback(self.tasks.discard)
        self.tasks.add(task)
        self._receive_plain(exchange, data)

    def _receive_plain(self, exchange: PlainExchange, data: bytes) -> None:
        if exchange.feed(data):  # another request, before this one is answered: it is not read
            self._close_after_response()

    def on_response_complete(self) -> None:
        self._exchange = None
        super().on_response_complete()

    def _receive_body(self, data: bytes) -> None:
        if not self._is_request_whole():
            self.conn.receive_data(data)
            self.handle_events()
            data = self.conn.trailing_data[0] if self._is_request_whole() else b""
        if data:  # another request, before this one is answered: it is not read
            self._close_after_response()

    def _is_request_whole(self) -> bool:
        return self.conn.their_state in (h11.DONE, h11.MUST_CLOSE)

    def _close_after_response(self) -> None:
        if self.cycle is None or self.cycle.response_complete:
            self.transport.close()
        else:
            self.cycle.keep_alive = False

    async def _answer(self, app: ASGIApp, scope: Scope, receive: Receive, send: Send) -> None:
        """Tell a client that is answered before it has sent everything that this is the end."""

        async def sending(message: Message) -> None:
            is_mid_request = self.conn.their_state is h11.SEND_BODY
            self.transport.is_mid_request = is_mid_request
            if message["type"] == "http.response.start" and is_mid_request:
                message = {**message, "headers": [*message.get("headers", ()), _CLOSE]}
            await send(message)

        if scope["http_version"] == "1.1" and scope["method"] != "HEAD":  # else no chunks
            scope["extensions"] = {PartWriter.EXTENSION: ChunkWriter(self.cycle)}
        await app(scope, receive, sending)

    def _refuse_connection(self) -> None:
        self._refuse(_overloaded())

    def _refuse(self, refusal: HttpRefusal) -> None:
        """Answer without the app, and close."""
        self._stop_head_timer()
        self._on_refusal(refusal.status)
        self.transport.write(write_refusal(refusal))
        # A client that is not allowed is not waited for: it would keep its descriptor.
        self.transport.is_mid_request = self._allowance is not Allowance.NONE
        self.transport.close()

    # Idle connections

    def timeout_keep_alive_handler(self) -> None:
        """Close an idle connection; one that still takes its last answer is left alone."""
        num_unsent = self.transport.get_write_buffer_size()
        if num_unsent and num_unsent != self._num_unsent:
            self._num_unsent = num_unsent
            self.timeout_keep_alive_task = self.loop.call_later(
                self.timeout_keep_alive, self.timeout_keep_alive_handler
            )
        elif num_unsent:
            self.transport.abort()
        else:
            super().timeout_keep_alive_handler()


def write_refusal(refusal: HttpRefusal) -> bytes:
    """A whole response, after which the connection is closed."""
    body = msgspec.json.encode(refusal.body)
    headers = {
        **dict(SECURITY_HEADERS),
        **refusal.headers,
        "Content-Type": "application/json",
        "Content-Length": str(len(body)),
        "Connection": "close",
    }
    lines = [f"HTTP/1.1 {refusal.status.value} {refusal.status.phrase}"]
    lines += [f"{name}: {value}" for name, value in headers.items()]
    return "\r\n".join([*lines, "", ""]).encode() + body


def _overloaded() -> HttpRefusal:
    return HttpRefusal(
        HTTPStatus.SERVICE_UNAVAILABLE,
        "too many connections are open; use fewer, or try later",
        code="overloaded",
        headers={"Retry-After": "1"},
    )
