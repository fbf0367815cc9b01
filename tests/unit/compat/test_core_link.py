"""The connections between API server and engine core: a break is noticed, a busy core is none.

The sockets are real and of the kinds that vLLM has; the core's end runs in another context.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import zmq
import zmq.asyncio

from clairai.compat.core_link import has_link_broken, is_link_stable
from tests.process.fault_injection import close_connections, socket_fds
from tests.support.ring_engine import until

IDENTITY = b"\0\0"
LIMIT_S = 60.0


@dataclass
class Link:
    """Both ends of the connections; `watch` is the one under test."""

    context: zmq.asyncio.Context
    core: zmq.asyncio.Context
    client: Any
    requests: zmq.asyncio.Socket  # of the core
    outputs: zmq.asyncio.Socket
    watch: asyncio.Task[bool]

    async def ask(self, text: bytes) -> bytes:
        """One message to the core and back."""
        await self.client.engine_core.input_socket.send_multipart((IDENTITY, text))
        async with asyncio.timeout(LIMIT_S):
            await self.outputs.send(await self.requests.recv())
            return bytes(await self.client.engine_core.resources.output_socket.recv())

    async def result(self) -> bool:
        async with asyncio.timeout(LIMIT_S):
            return await self.watch

    def close(self) -> None:
        """As vLLM does it, from the loop."""
        self.client.engine_core.resources.output_socket.close(linger=0)
        self.client.engine_core.input_socket.close(linger=0)


@asynccontextmanager
async def connected(folder: Path) -> AsyncIterator[Link]:
    context, core = zmq.asyncio.Context(), zmq.asyncio.Context()
    router, pull = context.socket(zmq.ROUTER), context.socket(zmq.PULL)
    dealer, push = core.socket(zmq.DEALER), core.socket(zmq.PUSH)
    for socket in (router, pull, dealer, push):
        socket.set_hwm(0)  # nothing is dropped, as with vLLM
    dealer.setsockopt(zmq.IDENTITY, IDENTITY)
    for name, ends in (("in.sock", (router, dealer)), ("out.sock", (pull, push))):
        ends[0].bind(f"ipc://{folder}/{name}")
        ends[1].connect(f"ipc://{folder}/{name}")
    await dealer.send(b"ready")
    async with asyncio.timeout(LIMIT_S):
        await router.recv_multipart()
    await push.send(b"ready")
    async with asyncio.timeout(LIMIT_S):
        await pull.recv()
    engine_core = SimpleNamespace(
        input_socket=router, resources=SimpleNamespace(output_socket=pull)
    )
    client = SimpleNamespace(engine_core=engine_core)
    watch = asyncio.create_task(has_link_broken(client))
    link = Link(context, core, client, dealer, push, watch)
    await asyncio.sleep(0)  # the watch begins
    try:
        yield link
    finally:
        watch.cancel()
        await asyncio.gather(watch, return_exceptions=True)
        for ended in (core, context):
            ended.destroy(linger=0)


@pytest.mark.attack(418)
@pytest.mark.parametrize("name", ["in.sock", "out.sock"])
def test_a_broken_connection_is_noticed_in_either_direction(tmp_path: Path, name: str) -> None:
    async def scenario() -> None:
        async with connected(tmp_path) as link:
            assert await link.ask(b"before") == b"before"
            close_connections(os.getpid(), at=(name,))
            assert await link.result() is True

    asyncio.run(scenario())


def test_a_core_that_takes_nothing_for_long_has_not_lost_its_connection(
    tmp_path: Path,
) -> None:
    async def scenario() -> None:
        async with connected(tmp_path) as link:
            for _ in range(2000):  # far more than its socket holds
                await link.client.engine_core.input_socket.send_multipart(
                    (IDENTITY, bytes(1 << 10))
                )
            async with asyncio.timeout(LIMIT_S):
                for _ in range(2000):
                    await link.requests.recv()
            assert await link.ask(b"after") == b"after"
            assert not link.watch.done()

    asyncio.run(scenario())


@pytest.mark.parametrize("name", ["in.sock", "out.sock"])
def test_somebody_else_who_connects_and_leaves_is_not_the_core(tmp_path: Path, name: str) -> None:
    async def scenario() -> None:
        async with connected(tmp_path) as link:
            before = socket_fds(os.getpid())
            core = link.client.engine_core
            is_input = name == "in.sock"
            stranger = link.core.socket(zmq.DEALER if is_input else zmq.PUSH)
            stranger.connect(f"ipc://{tmp_path}/{name}")
            await stranger.send(b"hello")
            await (core.input_socket if is_input else core.resources.output_socket).recv_multipart()
            stranger.close(linger=0)
            # ZeroMQ reports an end, then closes.
            until(lambda: socket_fds(os.getpid()) == before, timeout_s=LIMIT_S)
            assert await link.ask(b"after") == b"after"
            assert not link.watch.done()
            close_connections(os.getpid(), at=(name,))
            assert await link.result() is True

    asyncio.run(scenario())


def test_an_engine_that_is_ended_in_order_has_not_lost_its_connection(
    tmp_path: Path,
) -> None:
    async def scenario() -> None:
        async with connected(tmp_path) as link:
            link.close()
            assert await link.result() is False

    asyncio.run(scenario())


def test_a_cancelled_watch_leaves_vllm_s_sockets_as_they_were(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with connected(tmp_path) as link:
            link.watch.cancel()
            await asyncio.gather(link.watch, return_exceptions=True)
            assert await link.ask(b"after") == b"after"

    asyncio.run(scenario())


@pytest.mark.parametrize("is_elastic", [False, True])
def test_cores_that_come_and_go_are_not_watched(is_elastic: bool) -> None:
    config = SimpleNamespace(parallel_config=SimpleNamespace(enable_elastic_ep=is_elastic))
    assert is_link_stable(SimpleNamespace(vllm_config=config)) is not is_elastic
