"""Shows that many streams at once leave nothing behind in the proxy.

500 clients at a time for five minutes: one in ten reads slowly, one in twenty vanishes in the
middle, the others check every byte of what they get: tokens in order, each score once and under its
own token. At the end every abandoned request must have been cancelled upstream, and the proxy must
hold no more memory, descriptors or tasks than after its first minute.
Run: python -m bench.proxy_soak [--streams 500] [--seconds 300] [--rate 4] [--slow 0.1]
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import random
import sys
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final
from urllib.parse import urlsplit

from bench.proxy_load import PROMPT, STAMP, Upstream, running_proxy, running_ring
from clairai.proxy.proxy_settings import Timeouts

PATH: Final = "/v1/chat/completions"
BODY: Final[dict[str, Any]] = {"messages": [{"role": "user", "content": "Hi"}], "stream": True}
LENGTH: Final = 60
CANCEL_DEADLINE_S: Final = 5.0
MAX_GROWTH_BYTES: Final = 32 << 20


@dataclass
class Tally:
    """What the clients saw."""

    ended: Counter[str] = field(default_factory=Counter)
    wrong: list[str] = field(default_factory=list)
    tokens: int = 0
    scored: int = 0
    lost: int = 0

    def blame(self, reason: str) -> None:
        if len(self.wrong) < 20:
            self.wrong.append(reason)
        self.ended["wrong"] += 1


class Body:
    """Checks one answer as it comes."""

    def __init__(self, is_scored: bool, tally: Tally) -> None:
        self._is_scored = is_scored
        self._tally = tally
        self._rest = b""
        self._tokens = self._num_scored = 0
        self._stamp = 0
        self._stream: float | None = None
        self.is_whole = False

    def feed(self, raw: bytes) -> None:
        *frames, self._rest = (self._rest + raw).split(b"\n\n")
        for frame in frames:
            data = frame.removeprefix(b"data: ")
            if data == b"[DONE]":
                self._end()
            else:
                self._read(json.loads(data))

    def _read(self, chunk: dict[str, Any]) -> None:
        for choice in chunk["choices"]:
            if found := STAMP.search(json.dumps(choice["delta"], separators=(",", ":")).encode()):
                self._tokens += 1
                stamp = int(found[1])
                if stamp < self._stamp:
                    self._tally.blame("tokens out of order")
                self._stamp = stamp
            if choice.get("token_ids"):
                self._tally.blame("token ids that were not asked for")
            if scores := choice.get("probe_scores"):
                self._score(scores)

    def _score(self, scores: dict[str, Any]) -> None:
        if not self._is_scored:
            self._tally.blame("scores that were not asked for")
        if scores["start"] != self._num_scored:
            self._tally.blame(f"score {scores['start']} came where {self._num_scored} was due")
        for row in scores["scores"]:
            self._check(row)
            self._num_scored += 1
        self._tally.scored += sum(row[0] is not None for row in scores["scores"])
        self._tally.lost += scores.get("lost", 0)

    def _check(self, row: list[float | None]) -> None:
        """The first probe says the row's position, the second its stream."""
        position, stream = row[:2]
        if position is None:
            return
        if position != len(PROMPT) + self._num_scored:
            self._tally.blame(f"the score of position {position} under token {self._num_scored}")
        self._stream = stream if self._stream is None else self._stream
        if stream != self._stream:
            self._tally.blame("the score of another request")

    def _end(self) -> None:
        self.is_whole = True
        self._tally.tokens += self._tokens
        if self._tokens != LENGTH or self._num_scored != (LENGTH if self._is_scored else 0):
            self._tally.blame(f"{self._tokens} tokens and {self._num_scored} scores of {LENGTH}")


async def one_request(
    url: str, kind: str, pause_s: float, tally: Tally, rng: random.Random
) -> None:
    parts = urlsplit(url)
    limit = 2048 if kind == "slow" else 1 << 16
    reader, writer = await asyncio.open_connection(parts.hostname, parts.port, limit=limit)
    is_scored = rng.random() < 0.8
    raw = json.dumps({**BODY, "clairai": {}} if is_scored else BODY).encode()
    head = f"POST {PATH} HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(raw)}\r\n\r\n"
    writer.write(head.encode() + raw)
    try:
        leaves_after = rng.randrange(1, LENGTH // 2) if kind == "gone" else LENGTH * 2
        await _receive(reader, Body(is_scored, tally), leaves_after, pause_s)
        tally.ended[kind] += 1
    except (asyncio.IncompleteReadError, ConnectionError, ValueError) as error:
        tally.blame(f"{kind}: {type(error).__name__} {error}")
    finally:
        writer.close()


async def _receive(
    reader: asyncio.StreamReader, body: Body, leaves_after: int, pause_s: float
) -> None:
    """The whole answer, or its first parts; ConnectionError if it has no end."""
    await reader.readuntil(b"\r\n\r\n")
    num_parts = 0
    while size := int(await reader.readline(), 16):
        body.feed(await reader.readexactly(size))
        await reader.readexactly(2)
        num_parts += 1
        if num_parts >= leaves_after:
            return
        await asyncio.sleep(pause_s)
    if not body.is_whole:
        raise ConnectionError("an answer without an end")


async def clients(url: str, arguments: argparse.Namespace, until_s: float, tally: Tally) -> None:
    async def one(at: int) -> None:
        rng = random.Random(at)  # noqa: S311  # a load, not a secret
        await asyncio.sleep(rng.random() * LENGTH / arguments.rate)
        num_requests = 0
        while num_requests < arguments.requests or time.monotonic() < until_s:
            num_requests += 1
            draw = rng.random()
            slow_or_gone = arguments.slow + arguments.gone
            kind = "gone" if draw < arguments.gone else "slow" if draw < slow_or_gone else "whole"
            pause_s = arguments.pause if kind == "slow" else 0.0
            await one_request(url, kind, pause_s, tally, rng)

    await asyncio.gather(*(one(at) for at in range(arguments.streams)))


@dataclass(frozen=True)
class Footprint:
    """What a process holds."""

    rss_bytes: int
    descriptors: int
    threads: int

    @classmethod
    def of(cls, pid: int) -> Footprint:
        status = Path(f"/proc/{pid}/status").read_text()
        fields = dict(line.split(":", 1) for line in status.splitlines())
        rss_bytes = int(fields["VmRSS"].split()[0]) << 10
        descriptors = len(list(Path(f"/proc/{pid}/fd").iterdir()))
        return cls(rss_bytes, descriptors, int(fields["Threads"]))


async def soak(arguments: argparse.Namespace) -> dict[str, Any]:
    """Everything that was seen; `faults` is empty if all was well."""
    tally = Tally()
    with running_ring(arguments.probes) as (ring, folder):
        upstream = Upstream(ring, rate=arguments.rate, length=LENGTH, is_in_step=False)
        async with upstream.serving() as address:
            proxy = running_proxy(address, folder)
            url, pid = await asyncio.to_thread(proxy.__enter__)
            try:
                begun_s = time.monotonic()
                warm_s = min(60.0, arguments.seconds / 3)
                await clients(url, arguments, begun_s + warm_s, tally)
                warm = await _settled(upstream, pid)
                await clients(url, arguments, begun_s + arguments.seconds, tally)
                last = await _settled(upstream, pid)
            finally:
                await asyncio.to_thread(proxy.__exit__, None, None, None)
    return _report(arguments, tally, upstream, warm, last)


async def _settled(upstream: Upstream, pid: int) -> Footprint:
    """All clients are done: upstream must soon have nothing left to do."""
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(CANCEL_DEADLINE_S):
            await upstream.is_idle.wait()
    await asyncio.sleep(1.5 * Timeouts().upstream_idle)  # idle connections are closed by then
    return Footprint.of(pid)


def _report(
    arguments: argparse.Namespace,
    tally: Tally,
    upstream: Upstream,
    warm: Footprint,
    last: Footprint,
) -> dict[str, Any]:
    growth_bytes = last.rss_bytes - warm.rss_bytes
    faults = [*tally.wrong]
    faults += [f"{len(upstream.live)} requests were never cancelled"] if upstream.live else []
    # A client that left after upstream had sent everything cannot be counted as cancelled.
    if upstream.abandoned > tally.ended["gone"]:
        faults.append(f"{tally.ended['gone']} left, upstream lost {upstream.abandoned}")
    if upstream.finished + upstream.abandoned != upstream.started:
        faults.append(f"of {upstream.started} requests {upstream.finished} came to their end")
    if growth_bytes > MAX_GROWTH_BYTES:
        faults.append(f"memory grew by {growth_bytes >> 20} MiB")
    if last.descriptors > warm.descriptors + 8 or last.threads > warm.threads:
        faults.append(f"from {warm} to {last}")
    return {
        "streams": arguments.streams,
        "seconds": arguments.seconds,
        "requests": upstream.started,
        "ended": dict(tally.ended),
        "tokens": tally.tokens,
        "scores": tally.scored,
        "scores_lost": tally.lost,
        "cancelled_upstream": upstream.abandoned,
        "left_upstream": len(upstream.live),
        "rss_mib": [warm.rss_bytes >> 20, last.rss_bytes >> 20],
        "descriptors": [warm.descriptors, last.descriptors],
        "faults": faults,
    }


def arguments_of(given: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--streams", type=int, default=500)
    parser.add_argument("--seconds", type=float, default=300.0)
    parser.add_argument("--requests", type=int, default=0, help="of each client, at the least")
    parser.add_argument("--rate", type=float, default=4.0, help="tokens a second of each stream")
    parser.add_argument("--slow", type=float, default=0.1)
    parser.add_argument("--gone", type=float, default=0.05)
    parser.add_argument("--pause", type=float, default=0.5, help="of slow clients, per chunk")
    parser.add_argument("--probes", type=int, default=6)
    return parser.parse_args(given)


def main() -> int:
    report = asyncio.run(soak(arguments_of(sys.argv[1:])))
    print(json.dumps(report, indent=2))
    return 1 if report["faults"] else 0


if __name__ == "__main__":
    sys.exit(main())
