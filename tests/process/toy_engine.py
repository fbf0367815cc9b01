"""A toy vLLM of several processes: API server, engine core, worker, capture writer.

Real: the ring, the captures and their writer process, heartbeats. Toy: the model, whose token at
position p is 1000 + p, and the core, which only passes messages on. Nobody here notices that
another has died or stopped: whoever supervises them has to.
"""

from __future__ import annotations

import asyncio
import json
import os
import select
import socket
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Final

from aiohttp import web

from clairai.local.heartbeat import Heartbeat
from clairai.wire import capture_messages, ring_messages
from tests.http.fake import PROMPT, Exchange, Ring, bank_of
from tests.http.fake_server import Upstream
from tests.http.world import SHAPE
from tests.process import toy_vllm
from tests.support.ring_engine import running_engine

PACE_S: Final = 0.02
ROUND_S: Final = 0.25
SETTLE_S: Final = 10.0  # for rows to be safe, on a busy machine
FIRST_TOKEN: Final = 1000
_CONSUMER: Final = "fs"


class Link:
    """Objects of JSON over a socket, a line each."""

    def __init__(self, sock: socket.socket) -> None:
        self._sock, self._rest = sock, b""

    def fileno(self) -> int:
        return self._sock.fileno()

    def send(self, message: dict[str, Any]) -> None:
        self._sock.sendall(json.dumps(message).encode() + b"\n")

    def receive(self) -> list[dict[str, Any]] | None:
        """What has come; None at the end."""
        data = self._sock.recv(1 << 16)
        if not data:
            return None
        *lines, self._rest = (self._rest + data).split(b"\n")
        return [json.loads(line) for line in lines]

    def messages(self) -> Iterator[dict[str, Any]]:
        while (received := self.receive()) is not None:
            yield from received


def fork(run: Callable[[Link, dict[str, Any]], None], config: dict[str, Any]) -> Link:
    """A child that runs this, and our end of the link to it."""
    ours, theirs = socket.socketpair()
    if os.fork() == 0:
        ours.close()
        run(Link(theirs), config)
        os._exit(1)
    theirs.close()
    return Link(ours)


def run_core(link: Link, config: dict[str, Any]) -> None:
    """Pass messages on, and beat whenever the loop goes round."""
    worker, heartbeat = fork(run_worker, config), Heartbeat.open("engine-core")
    open_links = {link: worker, worker: link}
    while open_links:
        for source in select.select([*open_links], [], [], ROUND_S)[0]:
            received = source.receive()
            if received is None and source is link:
                return
            for message in received or ():
                open_links[source].send(message)
            if received is None:
                del open_links[source]  # and nobody is told
        if heartbeat is not None:
            heartbeat.beat()


class Worker:
    """Publishes a row for every forwarded token, and captures it if asked to."""

    def __init__(self, ring: Ring, rig: Any) -> None:
        self._ring, self._rig = ring, rig

    def apply(self, message: dict[str, Any]) -> dict[str, Any]:
        if message["op"] == "state":
            return self._state()
        stream, name = message["stream"], str(message["stream"])
        if message["op"] == "captured":
            return {"capture": self._captured(stream)}
        if message["op"] == "begin" and message["is_captured"]:
            from tests.support.capture_parts import capture_plan

            self._rig.enter(name, stream, capture_plan(to=(_CONSUMER,)))
        tokens, start = message["tokens"], message["position"]
        if tokens:
            phase = ring_messages.PREFILL if start == 0 else ring_messages.DECODE
            self._ring.rows(stream, start, tokens, phase=phase)
        if message["is_captured"] and tokens:
            self._rig.step((name, start, len(tokens)))
        if message["op"] == "end" and message["is_captured"]:
            self._rig.capture.begin([], (name,))
        return {}

    def _captured(self, stream: int) -> dict[str, Any]:
        asked = capture_messages.FindCaptures(streams=(stream,), is_ended=True)
        ((found,),) = self._rig.capture.answer(asked).found
        counts = {"rows": found.rows, "lost": found.lost, "discarded": found.discarded}
        return {"id": found.id, "state": found.state, **counts, "reason": found.reason}

    def _state(self) -> dict[str, Any]:
        """How the consumer does, and since when rows are dropped."""
        state = self._rig.capture.answer(capture_messages.DescribeCapture())
        (place,) = state.places
        names = ("state", "reason", "since", "refused", "lost", "free_nbytes")
        consumer = {name: getattr(place, name) for name in names}
        return {"consumer": consumer, "dropping_since": state.dropping_since}


def run_worker(link: Link, config: dict[str, Any]) -> None:
    Heartbeat.open("worker")
    with ExitStack() as opened:
        folder = Path(config["runtime_dir"])
        engine = opened.enter_context(running_engine(folder, shape=SHAPE, bank_of=bank_of))
        rig = None
        if config.get("capture"):
            from tests.support.capture_rig import remote_rig

            rig = opened.enter_context(remote_rig(config["capture"]))
        worker = Worker(Ring(engine.writer), rig)
        link.send({"epoch": engine.epoch})
        for message in link.messages():
            link.send(worker.apply(message))


class EngineClient:
    """The API server's end: one question at a time, and no limit to how long it waits."""

    def __init__(self, link: Link) -> None:
        self._link, self._asking = link, asyncio.Lock()
        (first,) = self._link.receive() or [{}]
        self.epoch = int(first["epoch"])

    async def ask(self, **message: Any) -> dict[str, Any]:
        """Its reply is read although the asker is cancelled: the next one would get it."""
        return await asyncio.shield(asyncio.create_task(self._ask(message)))

    async def _ask(self, message: dict[str, Any]) -> dict[str, Any]:
        async with self._asking:
            self._link.send(message)
            received = await asyncio.to_thread(self._link.receive)
        if not received:
            await asyncio.Event().wait()  # as an engine that does not notice
        assert received is not None
        return received[0]


def script(engine: EngineClient) -> Any:
    """Generates as many tokens as are asked for, at a steady pace."""

    async def answer(exchange: Exchange) -> web.StreamResponse | None:
        stream, num_tokens = exchange.stream, int(exchange.body["max_tokens"])
        is_captured = "capture" in exchange.fields
        about = {"stream": stream, "is_captured": is_captured}
        await engine.ask(op="begin", position=0, tokens=PROMPT, **about)
        for index in range(num_tokens):
            position = len(PROMPT) + index
            if index:
                forwarded = [FIRST_TOKEN + position - 1]
                await engine.ask(op="token", position=position - 1, tokens=forwarded, **about)
            end = {"finish": "length"} if index == num_tokens - 1 else {}
            await exchange.tokens([FIRST_TOKEN + position], first=index == 0, **end)
            await asyncio.sleep(PACE_S)
        await engine.ask(op="end", position=0, tokens=[], **about)
        if is_captured:
            exchange.last = {"capture": await _settled(engine, stream)}
        await exchange.end(num_generated=num_tokens)
        return None

    return answer


async def _settled(engine: EngineClient, stream: int) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for _ in range(int(SETTLE_S / PACE_S)):
        found = (await engine.ask(op="captured", stream=stream))["capture"]
        if found["state"] not in ("open", "writing"):
            break
        await asyncio.sleep(PACE_S)
    return found


async def serve(path: str, link: Link) -> None:
    """The API server, with a core and a worker behind it."""
    engine = EngineClient(link)
    heartbeat = Heartbeat.open("api-server")
    upstream = Upstream(script(engine), epoch=engine.epoch)
    upstream.ring = None
    runner = web.AppRunner(upstream.app(), access_log=None, handler_cancellation=True)
    await runner.setup()
    await web.UnixSite(runner, path).start()
    watching = asyncio.create_task(_watch_captures(engine, upstream))
    while not watching.done():
        if heartbeat is not None:
            heartbeat.beat()
        await asyncio.sleep(ROUND_S)
    watching.result()


async def _watch_captures(engine: EngineClient, upstream: Upstream) -> None:
    while True:
        found = await engine.ask(op="state")
        upstream.captures.consumer = found["consumer"]
        upstream.captures.dropping_since = found["dropping_since"]
        await asyncio.sleep(ROUND_S)


def install(folder: Path) -> Path:
    """A folder for PYTHONPATH in which `vllm` is this toy."""
    module = toy_vllm.install(folder) / toy_vllm.MODULE
    module.write_text("from tests.process.toy_engine import main_server\nmain_server()\n")
    return folder


def main_server() -> None:
    """As `python -m vllm.entrypoints.openai.api_server`, with its arguments."""
    options = dict(zip(sys.argv, sys.argv[1:], strict=False))
    settings = json.loads(options["--additional-config"])["clairai"]
    asyncio.run(serve(options["--uds"], fork(run_core, settings)))
