"""A proxy's requests over one connection: both ends as they are, in one process."""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from starlette.types import Message, Receive, Scope, Send

from clairai.proxy.shared_connection import SharedConnection, SharedConnections
from clairai.proxy.upstream_connection import MAX_BUFFERED, BufferedResponse
from clairai.server.request_server import MAX_HELD_FRAMES, RequestServer, ServeRequests
from clairai.wire import exchange_frames as frames

DEADLINE_S = 60.0
App = Callable[[Scope, Receive, Send], Awaitable[None]]


@asynccontextmanager
async def serving(app: App, folder: Path) -> AsyncIterator[SharedConnections]:
    server = RequestServer(app, folder)
    await server.start()
    connections = SharedConnections(folder, connect_s=DEADLINE_S)
    try:
        async with asyncio.timeout(DEADLINE_S):
            yield connections
    finally:
        connections.close()
        await server.close()


async def find(connections: SharedConnections) -> SharedConnection:
    connection = await connections.find()
    assert connection is not None
    return connection


async def ask(
    connections: SharedConnections, body: bytes = b"{}", silence_s: float = DEADLINE_S
) -> BufferedResponse:
    connection = await find(connections)
    return await connection.ask("POST", "/v1/x?y=1", [("X-Kept", "é")], body, silence_s=silence_s)


async def read_all(response: BufferedResponse) -> bytes:
    body = b""
    while raw := await response.readany():
        body += raw
    return body


def start(status: int = 200) -> Message:
    headers = [(b"content-type", b"text/event-stream; charset=utf-8"), (b"x-same", b"1")]
    return {"type": "http.response.start", "status": status, "headers": headers}


def part(body: bytes, *, is_last: bool = False) -> Message:
    return {"type": "http.response.body", "body": body, "more_body": not is_last}


def sockets(folder: Path) -> list[Path]:
    return sorted(folder.iterdir())


async def until(is_so: Callable[[], bool]) -> None:
    """Let the event loop go round until then."""
    while not is_so():  # noqa: ASYNC110
        await asyncio.sleep(0)


def test_the_application_sees_a_request_as_uvicorn_shows_it_and_its_answer_arrives(
    tmp_path: Path,
) -> None:
    seen: list[Any] = []

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        seen.append((scope, await receive()))
        await send(start(201))
        await send(part(b"data: 1\n\n"))
        await send(part(b"data: 2\n\n", is_last=True))

    async def main() -> None:
        async with serving(app, tmp_path) as connections:
            response = await ask(connections, b'{"a": 1}')
            assert (response.status, response.content_type) == (201, "text/event-stream")
            assert response.headers["X-Same"] == "1"
            assert await read_all(response) == b"data: 1\n\ndata: 2\n\n"

    asyncio.run(main())
    scope, message = seen[0]
    assert message == {"type": "http.request", "body": b'{"a": 1}', "more_body": False}
    assert (scope["method"], scope["path"], scope["query_string"]) == ("POST", "/v1/x", b"y=1")
    assert scope["asgi"]["spec_version"] == "2.3"  # with which Starlette waits for a disconnect
    headers = dict(scope["headers"])
    assert headers[b"x-kept"] == "é".encode("latin-1")
    assert headers[b"content-length"] == b"8"


def test_many_answers_at_once_keep_their_own_parts_in_order(tmp_path: Path) -> None:
    step = asyncio.Event()
    waiting = 0

    async def app(_: Scope, receive: Receive, send: Send) -> None:
        nonlocal waiting
        name = (await receive())["body"]
        await send(start())
        waiting += 1
        await step.wait()
        for at in range(3):
            await send(part(b"%b:%d " % (name, at)))
            await asyncio.sleep(0)
        await send(part(b"", is_last=True))

    async def main() -> list[bytes]:
        async with serving(app, tmp_path) as connections:
            count = 3 * MAX_HELD_FRAMES
            asked = [ask(connections, b"%d" % number) for number in range(count)]
            responses = await asyncio.gather(*asked)
            assert (await find(connections)).num_exchanges == waiting == count
            step.set()
            bodies = await asyncio.gather(*map(read_all, responses))
            assert (await find(connections)).num_exchanges == 0
            return bodies

    bodies = asyncio.run(main())
    assert bodies == [b"%d:0 %d:1 %d:2 " % (n, n, n) for n in range(len(bodies))]


def test_a_client_that_leaves_ends_the_work_for_it_and_nobody_elses(tmp_path: Path) -> None:
    left: list[bytes] = []

    async def app(_: Scope, receive: Receive, send: Send) -> None:
        name = (await receive())["body"]
        await send(start())
        await send(part(b"begun"))
        if name == b"leaves":
            assert await receive() == {"type": "http.disconnect"}
            await send(part(b"to nobody"))
            left.append(name)
            return
        await until(lambda: bool(left))
        await send(part(b", whole", is_last=True))

    async def main() -> bytes:
        async with serving(app, tmp_path) as connections:
            stays, leaves = await asyncio.gather(
                ask(connections, b"stays"), ask(connections, b"leaves")
            )
            assert await leaves.readany() == b"begun"
            leaves.close()
            return await read_all(stays)

    assert asyncio.run(main()) == b"begun, whole"


def test_a_reader_that_is_slow_holds_up_its_own_answer_alone(tmp_path: Path) -> None:
    sent = {b"slow": 0, b"quick": 0}

    async def app(_: Scope, receive: Receive, send: Send) -> None:
        name = (await receive())["body"]
        await send(start())
        for __ in range(40):
            await send(part(bytes(MAX_BUFFERED // 4)))
            sent[name] += 1
            await asyncio.sleep(0)
        await send(part(b"", is_last=True))

    async def main() -> None:
        async with serving(app, tmp_path) as connections:
            slow, quick = await asyncio.gather(
                ask(connections, b"slow"), ask(connections, b"quick")
            )
            assert len(await read_all(quick)) == 40 * (MAX_BUFFERED // 4)
            assert sent[b"slow"] < 40
            assert len(await read_all(slow)) == 40 * (MAX_BUFFERED // 4)

    asyncio.run(main())


def test_a_body_longer_than_a_frame_arrives_whole(tmp_path: Path) -> None:
    body = os.urandom(2 * frames.MAX_CONTENT_BYTES + 1)

    async def app(_: Scope, __: Receive, send: Send) -> None:
        await send(start())
        await send(part(body, is_last=True))

    async def main() -> bytes:
        async with serving(app, tmp_path) as connections:
            return await read_all(await ask(connections))

    assert asyncio.run(main()) == body


def test_an_application_that_fails_is_a_500_or_breaks_its_own_answer_off(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async def app(_: Scope, receive: Receive, send: Send) -> None:
        if (await receive())["body"] == b"late":
            await send(start())
            await send(part(b"begun"))
        raise RuntimeError("planted")

    async def main() -> None:
        async with serving(app, tmp_path) as connections:
            early, late = await asyncio.gather(ask(connections, b""), ask(connections, b"late"))
            assert (early.status, await read_all(early)) == (500, b"Internal Server Error")
            assert await late.readany() == b"begun"
            with pytest.raises(aiohttp.ServerDisconnectedError):
                await late.readany()
            assert (await find(connections)).num_exchanges == 0

    asyncio.run(main())
    assert caplog.text.count("RuntimeError: planted") == 2


def test_every_answer_breaks_off_when_the_server_is_gone_and_the_next_finds_none(
    tmp_path: Path,
) -> None:
    async def app(_: Scope, receive: Receive, send: Send) -> None:
        if (await receive())["body"] == b"begun":
            await send(start())
        await receive()

    async def main() -> None:
        async with serving(app, tmp_path) as connections:
            begun = await ask(connections, b"begun")
            connection = await find(connections)
            waiting = asyncio.ensure_future(ask(connections))
            await until(lambda: connection.num_exchanges == 2)
            connection.abort()  # as a server that is killed
            for answer in (begun.readany(), waiting):
                with pytest.raises(aiohttp.ServerDisconnectedError):
                    await answer
            assert connection.num_exchanges == 0
            assert await connections.find() is None

    asyncio.run(main())


def test_silence_ends_a_request_and_tells_the_server(tmp_path: Path) -> None:
    told = asyncio.Event()

    async def app(_: Scope, receive: Receive, __: Send) -> None:
        await receive()
        assert await receive() == {"type": "http.disconnect"}
        told.set()

    async def main() -> None:
        async with serving(app, tmp_path) as connections:
            with pytest.raises(aiohttp.SocketTimeoutError):
                await ask(connections, silence_s=0.01)
            await told.wait()

    asyncio.run(main())


def test_requests_go_to_the_server_with_the_fewest(tmp_path: Path) -> None:
    async def app(_: Scope, receive: Receive, send: Send) -> None:
        await receive()
        await send(start())
        await receive()

    async def main() -> None:
        listeners = [RequestServer(app, tmp_path) for _ in range(2)]
        await listeners[0].start()
        (first,) = sockets(tmp_path)
        first.rename(tmp_path / "requests-1.sock")  # both are of this process
        await listeners[1].start()
        connections = SharedConnections(tmp_path, connect_s=DEADLINE_S)
        async with asyncio.timeout(DEADLINE_S):
            await asyncio.gather(*(ask(connections) for _ in range(2)))
            counts = [(await find(connections)).num_exchanges]
            await asyncio.gather(*(ask(connections) for _ in range(4)))
            counts.append((await find(connections)).num_exchanges)
        assert counts == [1, 3]
        connections.close()
        for listener in listeners:
            await listener.close()

    asyncio.run(main())


@pytest.mark.parametrize(
    "sent",
    [
        b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n",
        frames.make_frame(1, frames.REQUEST, b"\xff"),
        frames.make_frame(1, frames.BODY, b"x"),
        frames.make_frame(1, frames.REQUEST, b"\x94\xa4POST\xa1/\x90\xc4\x00"),
    ],
    ids=["HTTP", "no request", "an answer", "a number that is in use"],
)
def test_a_proxy_that_speaks_otherwise_is_cut_off(tmp_path: Path, sent: bytes) -> None:
    async def app(_: Scope, receive: Receive, __: Send) -> None:
        await receive()
        await receive()

    async def main() -> bytes:
        async with serving(app, tmp_path) as connections:
            await find(connections)
            (path,) = sockets(tmp_path)
            reader, writer = await asyncio.open_unix_connection(path)
            hello = await reader.readexactly(len(frames.make_frame(0, frames.HELLO, b"\x91\x01")))
            writer.write(frames.make_frame(1, frames.REQUEST, REQUEST) + sent)
            rest = await reader.read()
            writer.close()
            assert (await find(connections)).num_exchanges == 0  # others go on
            return hello + rest

    assert asyncio.run(main()) == frames.make_frame(0, frames.HELLO, b"\x91\x01")


REQUEST = b"\x94\xa4POST\xa1/\x90\xc4\x00"  # msgpack of a Request


@pytest.mark.parametrize(("version", "is_used"), [(frames.VERSION, True), (2, False)])
def test_a_server_of_another_version_is_not_used(
    tmp_path: Path, version: int, *, is_used: bool
) -> None:
    left = asyncio.Event()

    async def greet(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(frames.make_frame(0, frames.HELLO, bytes((0x91, version))))
        with suppress(ConnectionError):
            await reader.read()
        writer.close()
        left.set()

    async def main() -> None:
        server = await asyncio.start_unix_server(greet, tmp_path / "requests-1.sock")
        connections = SharedConnections(tmp_path, connect_s=DEADLINE_S)
        async with asyncio.timeout(DEADLINE_S):
            found = await connections.find()
            assert (found is not None) is is_used
            connections.close()
            await left.wait()
        server.close()

    asyncio.run(main())


def test_a_socket_that_nobody_listens_at_is_passed_by_and_removed_by_the_next_server(
    tmp_path: Path,
) -> None:
    dead = tmp_path / "requests-1.sock"
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(dead))

    async def main() -> None:
        connections = SharedConnections(tmp_path, connect_s=DEADLINE_S)
        assert await connections.find() is None
        server = RequestServer(lambda *_: asyncio.sleep(0), tmp_path)
        await server.start()
        assert not dead.exists()
        await server.close()
        assert sockets(tmp_path) == []

    asyncio.run(main())


def test_it_listens_from_the_servers_start_to_its_end_if_it_is_told_where(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    steps: list[tuple[str, int]] = []

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        del receive
        for name in ("startup", "shutdown"):
            steps.append((f"before {name}", len(sockets(tmp_path))))
            await send({"type": f"lifespan.{name}.complete"})
        assert scope["app"] is app

    async def note(message: Message) -> None:
        steps.append((message["type"], len(sockets(tmp_path))))

    async def never() -> Message:
        raise AssertionError

    def run() -> list[tuple[str, int]]:
        steps.clear()
        asyncio.run(ServeRequests(app)({"type": "lifespan", "app": app}, never, note))
        return list(steps)

    monkeypatch.setenv(frames.FOLDER_VARIABLE, str(tmp_path))
    assert [count for _, count in run()] == [0, 1, 1, 0]
    monkeypatch.delenv(frames.FOLDER_VARIABLE)
    assert [count for _, count in run()] == [0, 0, 0, 0]


def test_a_folder_that_cannot_hold_the_socket_is_no_failure(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = tmp_path / ("x" * 120)
    folder.mkdir()

    async def main() -> None:
        server = RequestServer(lambda *_: asyncio.sleep(0), folder)
        await server.start()
        await server.close()

    asyncio.run(main())
    assert "over HTTP" in caplog.text
