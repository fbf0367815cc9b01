"""Messages and connections between the processes of a proxy arrive whole and in order."""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import msgspec

from clairai.proxy.access_keys import AccessKey
from clairai.proxy.engine_facts import HealthStatus, KnownHealth
from clairai.proxy.processes import messages
from clairai.proxy.processes.link import Link, accepted
from clairai.proxy.proxy_settings import ProxySettings


class End:
    """One end, and what came."""

    def __init__(self, sock: socket.socket, types: Any) -> None:
        self.link: Link[Any] = Link(sock, accepted(types))
        self.came: list[Any] = []
        self.fds: list[int | None] = []
        self.has_ended = asyncio.Event()
        self.changed = asyncio.Event()
        self.link.open(self._note, self.has_ended.set)

    def _note(self, message: Any) -> None:
        if isinstance(message, messages.TakeConnection):
            self.fds.append(self.link.take_fd())
        self.came.append(message)
        self.changed.set()

    async def until(self, num: int) -> None:
        async with asyncio.timeout(20):
            while len(self.came) < num:
                self.changed.clear()
                await self.changed.wait()


@asynccontextmanager
async def ends() -> AsyncIterator[tuple[End, End]]:
    ours, theirs = socket.socketpair()
    here, there = End(ours, messages.FromProcess), End(theirs, messages.ToProcess)
    try:
        yield here, there
    finally:
        here.link.close()
        there.link.close()


def test_many_messages_and_connections_arrive_in_order() -> None:
    async def run() -> None:
        async with ends() as (here, there):
            readers = []
            for number in range(300):  # more than the socket takes at once
                read, write = os.pipe()
                readers.append(read)
                received = b"x" * (number * 37 % 5000)
                here.link.send(messages.TakeConnection(number, received, is_placed=False), write)
                here.link.send(messages.EndAnswers())
            await there.until(600)
            took = [one for one in there.came if isinstance(one, messages.TakeConnection)]
            assert [one.connection for one in took] == list(range(300))
            assert [len(one.received) for one in took] == [n * 37 % 5000 for n in range(300)]
            for number, fd in enumerate(there.fds):
                assert fd is not None
                os.write(fd, str(number).encode())
                os.close(fd)
                assert os.read(readers[number], 10) == str(number).encode()
                assert os.read(readers[number], 10) == b""  # nobody else has it
                os.close(readers[number])

    asyncio.run(run())


def test_a_long_message_with_a_connection_arrives_whole() -> None:
    async def run() -> None:
        async with ends() as (here, there):
            read, write = os.pipe()
            os.close(read)
            sent = messages.TakeConnection(1, os.urandom(2 << 20), is_placed=True)
            here.link.send(sent, write)
            await there.until(1)
            assert there.came == [sent]
            assert there.fds[0] is not None
            os.close(there.fds[0])

    asyncio.run(run())


def test_the_end_of_the_other_process_is_told_once_and_loses_no_descriptor() -> None:
    async def run() -> None:
        async with ends() as (here, there):
            there.link.close()
            async with asyncio.timeout(20):
                await here.has_ended.wait()
            read, write = os.pipe()
            here.link.send(messages.TakeConnection(1, b"", is_placed=False), write)
            assert os.read(read, 1) == b""  # the other end was closed here
            os.close(read)
            assert not here.link.is_open

    asyncio.run(run())


def test_bytes_that_are_no_message_end_the_link() -> None:
    async def run() -> None:
        ours, theirs = socket.socketpair()
        end = End(theirs, messages.ToProcess)
        ours.sendall((3).to_bytes(4, "little") + b"abc")
        async with asyncio.timeout(20):
            await end.has_ended.wait()
        ours.close()

    asyncio.run(run())


def test_a_message_of_the_other_direction_is_refused() -> None:
    async def run() -> None:
        async with ends() as (here, there):
            here.link.send(messages.Ready())
            async with asyncio.timeout(20):
                await there.has_ended.wait()

    asyncio.run(run())


def _sent(message: messages.Message) -> object:
    return msgspec.msgpack.decode(msgspec.msgpack.encode(message), type=messages.ToProcess)


def test_settings_survive_the_way() -> None:
    keys = (AccessKey.of("k" * 20, name="a", rights=("read", "steer")),)
    settings = ProxySettings("unix:/a/b", keys=keys, runtime_dir=Path("/r"), allowed_hosts=("h",))
    came = _sent(messages.Begin.of(settings, "json"))
    assert isinstance(came, messages.Begin)
    assert came.read_settings() == settings


def test_what_is_known_of_the_engine_survives_the_way() -> None:
    status = HealthStatus("degraded", "why", 1.5, is_stalled=True)
    known = KnownHealth(status, is_supervised=True, was_ready=False)
    sent = messages.EngineState(known, is_ending=True)
    assert _sent(sent) == sent
