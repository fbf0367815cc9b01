"""What the proxy adds to each token and to the first one, before a fake upstream.

64 streams of 30 tokens a second, told directly, passed through, scored, and as named events. The
upstream and the clients share one process, the proxy has its own: two cores, as many processes.
Each chunk carries the time it was sent, on the clock that all processes share.
Run: python -m bench.proxy_latency [--streams 64] [--rate 30] [--seconds 20] [--in-step]
     [--completion-processes 1]

With --costs: what a request and a token cost the proxy in CPU time, each by itself, from many short
answers and a few long ones; give the proxy of another checkout by PYTHONPATH, and take turns.
Run: python -m bench.proxy_latency --costs --probes 16 [--in-step] [--ways scored]
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import sys
import time
from pathlib import Path
from typing import Any, Final
from urllib.parse import urlsplit

import aiohttp
import numpy as np

from bench.proxy_load import STAMP, Upstream, completion_pids, running_proxy, running_ring

PATH: Final = "/v1/chat/completions"
BODY: Final[dict[str, Any]] = {"messages": [{"role": "user", "content": "Hi"}], "stream": True}
WAYS: Final[dict[str, dict[str, Any]]] = {
    "direct": BODY,
    "passed through": BODY,
    "scored": {**BODY, "clairai": {}},
    "named": {**BODY, "clairai": {"events": "named"}},
}
# Requests, and tokens of each: the cost of a request is what remains of the first kind.
SHORT: Final = (1000, 2)
LONG: Final = (128, 240)
SHORT_STREAMS: Final = 8


class Client(asyncio.Protocol):
    """One request after the other on new connections; notes when each token came."""

    def __init__(self, body: dict[str, Any], delays_ns: list[int], firsts_ns: list[int]) -> None:
        raw = json.dumps(body).encode()
        head = f"POST {PATH} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
        self._request = f"{head}Content-Length: {len(raw)}\r\n\r\n".encode() + raw
        self._delays_ns = delays_ns
        self._firsts_ns = firsts_ns
        self._rest = b""
        self._is_first = True
        self.is_done = asyncio.get_running_loop().create_future()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport
        self._sent_ns = time.monotonic_ns()
        transport.write(self._request)

    def data_received(self, data: bytes) -> None:
        now_ns = time.monotonic_ns()
        raw = self._rest + data
        end = raw.rfind(b"\n\n") + 2
        whole, self._rest = raw[:end], raw[end:]
        found = STAMP.findall(whole)
        if found and self._is_first:
            self._is_first = False
            self._firsts_ns.append(now_ns - self._sent_ns)
        self._delays_ns += [now_ns - int(stamp) for stamp in found]
        if b"[DONE]" in whole or b"event: done" in whole:
            self._transport.close()

    def connection_lost(self, exc: Exception | None) -> None:
        if not self.is_done.done():
            self.is_done.set_result(exc)


async def load(
    url: str, way: str, *, streams: int, until_s: float, delays_ns: list[int], firsts_ns: list[int]
) -> None:
    """`streams` clients, each asking again when its answer has ended."""
    parts = urlsplit(url)
    loop = asyncio.get_running_loop()

    async def one(at: int) -> None:
        await asyncio.sleep(at / streams)
        while time.monotonic() < until_s:
            _, client = await loop.create_connection(
                lambda: Client(WAYS[way], delays_ns, firsts_ns),
                str(parts.hostname),
                parts.port or 80,
            )
            await client.is_done

    await asyncio.gather(*(one(at) for at in range(streams)))


def summary(way: str, delays_ns: list[int], firsts_ns: list[int]) -> dict[str, Any]:
    delays, firsts = np.array(delays_ns) / 1e6, np.array(firsts_ns) / 1e6
    return {
        "way": way,
        "tokens": len(delays),
        "p50_ms": round(float(np.percentile(delays, 50)), 3),
        "p99_ms": round(float(np.percentile(delays, 99)), 3),
        "max_ms": round(float(delays.max()), 2),
        "first_p50_ms": round(float(np.percentile(firsts, 50)), 2),
        "first_p99_ms": round(float(np.percentile(firsts, 99)), 2),
    }


async def ask(url: str, body: dict[str, Any], *, count: int, streams: int) -> None:
    """`count` requests in all, on new connections, at most `streams` at once."""
    parts = urlsplit(url)
    loop = asyncio.get_running_loop()
    left = iter(range(count))

    async def one() -> None:
        for _ in left:
            _, client = await loop.create_connection(
                lambda: Client(body, [], []), str(parts.hostname), parts.port or 80
            )
            await client.is_done

    await asyncio.gather(*(one() for _ in range(streams)))


async def costs_of(way: str, url: str, pid: int, arguments: argparse.Namespace) -> dict[str, Any]:
    """CPU time of the proxy for a request, and for a token: two loads, two unknowns."""
    used_us = []
    begun_s, ours_s, busy_s, all_s = time.monotonic(), own_s(), machine_s(), cpu_s(pid)
    for (count, length), streams in ((SHORT, SHORT_STREAMS), (LONG, arguments.streams)):
        body = {**WAYS[way], "max_tokens": length}
        await ask(url, body, count=streams, streams=streams)  # connections to upstream are open
        before_us = threads_us(pid)
        await ask(url, body, count=count, streams=streams)
        used_us.append((threads_us(pid) - before_us) / count)
    token_us = (used_us[1] - used_us[0]) / (LONG[1] - SHORT[1])
    others_s = machine_s() - busy_s - (own_s() - ours_s) - (cpu_s(pid) - all_s)
    found = {
        "way": way,
        "request_us": round(used_us[0] - SHORT[1] * token_us),
        "token_us": round(token_us, 1),
        "cores_used_by_others": round(others_s / (time.monotonic() - begun_s), 2),
    }
    print(json.dumps(found), flush=True)
    return found


def threads_us(pid: int) -> float:
    """What a process has used so far, to the nanosecond."""
    tasks = Path(f"/proc/{pid}/task").iterdir()
    return sum(int((task / "schedstat").read_text().split()[0]) for task in tasks) / 1e3


async def measure(arguments: argparse.Namespace, *, is_in_step: bool) -> list[dict[str, Any]]:
    with running_ring(arguments.probes) as (ring, folder):
        length = max(2, int(arguments.rate * 4))
        upstream = Upstream(ring, rate=arguments.rate, length=length, is_in_step=is_in_step)
        async with upstream.serving() as address:
            proxy = running_proxy(address, folder, processes=arguments.completion_processes)
            url, pid = await asyncio.to_thread(proxy.__enter__)
            try:
                await ready(url, arguments.completion_processes)
                return await measure_ways(address, url, pid, arguments)
            finally:
                await asyncio.to_thread(proxy.__exit__, None, None, None)


async def measure_ways(
    address: str, url: str, pid: int, arguments: argparse.Namespace
) -> list[dict[str, Any]]:
    if not arguments.costs:
        return [await one_way(way, address, url, pid, arguments) for way in arguments.ways]
    ways = [way for way in arguments.ways if way != "direct"]
    return [await costs_of(way, url, pid, arguments) for way in ways]


async def ready(url: str, processes: int) -> None:
    """Return when so many processes answer completions."""
    if processes == 1:
        return
    wanted = f"clairai_completion_processes {processes:.1f}"
    async with aiohttp.ClientSession() as session, asyncio.timeout(60):
        while wanted not in await (await session.get(f"{url}/metrics")).text():  # noqa: ASYNC110
            await asyncio.sleep(0.1)


async def one_way(
    way: str, address: str, url: str, pid: int, arguments: argparse.Namespace
) -> dict[str, Any]:
    delays_ns: list[int] = []
    firsts_ns: list[int] = []
    begun_s, used_s, ours_s, busy_s = time.monotonic(), cpu_s(pid), own_s(), machine_s()
    theirs = completion_pids(pid)
    others_used_s = sum(map(cpu_s, theirs))
    until_s = begun_s + arguments.seconds
    await load(
        address if way == "direct" else url,
        way,
        streams=arguments.streams,
        until_s=until_s,
        delays_ns=delays_ns,
        firsts_ns=firsts_ns,
    )
    used_s = cpu_s(pid) - used_s
    theirs_s = sum(map(cpu_s, theirs)) - others_used_s
    others_s = machine_s() - busy_s - (own_s() - ours_s) - used_s - theirs_s
    found = {
        **summary(way, delays_ns, firsts_ns),
        "cpu_us": round(1e6 * used_s / max(1, len(delays_ns))),
        "completion_processes_cpu_us": round(1e6 * theirs_s / max(1, len(delays_ns))),
        "cores_used_by_others": round(others_s / (time.monotonic() - begun_s), 2),
    }
    print(json.dumps(found), flush=True)
    return found


def cpu_s(pid: int) -> float:
    """What a process has used so far."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def own_s() -> float:
    """What this process has used so far."""
    return sum(os.times()[:2])


def machine_s() -> float:
    """What all processes of the machine have used so far."""
    user, nice, system, *_ = Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:]
    return (int(user) + int(nice) + int(system)) / os.sysconf("SC_CLK_TCK")


def table(found: list[dict[str, Any]]) -> str:
    """What each way adds to `direct`."""
    direct = found[0]
    lines = [
        "| way | tokens | added p50 | added p99 | first token, added p50 | p99 | CPU per token |"
    ]
    lines.append("| --- | --- | --- | --- | --- | --- | --- |")
    for one in found[1:]:
        keys = ("p50_ms", "p99_ms", "first_p50_ms", "first_p99_ms")
        added = " | ".join(f"{one[key] - direct[key]:.2f} ms" for key in keys)
        lines.append(f"| {one['way']} | {one['tokens']} | {added} | {one['cpu_us']} us |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--streams", type=int, default=64)
    parser.add_argument("--rate", type=float, default=30.0)
    parser.add_argument("--seconds", type=float, default=20.0)
    parser.add_argument("--probes", type=int, default=6)
    parser.add_argument("--ways", nargs="+", default=list(WAYS), choices=list(WAYS))
    parser.add_argument("--completion-processes", type=int, default=1)
    parser.add_argument("--in-step", action="store_true", help="all tokens at one moment")
    parser.add_argument("--costs", action="store_true", help="CPU time of a request, of a token")
    arguments = parser.parse_args()
    found = asyncio.run(measure(arguments, is_in_step=arguments.in_step))
    if not arguments.costs:
        print(table(found), file=sys.stdout)


if __name__ == "__main__":
    main()
