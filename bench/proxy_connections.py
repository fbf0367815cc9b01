"""What a connection costs the first process of a proxy, and what it costs to move one.

`new`: connections that are opened, ask for one small completion and are closed. `kept`: the same
completions on one connection. `moved`: one connection that asks by turns for a completion and for
/health/live, so that it moves to a completion process and back each time; `live`: that alone.
`idle`: nothing, for a millisecond. CPU of the first process and of the completion processes, in
microseconds for each round, and how long a round took.
Run: python -m bench.proxy_connections [--rounds 1000] [--completion-processes 2]
"""

from __future__ import annotations

import argparse
import asyncio
import json
import time
from collections.abc import Callable
from typing import Any, Final

import aiohttp

from bench.proxy_latency import PATH, cpu_s, ready
from bench.proxy_load import Upstream, completion_pids, running_proxy, running_ring

BODY: Final[dict[str, Any]] = {"messages": [], "stream": True}


async def complete(session: aiohttp.ClientSession, url: str) -> None:
    async with session.post(f"{url}{PATH}", json=BODY) as answer:
        assert b"[DONE]" in await answer.read()


async def ask_new(session: aiohttp.ClientSession, url: str) -> None:
    del session
    async with aiohttp.ClientSession() as own:
        await complete(own, url)


async def ask_moved(session: aiohttp.ClientSession, url: str) -> None:
    await complete(session, url)
    async with session.get(f"{url}/health/live") as answer:
        await answer.read()


async def ask_live(session: aiohttp.ClientSession, url: str) -> None:
    async with session.get(f"{url}/health/live") as answer:
        await answer.read()


async def rest(session: aiohttp.ClientSession, url: str) -> None:
    del session, url
    await asyncio.sleep(1e-3)


WAYS: Final[dict[str, Callable[..., Any]]] = {
    "idle": rest,
    "new": ask_new,
    "kept": complete,
    "live": ask_live,
    "moved": ask_moved,
}


async def measure(rounds: int, processes: int) -> None:
    with running_ring(2) as (ring, folder):
        upstream = Upstream(ring, rate=10_000.0, length=2, is_in_step=False)
        async with upstream.serving() as address:
            proxy = running_proxy(address, folder, processes=processes)
            url, pid = await asyncio.to_thread(proxy.__enter__)
            try:
                await ready(url, processes)
                await measure_ways(url, pid, rounds)
            finally:
                await asyncio.to_thread(proxy.__exit__, None, None, None)


async def measure_ways(url: str, pid: int, rounds: int) -> None:
    for way in WAYS:
        print(json.dumps(await measure_way(way, url, pid, rounds)), flush=True)


async def measure_way(way: str, url: str, pid: int, rounds: int) -> dict[str, Any]:
    async with aiohttp.ClientSession() as session:
        await WAYS[way](session, url)
        theirs = completion_pids(pid)
        before, begun_s = (cpu_s(pid), sum(map(cpu_s, theirs))), time.monotonic()
        for _ in range(rounds):
            await WAYS[way](session, url)
        first_s, others_s = cpu_s(pid) - before[0], sum(map(cpu_s, theirs)) - before[1]
    return {
        "way": way,
        "first_process_us": round(1e6 * first_s / rounds),
        "completion_processes_us": round(1e6 * others_s / rounds),
        "round_us": round(1e6 * (time.monotonic() - begun_s) / rounds),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=1000)
    parser.add_argument("--completion-processes", type=int, default=2)
    arguments = parser.parse_args()
    asyncio.run(measure(arguments.rounds, arguments.completion_processes))


if __name__ == "__main__":
    main()
