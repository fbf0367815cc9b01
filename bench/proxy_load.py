"""An upstream and a ring that cost next to nothing, for a number of streams at a rate.

The upstream speaks vLLM's wire and writes a real ring; each chunk carries the time it was sent.
Used by bench.proxy_latency and bench.proxy_soak.
"""

from __future__ import annotations

import asyncio
import json
import multiprocessing
import re
import socket
import tempfile
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import numpy as np

from clairai.ring.layout import RingShape
from clairai.ring.memory import HostMemory
from clairai.ring.server import RingServer
from clairai.ring.writer import RingWriter, new_epoch
from clairai.wire import ring_messages

PROMPT: Final = [1, 2, 3, 4]
TOKEN: Final = 7
VOCABULARY: Final = {"tokens": ["YQ=="] * 256}
STAMP: Final = re.compile(rb'"(?:content|text)":"(\d{9,20})"')
_HEAD: Final = (
    b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"
)


class Ring:
    """A real ring with `num_probes` columns."""

    def __init__(self, folder: Path, num_probes: int) -> None:
        shape = RingShape.for_budget(64 << 20, num_probes)
        self.epoch = new_epoch()
        self._memory = HostMemory.create(shape.nbytes)
        self.writer = RingWriter(self._memory, shape, self.epoch)
        names = [f"probe-{at}" for at in range(num_probes)]
        bank = ring_messages.Bank(
            1, tuple(ring_messages.ProbeInfo(name, "post_block.0") for name in names)
        )
        greeting = ring_messages.Welcome(
            wire_version=ring_messages.WIRE_VERSION,
            epoch=self.epoch,
            pid=1,
            model="toy",
            vllm="0",
            home="host",
            nbytes=shape.nbytes,
            slots=shape.slots,
            slot_bytes=shape.slot_bytes,
            points=("post_block.0",),
        )
        self._server = RingServer(folder, self._memory, greeting, {1: bank}.get)
        self._scores = np.random.default_rng(1).random((4096, num_probes), np.float32)
        self._step = 0

    def publish(self, streams: list[int], positions: list[int], token_ids: list[int]) -> None:
        rows = np.zeros(len(streams), ring_messages.ROW)
        rows["stream"], rows["position"], rows["token_id"] = streams, positions, token_ids
        rows["span"], rows["phase"] = 1, ring_messages.DECODE
        self._step += 1
        scores = np.ascontiguousarray(self._scores[np.asarray(positions) % 4096])
        # So that a score under the wrong token, or of another request, shows.
        scores[:, 0] = positions
        scores[:, 1] = rows["stream"] & 0xFFFFF
        self.writer.publish(rows, scores, bank_version=1, step=self._step)

    def close(self) -> None:
        self._server.close()
        self._memory.close()


@dataclass(eq=False)
class Answer:
    """One completion that upstream is giving."""

    writer: asyncio.StreamWriter
    body: dict[str, Any]
    length: int
    count: int = 0
    started_s: float = field(default_factory=time.monotonic)

    @property
    def stream(self) -> int | None:
        xargs = self.body.get("vllm_xargs")
        return None if xargs is None else int(json.loads(xargs["clairai"])["stream"])

    def begin(self) -> None:
        self.writer.write(_HEAD)
        choice = '{"index":0,"delta":{"role":"assistant","content":""},"logprobs":null}'
        self._write(f'{{"id":"c","choices":[{choice}],"prompt_token_ids":{PROMPT}}}')

    def token(self) -> None:
        """The next token, with the time it left."""
        self.count += 1
        finish = '"length"' if self.count == self.length else "null"
        ids = f"[{TOKEN}]" if self.stream is not None else "null"
        delta = f'"delta":{{"content":"{time.monotonic_ns()}"}}'
        choice = f'"index":0,{delta},"logprobs":null,"finish_reason":{finish},"token_ids":{ids}'
        self._write(f'{{"id":"c","object":"chat.completion.chunk","choices":[{{{choice}}}]}}')

    def end(self) -> None:
        self._write("[DONE]")
        self.writer.write(b"0\r\n\r\n")

    def _write(self, data: str) -> None:
        raw = f"data: {data}\n\n".encode()
        self.writer.write(b"%x\r\n%s\r\n" % (len(raw), raw))


class Upstream:
    """All answers go on at `rate` tokens a second; all at the same moment if `is_in_step`."""

    def __init__(self, ring: Ring, *, rate: float, length: int, is_in_step: bool) -> None:
        self.ring = ring
        self.live: set[Answer] = set()
        self.is_idle = asyncio.Event()
        self.started = self.finished = self.abandoned = 0
        self._rate = rate
        self._length = length
        self._is_in_step = is_in_step
        self._step = asyncio.Condition()

    @asynccontextmanager
    async def serving(self) -> AsyncIterator[str]:
        server = await asyncio.start_server(self._attend, "127.0.0.1", 0, backlog=2048)
        ticking = asyncio.create_task(self._tick())
        port = server.sockets[0].getsockname()[1]
        try:
            yield f"http://127.0.0.1:{port}"
        finally:
            ticking.cancel()
            server.close()

    async def _tick(self) -> None:
        """Engine steps: every answer that goes on gets its next token."""
        while self._is_in_step:
            await asyncio.sleep(1 / self._rate)
            going = [answer for answer in self.live if answer.count < answer.length]
            self._publish(going)
            for answer in going:
                answer.token()
            async with self._step:
                self._step.notify_all()

    def _publish(self, answers: list[Answer]) -> None:
        """The rows of the tokens that these answers got last."""
        forwarded = [a for a in answers if a.count > 0 and a.stream is not None]
        if forwarded:
            positions = [len(PROMPT) + answer.count - 1 for answer in forwarded]
            streams = [answer.stream or 0 for answer in forwarded]
            self.ring.publish(streams, positions, [TOKEN] * len(forwarded))

    async def _attend(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        sock = writer.get_extra_info("socket")
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        try:
            while head := await reader.readuntil(b"\r\n\r\n"):
                await self._answer(head, reader, writer)
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            writer.close()

    async def _answer(
        self, head: bytes, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        method, path, _ = head.split(b" ", 2)
        length = re.search(rb"(?i)content-length: (\d+)", head)
        raw = await reader.readexactly(int(length[1])) if length else b""
        if method == b"POST":
            body = json.loads(raw)
            length = body.get("max_tokens", self._length)
            await self._complete(Answer(writer, body, length), reader)
            return
        found: dict[bytes, Any] = {
            b"/v1/clairai": {"epoch": f"{self.ring.epoch:016x}"},
            b"/v1/clairai/tokens": VOCABULARY,
            b"/health": {},
        }
        body = json.dumps(found.get(path, {"data": []})).encode()
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n%s" % (len(body), body))

    async def _complete(self, answer: Answer, reader: asyncio.StreamReader) -> None:
        self.started += 1
        self.live.add(answer)
        self.is_idle.clear()
        watching = asyncio.create_task(reader.read(1))  # a client that hangs up ends this
        try:
            answer.begin()
            while answer.count < answer.length:
                if watching.done():
                    raise ConnectionResetError
                await self._next(answer)
                await answer.writer.drain()
            answer.end()
            self.finished += 1
        except ConnectionError:
            self.abandoned += 1
            raise
        finally:
            watching.cancel()
            await asyncio.gather(watching, return_exceptions=True)
            self.live.discard(answer)
            if not self.live:
                self.is_idle.set()

    async def _next(self, answer: Answer) -> None:
        if self._is_in_step:
            async with self._step:
                await self._step.wait()
            return
        due_s = answer.started_s + answer.count / self._rate
        await asyncio.sleep(max(0.0, due_s - time.monotonic()))
        self._publish([answer])
        answer.token()


@contextmanager
def running_ring(num_probes: int) -> Iterator[tuple[Ring, Path]]:
    with tempfile.TemporaryDirectory(prefix="clairai-") as name:
        ring = Ring(Path(name), num_probes)
        try:
            yield ring, Path(name)
        finally:
            ring.close()


@contextmanager
def running_proxy(
    upstream: str, folder: Path, *, processes: int = 1, **limits: int
) -> Iterator[tuple[str, int]]:
    """The proxy in a process of its own, attached to the ring; its address and its pid."""
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(
        target=_serve, args=(upstream, str(folder), processes, limits, theirs)
    )
    process.start()
    theirs.close()
    try:
        assert process.pid is not None
        yield ours.recv(), process.pid
    finally:
        process.terminate()
        process.join(20)


def completion_pids(pid: int) -> list[int]:
    """The completion processes of a proxy."""
    children = [one.read_text() for one in Path(f"/proc/{pid}/task").glob("*/children")]
    pids = [int(child) for text in children for child in text.split()]
    mark = b"processes.completion_process"
    return [one for one in pids if mark in Path(f"/proc/{one}/cmdline").read_bytes()]


def _serve(upstream: str, folder: str, processes: int, limits: dict[str, int], pipe: Any) -> None:
    from clairai.proxy.app import create_app, create_server
    from clairai.proxy.observe.metrics import Metrics
    from clairai.proxy.proxy_settings import Limits, ProxySettings

    listener = socket.create_server(("127.0.0.1", 0), backlog=2048)
    settings = ProxySettings(
        upstream,
        runtime_dir=Path(folder),
        limits=Limits(**limits),
        completion_processes=processes,
    )
    # Which also say when the processes are ready.
    app = create_app(settings, metrics=None if processes == 1 else Metrics())
    pipe.send(f"http://127.0.0.1:{listener.getsockname()[1]}")
    create_server(app, settings).run(sockets=[listener])
