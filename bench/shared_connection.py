"""What one connection for all requests saves the API server and the proxy, over HTTP.

An application that does nothing but wait for the next step stands in for vLLM's: behind uvicorn,
and behind clairai's server of shared connections. The proxy before it is the real one, and reads a
real ring. Three processes: that server, the proxy, and the clients. Streams are in step, and each
asks again when its answer has ended. CPU times are the kernel's.
Run: python -m bench.shared_connection [--streams 16 64] [--tokens 2 60] [--requests 20]
"""

from __future__ import annotations

import argparse
import asyncio
import json
import multiprocessing
import os
import tempfile
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, Final

import numpy as np
import uvicorn
from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, StreamingResponse

from bench.load_clients import Load, Seen, run_streams
from bench.proxy_latency import threads_us
from bench.proxy_load import PROMPT, TOKEN, VOCABULARY, Ring, running_proxy
from clairai.server.request_server import ServeRequests
from clairai.wire.exchange_frames import FOLDER_VARIABLE

WAYS: Final = {"HTTP": False, "one connection": True}
STEP_S: Final = 0.005
STRAGGLERS: Final = 40  # steps that wait for streams which have not asked again
PROBES: Final = 16
_ROLE: Final = '{"index":0,"delta":{"role":"assistant","content":""},"logprobs":null}'


class Answer:
    """One completion that goes on by a token a step."""

    def __init__(self, body: dict[str, Any]) -> None:
        self.stream = int(json.loads(body["vllm_xargs"]["clairai"])["stream"])
        self.length = int(body["max_tokens"])
        self.count = 0
        self.step = asyncio.Event()

    async def frames(self) -> AsyncIterator[str]:
        yield f'data: {{"id":"c","choices":[{_ROLE}],"prompt_token_ids":{PROMPT}}}\n\n'
        while self.count < self.length:
            self.step.clear()
            await self.step.wait()
            self.count += 1
            finish = '"length"' if self.count == self.length else "null"
            choice = f'"index":0,"delta":{{"content":"x"}},"logprobs":null,"finish_reason":{finish}'
            choices = f'"choices":[{{{choice},"token_ids":[{TOKEN}]}}]'
            yield f'data: {{"id":"c","object":"chat.completion.chunk",{choices}}}\n\n'
        yield f'data: {{"id":"c","choices":[],"usage":{{"completion_tokens":{self.count}}}}}\n\n'
        yield "data: [DONE]\n\n"


class Engine:
    """All answers that are under way, and the ring with their rows."""

    def __init__(self, folder: Path, streams: int) -> None:
        self.ring = Ring(folder, PROBES)
        self._streams = streams
        self._live: set[Answer] = set()

    async def answer(self, body: dict[str, Any]) -> AsyncIterator[str]:
        answer = Answer(body)
        self._live.add(answer)
        try:
            async for frame in answer.frames():
                yield frame
        finally:
            self._live.discard(answer)

    async def run(self) -> None:
        waited = 0
        while True:
            await asyncio.sleep(STEP_S)
            begun = [one for one in self._live if one.count]
            if not begun and len(self._live) < self._streams and waited < STRAGGLERS:
                waited += 1
                continue
            waited = 0
            if begun:
                positions = [len(PROMPT) + one.count - 1 for one in begun]
                self.ring.publish([one.stream for one in begun], positions, [TOKEN] * len(begun))
            for one in self._live:
                one.step.set()


def serve(folder: Path, streams: int, is_shared: bool, pipe: Any) -> None:
    """The process of the API server."""
    os.environ |= {FOLDER_VARIABLE: str(folder)} if is_shared else {}
    engine = Engine(folder, streams)

    @asynccontextmanager
    async def running(_: FastAPI) -> AsyncIterator[None]:
        stepping = asyncio.create_task(engine.run())
        pipe.send(True)
        yield
        stepping.cancel()

    app = FastAPI(lifespan=running)

    async def chat(request: Request) -> StreamingResponse:
        return StreamingResponse(
            engine.answer(await request.json()), media_type="text/event-stream"
        )

    def tell(path: str, content: dict[str, Any]) -> None:
        app.add_api_route(path, lambda: JSONResponse(content), methods=["GET"])

    app.add_api_route("/v1/chat/completions", chat, methods=["POST"])
    tell("/v1/clairai", {"epoch": f"{engine.ring.epoch:016x}"})
    tell("/v1/clairai/tokens", VOCABULARY)
    tell("/v1/models", {"data": []})
    tell("/health", {})
    app.add_middleware(ServeRequests)
    uvicorn.run(app, uds=str(folder / "api.sock"), log_level="error", access_log=False)


@asynccontextmanager
async def running_server(
    folder: Path, streams: int, *, is_shared: bool
) -> AsyncIterator[tuple[str, int, int]]:
    """The address of a proxy before such a server, and the pids of both."""
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=serve, args=(folder, streams, is_shared, theirs))
    process.start()
    await asyncio.to_thread(ours.recv)
    proxy = running_proxy(f"unix:{folder}/api.sock", folder)
    url, pid = await asyncio.to_thread(proxy.__enter__)
    try:
        assert process.pid is not None
        yield url, pid, process.pid
    finally:
        await asyncio.to_thread(proxy.__exit__, None, None, None)
        process.terminate()
        process.join()


async def load(url: str, streams: int, requests: int, tokens: int) -> Seen:
    message = {"role": "user", "content": "x " * 16}
    body = {"model": "m", "messages": [message], "stream": True, "max_tokens": tokens}
    work = Load(url, json.dumps({**body, "clairai": {}}).encode(), streams, requests, tokens)
    seen = Seen()
    await run_streams(work, seen, threading.Barrier(1))
    if seen.faults or seen.scores < seen.expected:
        raise RuntimeError(f"{seen.scores} of {seen.expected} rows of scores; {seen.faults[:1]}")
    return seen


async def measure(way: str, streams: int, tokens: int, requests: int) -> dict[str, Any]:
    with tempfile.TemporaryDirectory(prefix="bench-") as name:
        starting = running_server(Path(name), streams, is_shared=WAYS[way])
        async with starting as (url, proxy_pid, server_pid):
            await load(url, streams, 2, tokens)  # connections are open, code is warm
            before = threads_us(server_pid), threads_us(proxy_pid)
            seen = await load(url, streams, requests, tokens)
            after = threads_us(server_pid), threads_us(proxy_pid)
    count = streams * requests
    server_us, proxy_us = ((b - a) / count for a, b in zip(before, after, strict=True))
    return {
        "streams": streams,
        "tokens": tokens,
        "way": way,
        "server_us_a_request": round(server_us),
        "proxy_us_a_request": round(proxy_us),
        "server_us_a_token": round(server_us / tokens, 1),
        "proxy_us_a_token": round(proxy_us / tokens, 1),
        "first_p50_ms": round(float(np.median(seen.first_ms)), 2),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--streams", type=int, nargs="*", default=(16, 64))
    parser.add_argument("--tokens", type=int, nargs="*", default=(2, 60))
    parser.add_argument("--requests", type=int, default=20)
    asked = parser.parse_args()
    for streams in asked.streams:
        for tokens in asked.tokens:
            for way in WAYS:
                found = asyncio.run(measure(way, streams, tokens, asked.requests))
                print(json.dumps(found), flush=True)


if __name__ == "__main__":
    main()
