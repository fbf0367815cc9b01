"""Takes the events of one named run; gives them, numbered, to clients that come and come back.

The run goes on without a client for a while. Memory is bounded: events that every attached client
has are let go first; while one still needs them, the run waits for it.
"""

from __future__ import annotations

import asyncio
import itertools
import secrets
from collections import deque
from collections.abc import AsyncGenerator, Callable, Sequence
from typing import Final

from clairai.stream.named import Event
from clairai.stream.sse import PING, named

_PART_BYTES: Final = 1 << 16


class Client:
    """One that reads; it has every event up to `has`."""

    def __init__(self, has: int) -> None:
        self.has = has
        self.news = asyncio.Event()


class Run:
    """One named run; `on_alone` is called when the last client has gone."""

    def __init__(self, *, limit_bytes: int, on_alone: Callable[[Run], None]) -> None:
        self.id = secrets.token_hex(16)
        self.is_over = False
        self.times_alone = 0
        self.stream: int | None = None  # by which the engine knows its request
        self.task: asyncio.Task[None] | None = None
        self._limit_bytes = limit_bytes
        self._on_alone = on_alone
        self._frames: deque[bytes] = deque()
        self._first = 1  # number of the first event held
        self._nbytes = 0
        self._clients: set[Client] = set()
        self._moved = asyncio.Event()

    @property
    def last(self) -> int:
        """Number of the newest event; 0 before the first."""
        return self._first + len(self._frames) - 1

    @property
    def is_alone(self) -> bool:
        return not self._clients

    def reaches(self, after: int) -> bool:
        """Whether all events after that one are still here."""
        return after >= self._first - 1

    def add(self, events: Sequence[Event]) -> None:
        """Number them and keep them, over the bound too: the last words of a run."""
        for event in events:
            frame = named(event.name, self.last + 1, event.data)
            self._frames.append(frame)
            self._nbytes += len(frame)
        self._tell()

    async def put(self, events: Sequence[Event]) -> None:
        """Add them, and return when there is room for more."""
        self.add(events)
        while self._nbytes > self._limit_bytes:
            if any(client.has < self._first for client in self._clients):
                self._moved.clear()
                await self._moved.wait()
            else:
                self._nbytes -= len(self._frames.popleft())
                self._first += 1

    def end(self) -> None:
        self.is_over = True
        self._tell()

    def attach(self, after: int) -> Client:
        """A client that has the events up to that one; from now on none it needs is let go."""
        client = Client(after)
        self._clients.add(client)
        return client

    def detach(self, client: Client) -> None:
        self._clients.discard(client)
        self._moved.set()
        if not self._clients:
            self.times_alone += 1
            self._on_alone(self)

    async def follow(self, client: Client, *, ping_s: float) -> AsyncGenerator[bytes, None]:
        """Frames of what the client does not have, to the run's end; a comment when it is quiet."""
        while True:
            client.news.clear()
            if part := self._part(client):
                yield part
                self._moved.set()
            elif self.is_over:
                return
            elif not await _is_set(client.news, ping_s):
                yield PING

    def _part(self, client: Client) -> bytes:
        frames, nbytes = [], 0
        skipped = client.has + 1 - self._first
        for frame in itertools.islice(self._frames, skipped, None):
            frames.append(frame)
            nbytes += len(frame)
            if nbytes >= _PART_BYTES:
                break
        client.has += len(frames)
        return b"".join(frames)

    def _tell(self) -> None:
        for client in self._clients:
            client.news.set()


async def _is_set(event: asyncio.Event, timeout_s: float) -> bool:
    try:
        async with asyncio.timeout(timeout_s):
            await event.wait()
    except TimeoutError:
        return False
    return True
