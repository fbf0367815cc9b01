"""Work for a client ends when the client hangs up, and only then as if nobody were there."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Coroutine
from contextlib import AsyncExitStack
from typing import Any

import pytest
from starlette.requests import Request

from clairai.proxy.responses import ClientGone, Exchange, PartStream, while_connected


class Connection(Exchange):
    """A client that hangs up when told to."""

    def __init__(self) -> None:
        self.num_missing = 0
        self.is_gone = False
        self.written: list[bytes] = []
        self._on_leave: Callable[[], None] | None = None

    def take_body(self) -> bytes | None:
        return b""

    @property
    def has_left(self) -> bool:
        return self.is_gone

    def watch(self, on_leave: Callable[[], None] | None) -> None:
        self._on_leave = on_leave

    def leave(self) -> None:
        self.is_gone = True
        if self._on_leave is not None:
            self._on_leave()

    async def write(self, part: bytes) -> None:
        self.write_now(part)

    @property
    def is_ready(self) -> bool:
        return not self.is_gone

    def write_now(self, part: bytes) -> None:
        self.written.append(part)


def scope_of(connection: Connection) -> dict[str, Any]:
    return {"type": "http", "extensions": {Exchange.EXTENSION: connection}}


async def no_receive() -> Any:
    raise AssertionError("nobody waits for the client")


async def work_for(connection: Connection, work: Coroutine[Any, Any, str]) -> str:
    return await while_connected(Request(scope_of(connection), no_receive), work)


async def forever() -> str:
    await asyncio.Event().wait()
    return "never"


async def outcome(act: Callable[[Connection, asyncio.Task[str]], object]) -> BaseException | str:
    connection = Connection()
    task = asyncio.create_task(work_for(connection, forever()))
    await asyncio.sleep(0)
    act(connection, task)
    (found,) = await asyncio.gather(task, return_exceptions=True)
    return found


def test_work_is_cancelled_when_the_client_hangs_up() -> None:
    found = asyncio.run(outcome(lambda connection, _: connection.leave()))
    assert isinstance(found, ClientGone)


def test_a_server_that_ends_is_not_taken_for_a_client_that_leaves() -> None:
    found = asyncio.run(outcome(lambda _, task: task.cancel()))
    assert isinstance(found, asyncio.CancelledError)


def test_both_at_once_end_the_task() -> None:
    def both(connection: Connection, task: asyncio.Task[str]) -> None:
        connection.leave()
        task.cancel()

    assert isinstance(asyncio.run(outcome(both)), asyncio.CancelledError)


def test_nothing_begins_for_a_client_that_has_left() -> None:
    async def begin() -> str:
        raise AssertionError("begun")

    connection = Connection()
    connection.leave()
    with pytest.raises(ClientGone):
        asyncio.run(work_for(connection, begin()))


def test_a_result_is_given_although_the_client_leaves_later() -> None:
    async def run() -> str:
        connection = Connection()

        async def work() -> str:
            return "done"

        found = await work_for(connection, work())
        connection.leave()
        await asyncio.sleep(0)
        return found

    assert asyncio.run(run()) == "done"


class Stream:
    """Parts of a response, and what became of it."""

    def __init__(self) -> None:
        self.is_closed = self.is_ended = False
        self.closing = AsyncExitStack()
        self.closing.callback(lambda: setattr(self, "is_closed", True))

    async def parts(self) -> AsyncGenerator[bytes, None]:
        try:
            yield b"a"
            await forever()
        finally:
            self.is_ended = True


async def send(_: Any) -> None:
    pass


async def answer(stream: Stream, connection: Connection, *, stall_s: float = 60.0) -> None:
    response = PartStream(stream.parts(), stream.closing, stall_s=stall_s)
    await response(scope_of(connection), no_receive, send)


def test_a_stream_ends_when_its_client_hangs_up() -> None:
    async def run() -> tuple[Stream, Connection]:
        stream, connection = Stream(), Connection()
        task = asyncio.create_task(answer(stream, connection))
        for _ in range(5):
            await asyncio.sleep(0)
        connection.leave()
        await task
        return stream, connection

    stream, connection = asyncio.run(run())
    assert connection.written == [b"a"]
    assert stream.is_ended
    assert stream.is_closed


def test_a_stream_ends_when_its_client_takes_nothing() -> None:
    class Slow(Connection):
        async def write(self, part: bytes) -> None:
            del part
            await forever()

    async def run() -> Stream:
        stream = Stream()
        async with asyncio.timeout(20):
            await answer(stream, Slow(), stall_s=0.02)
        return stream

    stream = asyncio.run(run())
    assert stream.is_ended
    assert stream.is_closed
