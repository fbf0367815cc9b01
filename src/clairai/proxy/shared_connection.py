"""Requests to an API server on this machine, any number at once over one connection.

The other end is `server/request_server.py`. Tokens of many answers come in one read, and without
HTTP around each. Where no API server listens for this, requests go one by one over HTTP
(upstream_connection.py). Runs in: the proxy, on the event loop.
"""

from __future__ import annotations

import asyncio
import itertools
import os
import re
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Final, cast

import aiohttp
import msgspec
from multidict import CIMultiDict

from clairai.local.private_socket import engine_sockets, peer_uid
from clairai.proxy.send_at_once import send_at_once
from clairai.proxy.upstream_connection import BufferedResponse, SilenceWatch
from clairai.wire import exchange_frames as frames

SCAN_S: Final = 1.0  # between two looks for API servers
_MAX_NUMBER: Final = 1 << 32
_HEAD: Final = msgspec.msgpack.Decoder(frames.ResponseHead)
_HELLO: Final = msgspec.msgpack.Decoder(frames.Hello)
_encode: Final = msgspec.msgpack.Encoder().encode
_LINE_BREAK: Final = re.compile(r"[\r\n\0]")


class SharedConnection(asyncio.Protocol):
    """One connection to one API server."""

    def __init__(self, on_lost: Callable[[SharedConnection], None]) -> None:
        self._on_lost = on_lost
        self._reader = frames.FrameReader()
        self._numbers = itertools.count(1)
        self._exchanges: dict[int, _Exchange] = {}
        self.greeted: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    @property
    def is_open(self) -> bool:
        return not self._transport.is_closing()

    @property
    def num_exchanges(self) -> int:
        return len(self._exchanges)

    async def ask(
        self,
        method: str,
        target: str,
        headers: Iterable[tuple[str, str]],
        body: bytes,
        *,
        silence_s: float,
    ) -> BufferedResponse:
        """The response once its head is here; OSError or aiohttp.ClientError if none comes."""
        plain = [(str(name), value) for name, value in headers]  # names may be multidict's own
        sent = (("Host", "localhost"), *plain, ("Content-Length", str(len(body))))
        for text in itertools.chain((method, target), *sent):
            if _LINE_BREAK.search(text):
                raise ValueError("a header holds a line break")  # the guard refuses such requests
        content = _encode(frames.Request(method, target, sent, body))
        number = next(self._numbers) % _MAX_NUMBER
        exchange = self._exchanges[number] = _Exchange(self, number, silence_s)
        self.send(number, frames.REQUEST, content)
        try:
            return await exchange.answered
        except BaseException:
            exchange.abort()
            raise

    def send(self, number: int, kind: int, content: bytes = b"") -> None:
        self._transport.write(frames.make_frame(number, kind, content))

    def forget(self, number: int) -> bool:
        """False if there is no such exchange."""
        return self._exchanges.pop(number, None) is not None

    def abort(self) -> None:
        self._transport.abort()

    # Called by the event loop

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        send_at_once(self._transport)
        if peer_uid(transport.get_extra_info("socket")) != os.geteuid():
            self._transport.abort()

    def data_received(self, data: bytes) -> None:
        try:
            for number, kind, content in self._reader.read(data):
                exchange = self._exchanges.get(number)
                if exchange is not None:
                    exchange.take(kind, content)
                elif kind == frames.HELLO:
                    self._greet(content)
                # Else it has been cancelled, and these were on their way.
        except (ValueError, msgspec.MsgspecError):
            self._transport.abort()

    def connection_lost(self, exc: Exception | None) -> None:
        self._on_lost(self)
        error = aiohttp.ServerDisconnectedError() if exc is None else exc
        if not self.greeted.done():
            self.greeted.set_exception(error)
        for exchange in list(self._exchanges.values()):
            exchange.fail(error)

    def _greet(self, content: bytes) -> None:
        version = _HELLO.decode(content).version
        if version != frames.VERSION:
            raise frames.FrameError(f"version {version}, must be {frames.VERSION}")
        if not self.greeted.done():
            self.greeted.set_result(None)


class _Exchange:
    """One request and its response: where the bytes of the response come from."""

    def __init__(self, connection: SharedConnection, number: int, silence_s: float) -> None:
        self._connection, self._number = connection, number
        loop = asyncio.get_running_loop()
        self.answered: asyncio.Future[BufferedResponse] = loop.create_future()
        self._response: BufferedResponse | None = None
        self._is_paused = False
        self._silence = SilenceWatch(silence_s, self._fail_silent)

    def take(self, kind: int, content: bytes) -> None:
        """A frame of this exchange has come."""
        self._silence.note_heard()
        response = self._response
        if kind == frames.BODY and response is not None:
            response.feed(content)
        elif kind == frames.HEAD and response is None:
            self._begin(_HEAD.decode(content))
        elif kind == frames.END and response is not None:
            self._leave()
            response.end()
        elif kind == frames.BROKEN:
            self.fail(aiohttp.ServerDisconnectedError())
        else:
            raise frames.FrameError(f"a frame of kind {kind} does not belong here")

    def fail(self, error: BaseException) -> None:
        """The rest does not come."""
        self._leave()
        if self._response is not None:
            self._response.fail(error)
        elif not self.answered.done():
            self.answered.set_exception(error)

    # Called by the response

    def abort(self) -> None:
        if self._leave():
            self._connection.send(self._number, frames.CANCEL)

    def pause_reading(self) -> None:
        if not self._is_paused:  # more may be on its way meanwhile
            self._is_paused = True
            self._silence.pause()
            self._connection.send(self._number, frames.PAUSE)

    def resume_reading(self) -> None:
        if self._is_paused:
            self._is_paused = False
            self._silence.resume()
            self._connection.send(self._number, frames.RESUME)

    def _begin(self, head: frames.ResponseHead) -> None:
        headers: CIMultiDict[str] = CIMultiDict()
        for name, value in head.headers:
            headers.add(name.decode("latin-1"), value.decode("latin-1"))
        if any(map(_LINE_BREAK.search, itertools.chain(*headers.items()))):
            raise frames.FrameError("a header holds a line break")
        self._response = BufferedResponse(self, head.status, headers)
        if not self.answered.done():
            self.answered.set_result(self._response)

    def _fail_silent(self) -> None:
        self._connection.send(self._number, frames.CANCEL)
        self.fail(aiohttp.SocketTimeoutError("upstream is silent"))

    def _leave(self) -> bool:
        """False if it had left already."""
        self._silence.stop()
        return self._connection.forget(self._number)


class SharedConnections:
    """The connections to all API servers of one engine, which listen in one folder."""

    def __init__(self, folder: Path, *, connect_s: float) -> None:
        self._folder, self._connect_s = folder, connect_s
        self._by_path: dict[Path, SharedConnection] = {}
        self._scan_due_s = 0.0
        self._scanning: asyncio.Task[None] | None = None

    async def find(self) -> SharedConnection | None:
        """The connection with the fewest exchanges; None if no API server listens."""
        loop = asyncio.get_running_loop()
        if loop.time() >= self._scan_due_s and self._scanning is None:
            self._scan_due_s = loop.time() + SCAN_S
            self._scanning = loop.create_task(self._scan())
        if not self._by_path and self._scanning is not None:
            await asyncio.shield(self._scanning)
        return min(self._by_path.values(), key=lambda one: one.num_exchanges, default=None)

    def close(self) -> None:
        if self._scanning is not None:
            self._scanning.cancel()
        for connection in list(self._by_path.values()):
            connection.abort()

    async def _scan(self) -> None:
        try:
            for path in engine_sockets(self._folder, frames.SOCKET_KIND):
                if path not in self._by_path:
                    await self._connect(path)
        finally:
            self._scanning = None

    async def _connect(self, path: Path) -> None:
        loop = asyncio.get_running_loop()
        try:
            async with asyncio.timeout(self._connect_s):
                _, connection = await loop.create_unix_connection(
                    lambda: SharedConnection(self._forget), str(path)
                )
                await connection.greeted
        except (OSError, TimeoutError, aiohttp.ClientError):
            return  # a dead socket, one that accepts nothing now, or another version
        if connection.is_open:  # it may have been lost since
            self._by_path[path] = connection

    def _forget(self, lost: SharedConnection) -> None:
        self._by_path = {path: one for path, one in self._by_path.items() if one is not lost}
