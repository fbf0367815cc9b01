"""Named runs: streams of numbered events that clients can leave and resume.

A run goes on without a client for a while. Its memory is bounded: it drops events that every
attached client has, and waits for a client that still needs them. Runs in: the proxy, on the event
loop.
"""

from __future__ import annotations

import asyncio
import itertools
import re
import secrets
from collections import deque
from collections.abc import AsyncGenerator, Callable, Coroutine, Sequence
from contextlib import AsyncExitStack
from http import HTTPStatus
from typing import Any, Final

from starlette.responses import Response

from clairai.proxy.caller import Caller
from clairai.proxy.completions.sse import PING, named_frame
from clairai.proxy.completions.stream_writers import NamedEvent
from clairai.proxy.proxy_settings import ProxySettings
from clairai.proxy.responses import EventStream, HttpRefusal

_PART_BYTES: Final = 1 << 16
_ID: Final = re.compile(r"[0-9a-f]{30}([0-9a-f]{2})")


class RunClient:
    """A client that reads a run; it has every event up to `has`."""

    def __init__(self, has: int) -> None:
        self.has = has
        self.has_news = asyncio.Event()


class NamedRun:
    """One named run; `on_alone` is called when the last client has gone."""

    def __init__(
        self,
        *,
        limit_bytes: int,
        on_alone: Callable[[NamedRun], None],
        owner: str | None = None,
        process: int | None = None,
    ) -> None:
        self.owner = owner  # name of the API key that began it
        self.id = _new_id(process)
        self.is_over = False
        self.num_times_alone = 0
        self.stream: int | None = None  # of its request
        self.task: asyncio.Task[None] | None = None
        self._limit_bytes = limit_bytes
        self._on_alone = on_alone
        self._frames: deque[bytes] = deque()
        self._first = 1  # number of the first event held
        self._nbytes = 0
        self._clients: set[RunClient] = set()
        self._client_moved = asyncio.Event()

    @property
    def last(self) -> int:
        """Number of the newest event; 0 before the first."""
        return self._first + len(self._frames) - 1

    @property
    def is_alone(self) -> bool:
        return not self._clients

    def has_events_after(self, number: int) -> bool:
        """True if no event after this one has been dropped."""
        return number >= self._first - 1

    def add(self, events: Sequence[NamedEvent]) -> None:
        """Number and keep events, even beyond the bound."""
        for event in events:
            frame = named_frame(event.name, self.last + 1, event.data)
            self._frames.append(frame)
            self._nbytes += len(frame)
        self._notify()

    async def put(self, events: Sequence[NamedEvent]) -> None:
        """Add events, and return when there is room for more."""
        self.add(events)
        while self._nbytes > self._limit_bytes:
            if any(client.has < self._first for client in self._clients):
                self._client_moved.clear()
                await self._client_moved.wait()
            else:
                self._nbytes -= len(self._frames.popleft())
                self._first += 1

    def end(self) -> None:
        self.is_over = True
        self._notify()

    def attach(self, after: int) -> RunClient:
        """Add a client that has the events up to `after`; the run keeps those that it needs."""
        client = RunClient(after)
        self._clients.add(client)
        return client

    def detach(self, client: RunClient) -> None:
        self._clients.discard(client)
        self._client_moved.set()
        if not self._clients:
            self.num_times_alone += 1
            self._on_alone(self)

    async def follow(self, client: RunClient, *, ping_s: float) -> AsyncGenerator[bytes, None]:
        """Frames of the events that the client lacks, to the run's end; a ping when it is quiet."""
        while True:
            client.has_news.clear()
            if part := self._next_part(client):
                yield part
                self._client_moved.set()
            elif self.is_over:
                return
            elif not await _is_set(client.has_news, ping_s):
                yield PING

    def _next_part(self, client: RunClient) -> bytes:
        frames, nbytes = [], 0
        skipped = client.has + 1 - self._first
        for frame in itertools.islice(self._frames, skipped, None):
            frames.append(frame)
            nbytes += len(frame)
            if nbytes >= _PART_BYTES:
                break
        client.has += len(frames)
        return b"".join(frames)

    def _notify(self) -> None:
        for client in self._clients:
            client.has_news.set()


def _new_id(process: int | None) -> str:
    """An id that nobody can guess; it says which process of the proxy has the run."""
    if process is None:
        return secrets.token_hex(16)
    return secrets.token_hex(15) + f"{process:02x}"


def process_of_run(run_id: str) -> int | None:
    """The process that has the run, where there are several; None if this is no run's id."""
    found = _ID.fullmatch(run_id)
    return None if found is None else int(found[1], 16)


async def _is_set(event: asyncio.Event, timeout_s: float) -> bool:
    try:
        async with asyncio.timeout(timeout_s):
            await event.wait()
    except TimeoutError:
        return False
    return True


class NamedRuns:
    """All named runs of the proxy; at most `limits.runs`, of which ended ones are dropped first."""

    def __init__(self, settings: ProxySettings, process: int | None = None) -> None:
        """`process` is the number of this process, if the proxy has several."""
        self._process = process
        self._limits = settings.limits
        self._timeouts = settings.timeouts
        self._runs: dict[str, NamedRun] = {}  # oldest first

    def __len__(self) -> int:
        return len(self._runs)

    def make_room(self) -> None:
        """Drop ended runs; HttpRefusal if all are running."""
        while len(self._runs) >= self._limits.runs:
            ended = next((run for run in self._runs.values() if run.is_over), None)
            if ended is None:
                raise HttpRefusal(
                    HTTPStatus.SERVICE_UNAVAILABLE,
                    f"{len(self._runs)} named runs are going on, the most at once; try later",
                    code="overloaded",
                    headers={"Retry-After": "1"},
                )
            self._forget(ended)

    def new(self, owner: str | None = None) -> NamedRun:
        self.make_room()
        run = NamedRun(
            limit_bytes=self._limits.run_bytes,
            on_alone=self._note_alone,
            owner=owner,
            process=self._process,
        )
        self._runs[run.id] = run
        return run

    def start(self, run: NamedRun, work: Coroutine[Any, Any, None]) -> None:
        """Start the work that puts the run's events into it."""
        run.task = asyncio.create_task(work)
        run.task.add_done_callback(lambda _: self._note_end(run))

    def get(self, run_id: str, caller: Caller) -> NamedRun:
        """HttpRefusal if the caller has no such run, or no longer.

        Another's run is answered as one that does not exist, so that ids are not confirmed.
        """
        run = self._runs.get(run_id)
        if run is None or not caller.owns(run.owner):
            raise HttpRefusal(
                HTTPStatus.NOT_FOUND,
                f"no run has this id; it is kept {self._timeouts.run_kept:.0f} s after its end",
            )
        return run

    def respond(self, run: NamedRun, after: int) -> Response:
        """Stream the events after this one."""
        client = run.attach(after)
        closing = AsyncExitStack()
        closing.callback(run.detach, client)
        return EventStream(
            run.follow(client, ping_s=self._timeouts.ping),
            closing,
            stall_s=self._timeouts.stalled,
            headers={"X-Clairai-Run": run.id},
        )

    def stop(self, run: NamedRun) -> None:
        """End a run at once; no effect on one that has ended."""
        if run.task is not None:
            run.task.cancel()

    async def close(self) -> None:
        tasks = [run.task for run in self._runs.values() if run.task is not None]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _note_alone(self, run: NamedRun) -> None:
        loop = asyncio.get_running_loop()
        loop.call_later(self._timeouts.run_alone, self._stop_if_alone, run, run.num_times_alone)

    def _stop_if_alone(self, run: NamedRun, num_times_alone: int) -> None:
        if run.is_alone and run.num_times_alone == num_times_alone:  # nobody came in between
            self.stop(run)

    def _note_end(self, run: NamedRun) -> None:
        run.end()
        loop = asyncio.get_running_loop()
        loop.call_later(self._timeouts.run_kept, self._forget, run)

    def _forget(self, run: NamedRun) -> None:
        self._runs.pop(run.id, None)
