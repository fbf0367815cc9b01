"""A small HTTP client for requests whose answers are streams of tokens.

aiohttp takes as long for a token as everything else that the proxy does to it, and a third of the
time of a request. This client does less: one request at a time on a connection, bodies of bytes, no
redirects, cookies or encodings. The parser is llhttp's, as in aiohttp. Runs in: the proxy, on the
event loop.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from http import HTTPStatus
from typing import Final, Protocol, cast
from urllib.parse import urlsplit

import aiohttp
import httptools
from multidict import CIMultiDict

from clairai.proxy.send_at_once import send_at_once

MAX_HEAD_BYTES: Final = 64 << 10
MAX_BUFFERED: Final = 1 << 16  # bytes; more are left in the socket until these are read
_NO_BODY: Final = (HTTPStatus.NO_CONTENT, HTTPStatus.NOT_MODIFIED)
_LINE_BREAK: Final = re.compile(r"[\r\n\0]")


class ResponseContent(Protocol):
    """The body of a response, as aiohttp's StreamReader has it."""

    async def readany(self) -> bytes:
        """The next bytes; b"" at the end, an aiohttp.ClientError if it ends early."""

    def set_exception(self, exc: BaseException, /) -> None:
        """Raise this instead of reading on."""


class UpstreamResponse(Protocol):
    """A response whose head is here, of aiohttp's or of the client below."""

    @property
    def status(self) -> int: ...
    @property
    def headers(self) -> Mapping[str, str]: ...
    @property
    def content_type(self) -> str: ...
    @property
    def content(self) -> ResponseContent: ...

    def close(self) -> None:
        """Hang up, unless the body has ended."""


@dataclass(frozen=True)
class Address:
    """Where upstream listens: a Unix socket, or a host and port."""

    host: str
    port: int = 0
    path: str | None = None

    @classmethod
    def of(cls, url: str, path: str | None) -> Address | None:
        """None for an address that needs another client: one with TLS, or below a path."""
        parts = urlsplit(url)
        if path is not None:
            return cls(parts.netloc, path=path)
        if parts.scheme != "http" or parts.path or "@" in parts.netloc:
            return None
        return cls(parts.netloc, parts.port or 80)

    async def connect(self, connection: Connection) -> None:
        loop = asyncio.get_running_loop()
        if self.path is not None:
            await loop.create_unix_connection(lambda: connection, self.path)
        else:
            host = urlsplit(f"//{self.host}").hostname
            await loop.create_connection(lambda: connection, str(host), self.port)


class BufferedResponse:
    """One response: its head, and the bytes of its body that nobody has read yet."""

    def __init__(self, connection: Connection, status: int, headers: CIMultiDict[str]) -> None:
        self.status, self.headers = status, headers
        self._connection: Connection | None = connection  # until the body has ended
        self._parts: list[bytes] = []
        self._num_buffered = 0
        self._error: BaseException | None = None
        self._reading: asyncio.Future[None] | None = None
        self._sink: Callable[[bytes], bool] | None = None
        self.on_arrival: Callable[[], None] | None = None  # called when `is_readable` may be True

    @property
    def is_readable(self) -> bool:
        """True if `readany` would not wait."""
        return bool(self._parts) or self._error is not None or self._connection is None

    def set_sink(self, sink: Callable[[bytes], bool]) -> None:
        """Offer each part to `sink` first, while a reader waits for it; True: it has taken it.

        What comes before a part has then been dealt with, and no task is woken for it.
        """
        self._sink = sink

    @property
    def content_type(self) -> str:
        return self.headers.get("content-type", "").partition(";")[0].strip().lower()

    @property
    def content(self) -> BufferedResponse:
        return self

    async def readany(self) -> bytes:
        while not self._parts:
            if self._error is not None:
                raise self._error
            if self._connection is None:
                return b""
            self._reading = asyncio.get_running_loop().create_future()
            try:
                await self._reading
            finally:
                self._reading = None
        raw = self._parts[0] if len(self._parts) == 1 else b"".join(self._parts)
        self._parts.clear()
        if self._num_buffered > MAX_BUFFERED and self._connection is not None:
            self._connection.resume_reading()
        self._num_buffered = 0
        return raw

    def set_exception(self, exc: BaseException, /) -> None:
        self._error = self._error or exc
        self._parts.clear()
        self._wake()

    def close(self) -> None:
        if self._connection is not None:
            self._connection.abort()
            self._connection = None

    # From the connection

    def feed(self, part: bytes) -> None:
        is_awaited = self._reading is not None and not self._reading.done()
        if self._sink is not None and is_awaited and not self._parts and self._sink(part):
            return
        self._parts.append(part)
        self._num_buffered += len(part)
        if self._num_buffered > MAX_BUFFERED and self._connection is not None:
            self._connection.pause_reading()
        self._wake()

    def end(self) -> None:
        self._connection = None
        self._wake()

    def fail(self, error: BaseException) -> None:
        """The rest does not come; what has come can still be read."""
        self._error = self._error or error
        self._connection = None
        self._wake()

    def _wake(self) -> None:
        if self._reading is not None and not self._reading.done():
            self._reading.set_result(None)
        if self.on_arrival is not None:
            self.on_arrival()


class Connection(asyncio.Protocol):
    """One connection to upstream, with one request at a time."""

    def __init__(self, pool: ConnectionPool) -> None:
        self._pool = pool
        self._loop = asyncio.get_running_loop()
        self._answered: asyncio.Future[BufferedResponse] | None = None
        self._response: BufferedResponse | None = None
        self._headers: CIMultiDict[str] = CIMultiDict()
        self._ends_with_connection = False
        self._num_head_bytes = 0
        self._silence_s = 0.0
        self._heard_s = 0.0
        self._is_paused = False
        self._silence_timer: asyncio.TimerHandle | None = None
        self._idle_timer: asyncio.TimerHandle | None = None

    async def ask(self, request: bytes, silence_s: float) -> BufferedResponse:
        """Send a request and wait for the head of its response."""
        self._stop_timer()
        self._parser = httptools.HttpResponseParser(self)
        self._headers, self._num_head_bytes = CIMultiDict(), 0
        self._silence_s, self._heard_s = silence_s, self._loop.time()
        self._silence_timer = self._loop.call_later(silence_s, self._check_silence)
        answered: asyncio.Future[BufferedResponse] = self._loop.create_future()
        self._answered = answered
        self._transport.write(request)
        try:
            return await answered
        except BaseException:
            self.abort()
            raise

    def keep(self, seconds: float) -> None:
        """Close it unless it is used again by then."""
        self._idle_timer = self._loop.call_later(seconds, self.abort)

    @property
    def is_open(self) -> bool:
        return not self._transport.is_closing()

    def abort(self) -> None:
        self._stop_timer()
        self._transport.abort()

    def pause_reading(self) -> None:
        if not self._is_paused:
            self._is_paused = True
            self._transport.pause_reading()

    def resume_reading(self) -> None:
        if self._is_paused:
            self._is_paused = False
            self._heard_s = self._loop.time()
            self._transport.resume_reading()

    # Called by the event loop

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        send_at_once(self._transport)

    def data_received(self, data: bytes) -> None:
        if self._answered is None:  # nobody has asked
            self.abort()
            return
        self._heard_s = self._loop.time()
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError as error:
            self._fail(aiohttp.ClientPayloadError(f"no HTTP: {error}"))
        if self._response is None and self._answered is not None:
            self._num_head_bytes += len(data)
            if self._num_head_bytes > MAX_HEAD_BYTES:
                self._fail(aiohttp.ClientPayloadError("the head is too long"))

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_timer()
        self._pool.forget(self)
        if self._response is not None and self._ends_with_connection and exc is None:
            self._response.end()
        elif self._answered is not None:
            self._fail(aiohttp.ServerDisconnectedError() if exc is None else exc)

    # Called by the parser

    def on_message_begin(self) -> None:
        if self._answered is None:  # a second response to one request: no longer in step
            self.abort()

    def on_header(self, name: bytes, value: bytes) -> None:
        self._headers.add(name.decode("latin-1"), value.decode("latin-1"))

    def on_headers_complete(self) -> None:
        status, headers, answered = self._parser.get_status_code(), self._headers, self._answered
        if status >= HTTPStatus.OK and answered is not None and not answered.done():
            framed = "content-length" in headers or "transfer-encoding" in headers
            self._ends_with_connection = not framed and status not in _NO_BODY
            self._response = BufferedResponse(self, status, headers)
            answered.set_result(self._response)

    def on_body(self, body: bytes) -> None:
        if self._response is not None:
            self._response.feed(body)

    def on_message_complete(self) -> None:
        response, self._response = self._response, None
        if response is None or self._ends_with_connection:  # 100 Continue; an end without a length
            self._headers, self._response = CIMultiDict(), response
            return
        self._answered = None
        self._stop_timer()
        self.resume_reading()
        response.end()
        if self._parser.should_keep_alive():
            self._pool.give_back(self)
        else:
            self._transport.close()

    def _fail(self, error: BaseException) -> None:
        answered, response = self._answered, self._response
        self._answered = self._response = None
        if response is not None:
            response.fail(error)
        elif answered is not None and not answered.done():
            answered.set_exception(error)
        self.abort()

    def _check_silence(self) -> None:
        left_s = self._heard_s + self._silence_s - self._loop.time()
        if self._is_paused:  # it is we who do not read
            left_s = self._silence_s
        if left_s > 0:
            self._silence_timer = self._loop.call_later(left_s, self._check_silence)
        else:
            self._fail(aiohttp.SocketTimeoutError("upstream is silent"))

    def _stop_timer(self) -> None:
        for timer in (self._silence_timer, self._idle_timer):
            if timer is not None:
                timer.cancel()
        self._silence_timer = self._idle_timer = None


class ConnectionPool:
    """Connections to upstream, kept for a moment after use."""

    def __init__(self, address: Address, *, connect_s: float, keep_s: float) -> None:
        self._address = address
        self._connect_s, self._keep_s = connect_s, keep_s
        self._idle: list[Connection] = []
        self._open: set[Connection] = set()
        self._is_closed = False

    async def ask(
        self,
        method: str,
        path: str,
        headers: Iterable[tuple[str, str]],
        body: bytes,
        *,
        silence_s: float,
    ) -> BufferedResponse:
        """The response once its head is here; OSError or aiohttp.ClientError if none comes."""
        request = self._make_head(method, path, headers, len(body)) + body
        while self._idle:
            connection = self._idle.pop()  # the newest: others may end
            if connection.is_open:
                return await connection.ask(request, silence_s)
        connection = Connection(self)
        async with asyncio.timeout(self._connect_s):
            await self._address.connect(connection)
        self._open.add(connection)
        return await connection.ask(request, silence_s)

    def give_back(self, connection: Connection) -> None:
        if self._is_closed:
            connection.abort()
            return
        connection.keep(self._keep_s)
        self._idle.append(connection)

    def forget(self, connection: Connection) -> None:
        self._open.discard(connection)
        if connection in self._idle:
            self._idle.remove(connection)

    def close(self) -> None:
        self._is_closed = True
        for connection in list(self._open):
            connection.abort()

    def _make_head(
        self, method: str, path: str, headers: Iterable[tuple[str, str]], length: int
    ) -> bytes:
        sent = [("Host", self._address.host), *headers, ("Content-Length", str(length))]
        lines = [f"{method} {path} HTTP/1.1", *(f"{name}: {value}" for name, value in sent)]
        if any(map(_LINE_BREAK.search, lines)):
            raise ValueError("a header holds a line break")  # the guard refuses such requests
        return "\r\n".join((*lines, "", "")).encode("latin-1")
