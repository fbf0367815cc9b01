"""Client processes that load an OpenAI server: a number of streams, each one request after another.

Each stream has one connection, which is open before the clock starts, and sends its next request
when the last answer has ended. Times are those of a client: from the last byte of the request to
the first token, and to the last. Nothing is decoded while the clock runs.
"""

from __future__ import annotations

import asyncio
import json
import multiprocessing
import os
import re
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Final, cast
from urllib.parse import urlsplit

import httptools

PATH: Final = "/v1/chat/completions"
# The first chunk of a chat has the role and no text.
_TOKEN: Final = re.compile(rb'"content":"[^"]')
_START_S: Final = 60.0  # for all processes to open their connections


@dataclass(frozen=True)
class Load:
    """What one process does: `streams` at once, `requests` each."""

    url: str
    body: bytes
    streams: int
    requests: int
    tokens: int  # that each answer must have


@dataclass
class Seen:
    """What one process, or all of them, have seen; times of one clock for all processes."""

    first_ms: list[float] = field(default_factory=list)  # after the request was sent
    token_ms: list[float] = field(default_factory=list)  # mean of each answer, after the first
    begun_ns: int = 0
    ended_ns: int = 0
    cpu_s: float = 0.0
    tokens: int = 0
    scores: int = 0  # rows of scores, in the answers that were decoded: the last of each stream
    expected: int = 0  # tokens of those answers that can have scores
    faults: list[str] = field(default_factory=list)


class Stream(asyncio.Protocol):
    """One connection; asks again until it has asked often enough."""

    def __init__(self, load: Load, seen: Seen) -> None:
        raw = load.body
        head = f"POST {PATH} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
        self._request = f"{head}Content-Length: {len(raw)}\r\n\r\n".encode() + raw
        self._load, self._seen = load, seen
        self._left = load.requests
        self.body = bytearray()  # of the last answer
        self.ended = asyncio.get_running_loop().create_future()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)

    def ask(self) -> None:
        self._left -= 1
        self._parser = httptools.HttpResponseParser(self)
        self.body.clear()
        self._first_ns = 0
        self._transport.write(self._request)
        self._sent_ns = time.monotonic_ns()

    def data_received(self, data: bytes) -> None:
        self._parser.feed_data(data)

    def on_body(self, body: bytes) -> None:  # called by the parser
        self.body += body
        if not self._first_ns and _TOKEN.search(self.body):
            self._first_ns = time.monotonic_ns()

    def on_message_complete(self) -> None:  # called by the parser
        now_ns, seen = time.monotonic_ns(), self._seen
        if self._parser.get_status_code() != 200 or not self._first_ns:
            self._end(f"status {self._parser.get_status_code()}: {bytes(self.body[:300])!r}")
            return
        seen.first_ms.append((self._first_ns - self._sent_ns) / 1e6)
        count = max(1, self._load.tokens - 1)
        seen.token_ms.append((now_ns - self._first_ns) / 1e6 / count)
        seen.tokens += self._load.tokens
        seen.ended_ns = now_ns
        if self._left:
            self.ask()
        else:
            self._end(None)

    def connection_lost(self, exc: Exception | None) -> None:
        self._end(f"the connection was closed: {exc!r}")

    def _end(self, fault: str | None) -> None:
        if not self.ended.done():
            self.ended.set_result(fault)
            self._transport.close()


def count_rows(body: bytes) -> tuple[int, int]:
    """The tokens and the rows of scores that a streamed answer has, decoded."""
    tokens = rows = 0
    for frame in body.split(b"\n\n"):
        data = frame.removeprefix(b"data: ")
        if not data or data == b"[DONE]":
            continue
        chunk: dict[str, Any] = json.loads(data)
        tokens = (chunk.get("usage") or {}).get("completion_tokens", tokens)
        for choice in chunk["choices"]:
            given = (choice.get("probe_scores") or {}).get("scores", ())
            rows += sum(None not in values for values in given)
    return tokens, rows


async def run_streams(load: Load, seen: Seen, barrier: Any) -> None:
    """Open all connections, wait for the other processes, and ask."""
    loop, address = asyncio.get_running_loop(), urlsplit(load.url)
    streams: list[Stream] = []
    for _ in range(load.streams):
        _, stream = await loop.create_connection(
            lambda: Stream(load, seen), str(address.hostname), address.port or 80
        )
        streams.append(stream)
    await asyncio.to_thread(barrier.wait, _START_S)
    seen.begun_ns = time.monotonic_ns()
    for stream in streams:
        stream.ask()
    faults = await asyncio.gather(*(stream.ended for stream in streams))
    seen.faults += [fault for fault in faults if fault is not None]
    for stream in streams if not seen.faults else ():
        tokens, rows = count_rows(bytes(stream.body))
        seen.scores += rows
        seen.expected += load.tokens - 1  # the last token of an answer has no score
        if tokens != load.tokens:
            seen.faults.append(f"an answer has {tokens} tokens, was asked for {load.tokens}")


def _work(load: Load, barrier: Any, pipe: Any) -> None:
    seen = Seen()
    try:
        _run(run_streams(load, seen, barrier))
    except Exception as error:
        seen.faults.append(repr(error))
    seen.cpu_s = sum(os.times()[:2])
    pipe.send(seen)


def _run(work: Any) -> None:
    try:
        import uvloop
    except ImportError:
        asyncio.run(work)
    else:
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            runner.run(work)


def spread(total: int, parts: int) -> list[int]:
    """`total` streams over at most `parts` processes, as evenly as can be."""
    parts = min(parts, total)
    return [total // parts + (at < total % parts) for at in range(parts)]


def run_load(
    url: str, body: dict[str, Any], *, streams: int, requests: int, tokens: int, processes: int
) -> Seen:
    """Load the server with all processes at once; what they have seen together."""
    raw = json.dumps(body).encode()
    context = multiprocessing.get_context("spawn")
    shares = spread(streams, processes)
    barrier = context.Barrier(len(shares))
    working = []
    for share in shares:
        ours, theirs = context.Pipe(duplex=False)
        load = Load(url, raw, share, requests, tokens)
        process = context.Process(target=_work, args=(load, barrier, theirs))
        process.start()
        theirs.close()
        working.append((process, ours))
    found = [_receive(pipe) for _, pipe in working]
    for process, _ in working:
        process.join()
    return join(found)


def _receive(pipe: Any) -> Seen:
    try:
        seen: Seen = pipe.recv()
    except EOFError:
        return Seen(faults=["a client process has ended"])
    return seen


def join(found: Sequence[Seen]) -> Seen:
    """What several processes have seen, as one."""
    begun = [one.begun_ns for one in found if one.begun_ns]
    return Seen(
        first_ms=[ms for one in found for ms in one.first_ms],
        token_ms=[ms for one in found for ms in one.token_ms],
        begun_ns=min(begun, default=0),
        ended_ns=max((one.ended_ns for one in found), default=0),
        cpu_s=sum(one.cpu_s for one in found),
        tokens=sum(one.tokens for one in found),
        scores=sum(one.scores for one in found),
        expected=sum(one.expected for one in found),
        faults=[fault for one in found for fault in one.faults],
    )
