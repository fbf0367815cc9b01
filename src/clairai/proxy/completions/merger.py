"""Merges upstream's frames with the scores of their tokens, in order, for one client.

Only the chunk that ends a choice may wait, and only for rows of that choice; frames of other
choices overtake it. Runs in: the proxy, on the event loop.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncGenerator, Callable
from typing import Final, Generic, NamedTuple, Protocol, TypeVar

import aiohttp

from clairai.proxy.completions.chunk import Chunk, read_chunk
from clairai.proxy.completions.request_scores import RequestScores
from clairai.proxy.completions.sse import DONE, FrameSplitter, FrameTooLong, frame_data
from clairai.proxy.upstream import UpstreamGone
from clairai.proxy.upstream_connection import BufferedResponse, ResponseContent

MAX_FRAME_BYTES: Final = 32 << 20
Item = TypeVar("Item")


class StreamWriter(Protocol[Item]):
    """The form in which a client gets a stream."""

    def write_token(self, frame: bytes) -> list[Item] | None:
        """Read and write the frame of an ordinary token; None if it has to be decoded first."""

    def write_chunk(self, chunk: Chunk, starts: dict[int, int]) -> list[Item]:
        """Write a chunk with choices, and the scores that can be delivered with it.

        `starts` has the index of the first generated token in this chunk, by choice.
        """

    def write_other(self, frame: bytes, data: bytes | None, chunk: Chunk | None) -> list[Item]:
        """Write usage, an error or the end; or a comment, which has no data."""

    @property
    def wants_rows(self) -> bool:
        """True if scores that arrive between chunks are to be written at once."""

    def write_scores(self) -> list[Item]:
        """Write the scores that have arrived since the last chunk."""


class _Arrival(NamedTuple):
    """A frame with data; `chunk` and `starts` if it is a chunk with choices."""

    frame: bytes
    data: bytes
    chunk: Chunk | None
    starts: dict[int, int]  # index of the first generated token in this chunk, by choice
    deadline_s: float | None  # of one that ends a choice: until when it waits for rows

    @property
    def choices(self) -> frozenset[int]:
        return frozenset(self.starts)

    def must_follow(self, earlier: _Arrival) -> bool:
        """True for the same choice, or if one of them is usage, an error or the end."""
        is_about_all = not earlier.choices or not self.choices
        return is_about_all or bool(earlier.choices & self.choices)


class Merger(Generic[Item]):
    """Decides when each frame of one stream is written."""

    def __init__(
        self,
        scores: RequestScores,
        writer: StreamWriter[Item],
        *,
        max_wait_s: float,
        clock: Callable[[], float],
    ) -> None:
        self.has_end = False  # upstream has sent its last frame
        self.scores = scores
        self._writer = writer
        self._max_wait_s = max_wait_s
        self._clock = clock
        self._waiting: list[_Arrival] = []
        self.splitter = FrameSplitter(MAX_FRAME_BYTES)

    @property
    def is_done(self) -> bool:
        """True if everything is written, the end too."""
        return self.has_end and not self._waiting

    @property
    def deadline_s(self) -> float | None:
        """When to call `release` at the latest, if anything waits."""
        deadlines = [one.deadline_s for one in self._waiting if one.deadline_s is not None]
        return min(deadlines, default=None)

    @property
    def wants_rows(self) -> bool:
        """True if `release` should be called when rows arrive."""
        return bool(self._waiting) or self._writer.wants_rows

    def take_token(self, raw: bytes) -> list[Item] | None:
        """What these bytes become if they are the frame of an ordinary token, and all before them
        is written; None: they have to be read in order.
        """
        if self._waiting or self.splitter.rest:
            return None
        return self._writer.write_token(raw)

    def add_frame(self, frame: bytes) -> list[Item]:
        """What can be written now that this frame is here."""
        if not self._waiting and (written := self._writer.write_token(frame)) is not None:
            return written
        data = frame_data(frame)
        if data is None:
            return self._writer.write_other(frame, None, None)
        self.has_end |= data == DONE
        arrival = self._read(frame, data)
        if self._must_wait(arrival, self._waiting):
            self._waiting.append(arrival)
            self.scores.hurry()
            return []
        return self._write(arrival)

    def release(self) -> list[Item]:
        """What need not wait any longer: its rows are here, or its deadline has passed."""
        written = self._writer.write_scores()
        waiting: list[_Arrival] = []
        for arrival in self._waiting:
            if self._must_wait(arrival, waiting):
                waiting.append(arrival)
            else:
                written += self._write(arrival)
        self._waiting = waiting
        return written

    def _read(self, frame: bytes, data: bytes) -> _Arrival:
        chunk = None if data == DONE else read_chunk(frame, data)
        if chunk is None:
            return _Arrival(frame, data, None, {}, None)
        self.scores.read_response(chunk.view)
        starts = {choice.index: self.scores.read_choice(choice) for choice in chunk.view.choices}
        has_ended = any(choice.finish_reason is not None for choice in chunk.view.choices)
        deadline_s = self._clock() + self._max_wait_s if has_ended else None
        return _Arrival(frame, data, chunk, starts, deadline_s)

    def _must_wait(self, arrival: _Arrival, earlier: list[_Arrival]) -> bool:
        if any(arrival.must_follow(one) for one in earlier):
            return True
        if arrival.deadline_s is None or self._clock() >= arrival.deadline_s:
            return False
        return not all(self.scores.is_complete(choice) for choice in arrival.choices)

    def _write(self, arrival: _Arrival) -> list[Item]:
        chunk = arrival.chunk
        if chunk is None or not arrival.starts:
            return self._writer.write_other(arrival.frame, arrival.data, chunk)
        return self._writer.write_chunk(chunk, arrival.starts)


async def merge_frames(
    content: ResponseContent, merger: Merger[Item]
) -> AsyncGenerator[list[Item], None]:
    """Everything the merger writes, as it writes it; UpstreamGone if the stream has no end."""
    source = _FrameSource(content)
    cause: Exception | None = None
    try:
        while (raw := await source.read(merger)) != b"":
            written = merger.release() if raw is None or merger.wants_rows else []
            for frame in merger.splitter.feed(raw) if raw is not None else ():
                written += merger.add_frame(frame)
            if written:
                yield written
    except (aiohttp.ClientError, FrameTooLong, OSError) as error:
        cause = error
    finally:
        await source.close()
    while merger.deadline_s is not None:  # upstream has ended, rows may still arrive
        if written := merger.release():
            yield written
        else:
            await _wait_for_rows(merger.scores, merger.deadline_s)
    if cause is not None or not merger.has_end:
        raise UpstreamGone(type(cause).__name__) from cause


class _FrameSource:
    """Upstream's bytes; a read that has begun goes on while rows are waited for."""

    def __init__(self, content: ResponseContent) -> None:
        self._content = content
        self._reading: asyncio.Task[bytes] | None = None

    async def read(self, merger: Merger[Item]) -> bytes | None:
        """The next bytes, b"" at the end; None if a row or a deadline came first."""
        if self._reading is None and not merger.wants_rows:
            return await self._content.readany()
        if isinstance(self._content, BufferedResponse):
            return await _read_or_wait(self._content, merger)
        if self._reading is None:
            self._reading = asyncio.create_task(self._content.readany())
        if not merger.wants_rows:
            return await self._finish_read()
        rows = asyncio.create_task(_wait_for_rows(merger.scores, merger.deadline_s))
        await asyncio.wait({self._reading, rows}, return_when=asyncio.FIRST_COMPLETED)
        rows.cancel()
        return await self._finish_read() if self._reading.done() else None

    async def _finish_read(self) -> bytes:
        assert self._reading is not None
        raw = await self._reading
        self._reading = None
        return raw

    async def close(self) -> None:
        if self._reading is not None:
            self._reading.cancel()
            await asyncio.gather(self._reading, return_exceptions=True)


async def _read_or_wait(content: BufferedResponse, merger: Merger[Item]) -> bytes | None:
    """As `_FrameSource.read`, without a task: bytes that arrive end the wait for rows."""
    content.on_arrival = merger.scores.changed.set
    try:
        if not content.is_readable:
            await _wait_for_rows(merger.scores, merger.deadline_s)
    finally:
        content.on_arrival = None
    return await content.readany() if content.is_readable else None


async def _wait_for_rows(scores: RequestScores, deadline_s: float | None) -> None:
    """Return when a row has arrived, or at the deadline."""
    left_s = None if deadline_s is None else deadline_s - time.monotonic()
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(left_s):
            await scores.changed.wait()
            scores.changed.clear()
