"""Answers the requests that a proxy on this machine sends over one shared connection.

uvicorn answers a request at a time on a connection of its own, and sends each token by a call of
its own: with many streams that call, and the waking of the proxy by each, are a third of what a
token costs this process. Here the tokens of a step leave together. Requests go through the same
application as those of uvicorn. Runs in: the API server, on the event loop, under `clairai serve`.
"""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Mapping
from http import HTTPStatus
from pathlib import Path
from typing import Any, Final, cast
from urllib.parse import unquote

import msgspec
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from clairai.errors import RingError
from clairai.local.private_socket import listen, peer_uid, remove_dead_sockets, socket_path
from clairai.wire import exchange_frames as frames

MAX_HELD_FRAMES: Final = 16  # until they are sent: what the first of them may wait for
DRAIN_S: Final = 1.0  # for exchanges that are under way when the server ends
_REQUEST: Final = msgspec.msgpack.Decoder(frames.Request)
_encode: Final = msgspec.msgpack.Encoder().encode
_ERROR: Final = b"Internal Server Error"
_log: Final = logging.getLogger(__name__)


class ServeRequests:
    """ASGI middleware: serves shared connections between the start and the end of the server.

    That is when all other middleware is in place: the first request closes that list.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        folder = os.environ.get(frames.FOLDER_VARIABLE)
        if scope["type"] != "lifespan" or not folder:
            await self._app(scope, receive, send)
            return
        server = RequestServer(scope["app"], Path(folder))

        async def starting(message: Message) -> None:
            if message["type"] == "lifespan.startup.complete":
                await server.start()
            elif message["type"] == "lifespan.shutdown.complete":
                await server.close()
            await send(message)

        await self._app(scope, receive, starting)


class RequestServer:
    """Listens in a folder of this user's, and has `app` answer what comes."""

    def __init__(self, app: ASGIApp, folder: Path) -> None:
        self._app, self._folder = app, folder
        self._server: asyncio.AbstractServer | None = None
        self._path: Path | None = None
        self._connections: set[SharedConnection] = set()

    async def start(self) -> None:
        """Without a socket the proxy sends its requests to uvicorn, as one on another machine."""
        try:
            remove_dead_sockets(self._folder, frames.SOCKET_KIND)
            self._path = socket_path(self._folder, os.getpid(), frames.SOCKET_KIND)
            listener = listen(self._path)
        except (RingError, OSError) as error:
            _log.warning("requests come one by one over HTTP: %s", error)
            return
        self._server = await asyncio.get_running_loop().create_unix_server(
            lambda: SharedConnection(self._app, self._connections), sock=listener
        )

    async def close(self) -> None:
        if self._server is None or self._path is None:
            return
        self._server.close()
        self._path.unlink(missing_ok=True)
        tasks = [task for one in self._connections for task in one.tasks]
        if tasks:
            await asyncio.wait(tasks, timeout=DRAIN_S)
        for connection in list(self._connections):
            connection.close()


class SharedConnection(asyncio.Protocol):
    """One connection of a proxy, with any number of exchanges."""

    def __init__(self, app: ASGIApp, connections: set[SharedConnection]) -> None:
        self.app = app
        self._all = connections
        self._loop = asyncio.get_running_loop()
        self._reader = frames.FrameReader()
        self._exchanges: dict[int, _Exchange] = {}
        self.tasks: set[asyncio.Task[None]] = set()
        self._held: list[bytes] = []
        self._is_flush_due = False
        self.writable = asyncio.Event()
        self.writable.set()

    def close(self) -> None:
        self._flush()
        self._transport.close()

    def write(self, frame: bytes) -> None:
        """Send a frame with others that are written in this round of the event loop.

        A round may take milliseconds, and the first of its tokens should not wait for the last.
        """
        self._held.append(frame)
        if len(self._held) >= MAX_HELD_FRAMES:
            self._flush()
        elif not self._is_flush_due:
            self._is_flush_due = True
            self._loop.call_soon(self._flush_later)

    def forget(self, number: int) -> None:
        self._exchanges.pop(number, None)

    # Called by the event loop

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        if peer_uid(transport.get_extra_info("socket")) != os.geteuid():
            self._transport.abort()
            return
        self._all.add(self)
        self._transport.write(frames.make_frame(0, frames.HELLO, _encode(frames.Hello())))

    def data_received(self, data: bytes) -> None:
        try:
            for number, kind, content in self._reader.read(data):
                self._take(number, kind, content)
        except (ValueError, msgspec.MsgspecError) as error:
            _log.error("a proxy sends what is no request: %s", error)
            self._transport.abort()

    def connection_lost(self, exc: Exception | None) -> None:
        del exc
        self._all.discard(self)
        self._held.clear()
        for exchange in list(self._exchanges.values()):
            exchange.cancel()
        self.writable.set()

    def pause_writing(self) -> None:
        self.writable.clear()

    def resume_writing(self) -> None:
        self.writable.set()

    def _take(self, number: int, kind: int, content: bytes) -> None:
        if kind == frames.REQUEST:
            self._begin(number, _REQUEST.decode(content))
            return
        exchange = self._exchanges.get(number)
        if exchange is None:  # it has ended meanwhile
            return
        if kind == frames.CANCEL:
            exchange.cancel()
        elif kind == frames.PAUSE:
            exchange.pause()
        elif kind == frames.RESUME:
            exchange.resume()
        else:
            raise frames.FrameError(f"frames of kind {kind} do not come from a proxy")

    def _begin(self, number: int, request: frames.Request) -> None:
        if number in self._exchanges:
            raise frames.FrameError(f"exchange {number} has not ended")
        exchange = self._exchanges[number] = _Exchange(self, number, request.body)
        task = self._loop.create_task(exchange.run(_make_scope(request)))
        self.tasks.add(task)
        task.add_done_callback(self.tasks.discard)

    def _flush_later(self) -> None:
        self._is_flush_due = False
        self._flush()

    def _flush(self) -> None:
        if self._held and not self._transport.is_closing():
            self._transport.write(b"".join(self._held))
        self._held.clear()


class _Exchange:
    """One request, and ASGI's `receive` and `send` for it, as uvicorn's are."""

    def __init__(self, connection: SharedConnection, number: int, body: bytes) -> None:
        self._connection, self._number = connection, number
        self._body: bytes | None = body  # until the application has it
        self._over = asyncio.Event()  # the client has gone, or has the whole response
        self._is_cancelled = False
        self._has_begun = self._has_ended = False
        self._readable: asyncio.Event | None = None  # while the client reads too slowly

    async def run(self, scope: Scope) -> None:
        try:
            await self._connection.app(scope, self._receive, self._send)
        except Exception:
            _log.exception("Exception in ASGI application")
        finally:
            if not self._has_ended and not self._is_cancelled:
                self._break_off()
            self._connection.forget(self._number)

    def cancel(self) -> None:
        self._is_cancelled = True
        self._over.set()
        self.resume()

    def pause(self) -> None:
        self._readable = self._readable or asyncio.Event()

    def resume(self) -> None:
        if self._readable is not None:
            self._readable.set()
            self._readable = None

    async def _receive(self) -> Message:
        body, self._body = self._body, None
        if body is not None:
            return {"type": "http.request", "body": body, "more_body": False}
        await self._over.wait()
        return {"type": "http.disconnect"}

    async def _send(self, message: Message) -> None:
        await self._wait_for_room()
        if self._is_cancelled or self._has_ended:
            return
        if message["type"] == "http.response.start":
            head = frames.ResponseHead(message["status"], tuple(message.get("headers", ())))
            self._has_begun = True
            self._write(frames.HEAD, _encode(head))
        elif message["type"] == "http.response.body":
            self._write_body(bytes(message.get("body", b"")))
            if not message.get("more_body", False):
                self._end(frames.END)

    async def _wait_for_room(self) -> None:
        while self._readable is not None:
            await self._readable.wait()
        if not self._connection.writable.is_set():
            await self._connection.writable.wait()

    def _write_body(self, body: bytes) -> None:
        for at in range(0, len(body), frames.MAX_CONTENT_BYTES):
            self._write(frames.BODY, body[at : at + frames.MAX_CONTENT_BYTES])

    def _break_off(self) -> None:
        """The application has failed: say so, if there is still time for that."""
        if self._has_begun:
            self._end(frames.BROKEN)
            return
        plain = ((b"content-type", b"text/plain; charset=utf-8"),)
        head = frames.ResponseHead(HTTPStatus.INTERNAL_SERVER_ERROR, plain)
        self._write(frames.HEAD, _encode(head))
        self._write(frames.BODY, _ERROR)
        self._end(frames.END)

    def _end(self, kind: int) -> None:
        self._write(kind, b"")
        self._has_ended = True
        self._over.set()

    def _write(self, kind: int, content: bytes) -> None:
        self._connection.write(frames.make_frame(self._number, kind, content))


def _make_scope(request: frames.Request) -> Scope:
    """As uvicorn makes it for a request over a Unix socket."""
    path, _, query = request.target.partition("?")
    fixed: Mapping[str, Any] = {
        "type": "http",
        "asgi": {"version": "3.0", "spec_version": "2.3"},
        "http_version": "1.1",
        "server": None,
        "client": None,
        "scheme": "http",
        "root_path": "",
    }
    headers = [(name.lower().encode("latin-1"), v.encode("latin-1")) for name, v in request.headers]
    return {
        **fixed,
        "method": request.method,
        "path": unquote(path),
        "raw_path": path.encode("ascii"),
        "query_string": query.encode("ascii"),
        "headers": headers,
        "state": {},
    }
