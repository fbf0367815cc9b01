"""Notices when a connection between vLLM's API server and an engine core breaks.

AsyncLLM.engine_core                v1/engine/async_llm.py     0.26:146   0.32:184
MPClient.input_socket               v1/engine/core_client.py   0.26:518   0.32:639
BackgroundResources.output_socket   v1/engine/core_client.py   0.26:379   0.32:496

Both are sockets of ZeroMQ, which drops what was on its way when a connection breaks, and connects
again. But vLLM's ROUTER does not let the core have its identity back (ROUTER_HANDOVER is set for
elastic expert parallelism alone), so that from then on every message is dropped in silence: both
processes go on, and no request is ever answered. ZeroMQ itself reports the break. A core that is
only busy keeps its connections, and cannot be mistaken for one that has lost them.

Runs in: the API server, on its event loop.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Final

import zmq
import zmq.asyncio
from zmq.utils.monitor import recv_monitor_message

_EVENTS: Final = zmq.EVENT_ACCEPTED | zmq.EVENT_DISCONNECTED | zmq.EVENT_MONITOR_STOPPED


def is_link_stable(client: Any) -> bool:
    """False if engine cores come and go: config/parallel.py `enable_elastic_ep`, 0.26 and 0.32."""
    return not client.vllm_config.parallel_config.enable_elastic_ep


async def has_link_broken(client: Any) -> bool:
    """Return True when a connection has broken, False when vLLM has closed its sockets.

    `client` is vLLM's AsyncLLM. Call it when its engine serves, so that every core is connected.
    """
    core = client.engine_core
    with _monitor(core.input_socket) as inputs, _monitor(core.resources.output_socket) as outputs:
        watches = [asyncio.ensure_future(_has_broken(events)) for events in (inputs, outputs)]
        try:
            done, _ = await asyncio.wait(watches, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for watch in watches:
                watch.cancel()
            await asyncio.gather(*watches, return_exceptions=True)
    return any(watch.result() for watch in done)


@contextmanager
def _monitor(socket: zmq.asyncio.Socket) -> Iterator[zmq.asyncio.Socket]:
    """A socket that receives what becomes of the connections of `socket`."""
    events = socket.get_monitor_socket(_EVENTS)
    try:
        yield events
    finally:
        with contextlib.suppress(zmq.ZMQError):  # vLLM has closed it
            socket.disable_monitor()
        events.close(linger=0)


async def _has_broken(events: zmq.asyncio.Socket) -> bool:
    """A connection that came later than the cores' own may go: somebody else tried the socket."""
    later: set[int] = set()  # descriptors, which ZeroMQ names in its events
    while True:
        try:
            message = await recv_monitor_message(events)
        except zmq.ZMQError:  # vLLM has ended the context
            return False
        event, fd = message["event"], int(message["value"])
        if event == zmq.EVENT_MONITOR_STOPPED:
            return False
        if event == zmq.EVENT_ACCEPTED:
            later.add(fd)
        elif fd in later:
            later.remove(fd)
        else:
            return True
