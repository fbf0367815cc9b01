"""When requests that come at once reach the engine: the first of them, and the last.

Scored requests on connections that stay open, all sent in the same moment. The upstream notes when
each has come, and answers it with an error, which is the least work for the proxy. Upstream and
clients share one process, the proxy has its own.
Run: python -m bench.proxy_burst [--requests 1 16 64] [--bursts 60]
"""

from __future__ import annotations

import argparse
import asyncio
import json
import re
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from importlib.metadata import version
from statistics import median
from typing import Any, Final, cast
from urllib.parse import urlsplit

from bench.proxy_load import running_proxy, running_ring

PATH: Final = "/v1/chat/completions"
BODY: Final[dict[str, Any]] = {
    "model": "m",
    "messages": [{"role": "user", "content": " ".join(f"t{100 + at}" for at in range(16))}],
    "stream": True,
    "clairai": {},
}
PROBES: Final = 16
SETTLE_S: Final = 0.02  # between bursts
_LENGTH: Final = re.compile(rb"(?i)content-length: (\d+)")
_ANSWER: Final = b'{"error":{"message":"not here","code":500}}'


class Upstream(asyncio.Protocol):
    """One connection of the proxy."""

    def __init__(self, note: Callable[[], None]) -> None:
        self._note, self._read = note, b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        self._read += data
        head, _, body = self._read.partition(b"\r\n\r\n")
        length = _LENGTH.search(head)
        if len(body) < (int(length[1]) if length else 0):
            return
        self._read = b""
        if PATH.encode() in head:
            self._note()
        answer = (
            b"HTTP/1.1 500 Error\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n"
        )
        self._transport.write(answer % len(_ANSWER) + _ANSWER)


class Client(asyncio.Protocol):
    """One connection to the proxy."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)

    def ask(self) -> asyncio.Future[None]:
        raw = json.dumps(BODY).encode()
        head = f"POST {PATH} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
        self.answered: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._transport.write(f"{head}Content-Length: {len(raw)}\r\n\r\n".encode() + raw)
        return self.answered

    def data_received(self, data: bytes) -> None:
        del data
        if not self.answered.done():
            self.answered.set_result(None)


@asynccontextmanager
async def running(note: Callable[[], None]) -> AsyncIterator[str]:
    """A proxy before such an upstream; its address."""
    loop = asyncio.get_running_loop()
    server = await loop.create_server(lambda: Upstream(note), "127.0.0.1", 0)
    address = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    with running_ring(PROBES) as (_, folder):
        proxy = running_proxy(address, folder)
        url, _ = await asyncio.to_thread(proxy.__enter__)
        try:
            yield url
        finally:
            await asyncio.to_thread(proxy.__exit__, None, None, None)


async def measure(num_requests: int, num_bursts: int) -> tuple[float, float]:
    """Milliseconds from the first request that is sent to the first and the last that comes."""
    loop, arrivals = asyncio.get_running_loop(), list[int]()
    async with running(lambda: arrivals.append(time.monotonic_ns())) as url:
        address = urlsplit(url)
        opened = [
            await loop.create_connection(Client, str(address.hostname), address.port or 80)
            for _ in range(num_requests)
        ]
        found = []
        for _ in range(num_bursts + 1):
            arrivals.clear()
            await asyncio.sleep(SETTLE_S)
            sent_ns = time.monotonic_ns()
            await asyncio.gather(*[client.ask() for _, client in opened])
            found.append(((arrivals[0] - sent_ns) / 1e6, (arrivals[-1] - sent_ns) / 1e6))
    firsts, lasts = zip(*found[1:], strict=True)  # the first burst opens connections
    return median(firsts), median(lasts)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--requests", type=int, nargs="+", default=[1, 16, 64])
    parser.add_argument("--bursts", type=int, default=60)
    arguments = parser.parse_args()
    print(f"the proxy has uvloop {version('uvloop')}\n")
    print("| at once | the first | the last |\n|---:|---:|---:|")
    for num_requests in arguments.requests:
        first, last = asyncio.run(measure(num_requests, arguments.bursts))
        print(f"| {num_requests} | {first:.2f} ms | {last:.2f} ms |", flush=True)


if __name__ == "__main__":
    main()
