"""The client for streams of tokens: what it reads, when it hangs up, what it uses again."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import aiohttp
import pytest

from clairai.proxy.upstream_connection import (
    MAX_HEAD_BYTES,
    Address,
    BufferedResponse,
    Connection,
    ConnectionPool,
)

DEADLINE_S = 60.0
SILENCE_S = 10.0  # passes only on the clock of an AheadLoop
HEAD = (
    b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream; x=y\r\nTransfer-Encoding: chunked\r\n\r\n"
)
END = b"0\r\n\r\n"
Answer = Callable[["Peer"], Awaitable[None]]


class AheadLoop(asyncio.SelectorEventLoop):
    """Its clock can be put forward: what is due is then due, however slowly the test runs."""

    ahead_s = 0.0

    def time(self) -> float:
        return super().time() + self.ahead_s


def run_ahead(scenario: Callable[[AheadLoop], Awaitable[None]]) -> None:
    async def main() -> None:
        loop = asyncio.get_running_loop()
        assert isinstance(loop, AheadLoop)
        await scenario(loop)

    with asyncio.Runner(loop_factory=AheadLoop) as runner:
        runner.run(main())


class Peer:
    """One connection as the server sees it."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader, self.writer = reader, writer

    async def request(self) -> bytes:
        """The next request, whose body is as long as it says."""
        head = await self.reader.readuntil(b"\r\n\r\n")
        length = int(head.lower().partition(b"content-length: ")[2].split(b"\r\n")[0])
        return head + await self.reader.readexactly(length)

    def send(self, *parts: bytes) -> None:
        for part in parts:
            self.writer.write(part)

    async def has_hung_up(self) -> bool:
        return await self.reader.read() == b""


def chunk(part: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(part), part)


@asynccontextmanager
async def serving(
    answer: Answer, *, keep_s: float = DEADLINE_S
) -> AsyncIterator[tuple[ConnectionPool, list[Peer]]]:
    """A server that answers each connection so, and a pool for it."""
    peers: list[Peer] = []
    failures: list[BaseException] = []

    async def attend(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        peers.append(Peer(reader, writer))
        try:
            await answer(peers[-1])
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        except BaseException as error:
            failures.append(error)
        finally:
            writer.close()

    server = await asyncio.start_server(attend, "127.0.0.1", 0)
    address = Address.of(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}", None)
    assert address is not None
    pool = ConnectionPool(address, connect_s=DEADLINE_S, keep_s=keep_s)
    try:
        async with asyncio.timeout(DEADLINE_S):
            yield pool, peers
    finally:
        pool.close()
        server.close()
    assert failures == []


async def ask(pool: ConnectionPool, body: bytes = b"{}", **options: Any) -> BufferedResponse:
    headers = options.pop("headers", [("X-Kept", "1")])
    return await pool.ask(
        "POST", "/v1/x?y=1", headers, body, silence_s=options.get("silence_s", DEADLINE_S)
    )


async def read_all(response: BufferedResponse) -> bytes:
    body = b""
    while raw := await response.readany():
        body += raw
    return body


def test_an_answer_is_read_as_it_comes_and_its_connection_is_used_again() -> None:
    asked: list[bytes] = []

    async def run() -> None:
        may_go_on = asyncio.Event()

        async def answer(peer: Peer) -> None:
            while True:
                asked.append(await peer.request())
                peer.send(HEAD, chunk(b"one"))
                await may_go_on.wait()
                peer.send(chunk(b"two"), END)

        async with serving(answer) as (pool, peers):
            response = await ask(pool, b'{"a":1}')
            assert (response.status, response.content_type) == (200, "text/event-stream")
            assert await response.readany() == b"one"
            may_go_on.set()
            assert await read_all(response) == b"two"
            assert await read_all(await ask(pool)) == b"onetwo"
            assert len(peers) == 1

    asyncio.run(run())
    first = asked[0].split(b"\r\n")
    assert first[0] == b"POST /v1/x?y=1 HTTP/1.1"
    assert {b"X-Kept: 1", b"Content-Length: 7"} <= {*first}
    assert first[-1] == b'{"a":1}'


@pytest.mark.parametrize(
    "told",
    [
        HEAD + chunk(b"a") + END + b"HTTP/1.1 200 OK\r\nContent-Length: 1\r\n\r\nx",
        HEAD.replace(b"\r\n\r\n", b"\r\nConnection: close\r\n\r\n") + chunk(b"a") + END,
        b"HTTP/1.0 200 OK\r\nContent-Length: 1\r\n\r\na",
    ],
    ids=["a second answer", "close", "HTTP/1.0"],
)
def test_a_connection_that_is_not_in_step_or_closes_is_not_used_again(told: bytes) -> None:
    async def answer(peer: Peer) -> None:
        await peer.request()
        peer.send(told)
        assert await peer.has_hung_up()

    async def run() -> None:
        async with serving(answer) as (pool, peers):
            assert await read_all(await ask(pool)) == b"a"
            assert await read_all(await ask(pool)) == b"a"
            assert len(peers) == 2

    asyncio.run(run())


def test_an_idle_connection_is_closed_after_a_moment() -> None:
    async def run() -> None:
        closed = asyncio.Event()

        async def answer(peer: Peer) -> None:
            await peer.request()
            peer.send(HEAD, END)
            assert await peer.has_hung_up()
            closed.set()

        async with serving(answer, keep_s=0.01) as (pool, _):
            assert await read_all(await ask(pool)) == b""
            await closed.wait()

    asyncio.run(run())


def test_an_answer_without_a_length_ends_with_its_connection() -> None:
    async def answer(peer: Peer) -> None:
        await peer.request()
        peer.send(b"HTTP/1.1 200 OK\r\n\r\nall of it")

    async def run() -> None:
        async with serving(answer) as (pool, _):
            assert await read_all(await ask(pool)) == b"all of it"

    asyncio.run(run())


def test_an_answer_that_breaks_off_is_read_so_far_and_then_raises() -> None:
    async def answer(peer: Peer) -> None:
        await peer.request()
        peer.send(HEAD, chunk(b"so far"), b"5\r\nhal")

    async def run() -> None:
        async with serving(answer) as (pool, _):
            response = await ask(pool)
            assert await response.readany() == b"so farhal"
            with pytest.raises(aiohttp.ServerDisconnectedError):
                await response.readany()

    asyncio.run(run())


@pytest.mark.parametrize(
    ("told", "error"),
    [
        (b"", aiohttp.ServerDisconnectedError),
        (b"HTTP/1.1 200", aiohttp.ServerDisconnectedError),
        (b"SSH-2.0 no HTTP\r\n\r\n", aiohttp.ClientPayloadError),
        (b"HTTP/1.1 200 OK\r\nX: " + b"x" * (MAX_HEAD_BYTES + 1), aiohttp.ClientPayloadError),
    ],
    ids=["nothing", "half a head", "another protocol", "an endless head"],
)
def test_what_is_no_answer_raises(told: bytes, error: type[Exception]) -> None:
    async def answer(peer: Peer) -> None:
        await peer.request()
        peer.send(told)

    async def run() -> None:
        async with serving(answer) as (pool, _):
            with pytest.raises(error):
                await ask(pool)

    asyncio.run(run())


def test_a_silent_upstream_raises_before_and_within_its_answer() -> None:
    async def scenario(loop: AheadLoop) -> None:
        arrived = asyncio.Event()

        async def answer(peer: Peer) -> None:
            body = await peer.request()
            arrived.set()
            if body.endswith(b"begin"):
                peer.send(HEAD, chunk(b"a"))
            assert await peer.has_hung_up()

        async with serving(answer) as (pool, _):
            asking = asyncio.create_task(ask(pool, silence_s=SILENCE_S))
            await arrived.wait()
            loop.ahead_s += SILENCE_S
            with pytest.raises(aiohttp.SocketTimeoutError):
                await asking
            response = await ask(pool, b"begin", silence_s=SILENCE_S)
            assert await response.readany() == b"a"
            loop.ahead_s += SILENCE_S
            with pytest.raises(aiohttp.SocketTimeoutError):
                await response.readany()

    run_ahead(scenario)


def test_a_reader_that_is_slow_leaves_the_rest_in_the_socket(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """What is held here is bounded; upstream feels it, and is not called silent for it."""

    async def scenario(loop: AheadLoop) -> None:
        part, count = b"x" * 65_536, 200
        num_sent = 0
        is_paused, is_stuck = asyncio.Event(), asyncio.Event()
        pause = Connection.pause_reading

        def noted(connection: Connection) -> None:
            pause(connection)
            is_paused.set()

        monkeypatch.setattr(Connection, "pause_reading", noted)

        async def answer(peer: Peer) -> None:
            nonlocal num_sent
            await peer.request()
            peer.send(HEAD)
            for _ in range(count):
                peer.send(chunk(part))
                draining = asyncio.ensure_future(peer.writer.drain())
                if not (await asyncio.wait({draining}, timeout=0.5))[0] and is_paused.is_set():
                    is_stuck.set()
                await draining
                num_sent += len(part)
            peer.send(END)

        async with serving(answer) as (pool, _):
            response = await ask(pool, silence_s=SILENCE_S)
            await is_stuck.wait()
            for _ in range(2):
                loop.ahead_s += SILENCE_S
                await asyncio.sleep(0.01)  # the watch for silence is due, and looks
            assert num_sent < count * len(part)
            first = await response.readany()
            assert len(first) < 1 << 20
            assert len(first) + len(await read_all(response)) == count * len(part)

    run_ahead(scenario)


def test_hanging_up_closes_the_connection_before_and_within_an_answer() -> None:
    async def run() -> None:
        gone = asyncio.Queue[bool]()
        arrived = asyncio.Event()

        async def answer(peer: Peer) -> None:
            body = await peer.request()
            arrived.set()
            if body.endswith(b"begin"):
                peer.send(HEAD, chunk(b"a"))
            gone.put_nowait(await peer.has_hung_up())

        async with serving(answer) as (pool, _):
            asking = asyncio.create_task(ask(pool))
            await arrived.wait()
            asking.cancel()
            assert await gone.get()
            response = await ask(pool, b"begin")
            response.close()
            assert await gone.get()

    asyncio.run(run())


def test_an_exception_that_is_set_is_raised_at_once() -> None:
    async def run() -> None:
        async def answer(peer: Peer) -> None:
            await peer.request()
            peer.send(HEAD, chunk(b"a"))
            assert await peer.has_hung_up()

        async with serving(answer) as (pool, _):
            response = await ask(pool)
            assert await response.readany() == b"a"
            reading = asyncio.create_task(response.readany())
            await asyncio.sleep(0)
            response.set_exception(aiohttp.ServerDisconnectedError())
            with pytest.raises(aiohttp.ServerDisconnectedError):
                await reading
            response.close()

    asyncio.run(run())


def test_a_sink_takes_parts_while_a_reader_waits_until_it_leaves_one_to_it() -> None:
    async def run() -> None:
        is_waiting = asyncio.Event()
        taken: list[bytes] = []

        async def answer(peer: Peer) -> None:
            await peer.request()
            peer.send(HEAD)
            await is_waiting.wait()
            peer.send(b"".join(map(chunk, [b"a", b"b", b"C", b"d"])), END)

        def take(part: bytes) -> bool:
            taken.extend([part] * part.islower())
            return part.islower()

        async with serving(answer) as (pool, _):
            response = await ask(pool)
            response.set_sink(take)
            reading = asyncio.create_task(response.readany())
            await asyncio.sleep(0)
            is_waiting.set()
            assert await reading == b"Cd"  # what follows C is not written before it
            assert taken == [b"a", b"b"]
            assert await response.readany() == b""

    asyncio.run(run())


def test_a_sink_gets_nothing_that_nobody_waits_for() -> None:
    async def run() -> None:
        has_sink, has_ended = asyncio.Event(), asyncio.Event()

        async def answer(peer: Peer) -> None:
            await peer.request()
            peer.send(HEAD)
            await has_sink.wait()
            peer.send(chunk(b"a"), END)
            assert await peer.has_hung_up()
            has_ended.set()

        async with serving(answer, keep_s=0.0) as (pool, _):
            response = await ask(pool)
            response.set_sink(lambda _: True)
            has_sink.set()
            await has_ended.wait()  # all of it has come by then
            assert await read_all(response) == b"a"

    asyncio.run(run())


def test_a_100_continue_is_not_the_answer() -> None:
    async def answer(peer: Peer) -> None:
        await peer.request()
        peer.send(b"HTTP/1.1 100 Continue\r\nX-Early: 1\r\n\r\n")
        peer.send(HEAD, chunk(b"a"), END)

    async def run() -> None:
        async with serving(answer) as (pool, _):
            response = await ask(pool)
            assert "x-early" not in response.headers
            assert await read_all(response) == b"a"

    asyncio.run(run())


def test_a_header_cannot_carry_another_request() -> None:
    async def answer(peer: Peer) -> None:
        await peer.request()

    async def run() -> None:
        async with serving(answer) as (pool, peers):
            with pytest.raises(ValueError, match="line break"):
                await ask(pool, headers=[("X", "1\r\n\r\nGET / HTTP/1.1")])
            assert peers == []

    asyncio.run(run())


def test_addresses_that_need_another_client_are_left_to_it() -> None:
    assert Address.of("https://engine:8000", None) is None
    assert Address.of("http://engine:8000/below", None) is None
    assert Address.of("http://[::1]:8000", None) == Address("[::1]:8000", 8000)
    assert Address.of("http://engine", "/run/api.sock") == Address("engine", path="/run/api.sock")
