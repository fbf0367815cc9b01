"""Takes upstream's frames one by one; gives what a voice makes of them, with the scores, in order.

Only the chunk that ends a choice may wait, and only for that choice's rows: whatever belongs to
others goes past it.
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

Item = TypeVar("Item")


class _Arrival(NamedTuple):
    """A frame; for a chunk with choices also what it holds, and where its tokens begin."""

    frame: bytes
    data: bytes
    chunk: Chunk | None
    starts: dict[int, int]  # choice: index of the first generated token in this chunk
    deadline_s: float | None  # it ends a choice: wait this long for the rows

    @property
    def choices(self) -> frozenset[int]:
        return frozenset(self.starts)


class StreamWriter(Protocol[Item]):
    """How a stream is told to its client."""

    def chunk(self, chunk: Chunk, starts: dict[int, int]) -> list[Item]:
        """A chunk with choices; takes their scores from the sheet."""

    def other(self, frame: bytes, data: bytes | None, chunk: Chunk | None) -> list[Item]:
        """Usage, an error, the end; or a comment, which has no data."""

    @property
    def is_listening(self) -> bool:
        """Whether rows that come between chunks are to be told at once."""

    def late(self) -> list[Item]:
        """What can be told of such rows."""


class Merger(Generic[Item]):
    """One stream."""

    def __init__(
        self,
        sheet: RequestScores,
        voice: StreamWriter[Item],
        *,
        max_wait_s: float,
        clock: Callable[[], float],
    ) -> None:
        self.is_done = False  # upstream said so
        self._sheet = sheet
        self._voice = voice
        self._patience_s = max_wait_s
        self._clock = clock
        self._waiting: list[_Arrival] = []

    @property
    def is_over(self) -> bool:
        """Whether all has been said, the end too."""
        return self.is_done and not self._waiting

    @property
    def deadline_s(self) -> float | None:
        """When to call `release` at the latest, if anything waits."""
        deadlines = [a.deadline_s for a in self._waiting if a.deadline_s is not None]
        return min(deadlines, default=None)

    def feed(self, frame: bytes) -> list[Item]:
        """What can be said now that this frame has come."""
        data = frame_data(frame)
        if data is None:
            return self._voice.other(frame, None, None)
        self.is_done |= data == DONE
        arrival = self._read(frame, data)
        if self._must_wait(arrival, self._waiting):
            self._waiting.append(arrival)
            return []
        return self._say(arrival)

    @property
    def is_listening(self) -> bool:
        """Whether rows are waited for, with or without a deadline."""
        return bool(self._waiting) or self._voice.is_listening

    def release(self) -> list[Item]:
        """What need not wait any longer: its rows have come, or it has waited long enough."""
        said = self._voice.late()
        still: list[_Arrival] = []
        for arrival in self._waiting:
            if self._must_wait(arrival, still):
                still.append(arrival)
            else:
                said += self._say(arrival)
        self._waiting = still
        return said

    def _read(self, frame: bytes, data: bytes) -> _Arrival:
        chunk = None if data == DONE else read_chunk(frame, data)
        if chunk is None:
            return _Arrival(frame, data, None, {}, None)
        self._sheet.read_response(chunk.view)
        starts = {choice.index: self._sheet.read_choice(choice) for choice in chunk.view.choices}
        has_ended = any(choice.finish_reason is not None for choice in chunk.view.choices)
        deadline_s = self._clock() + self._patience_s if has_ended else None
        return _Arrival(frame, data, chunk, starts, deadline_s)

    def _must_wait(self, arrival: _Arrival, earlier: list[_Arrival]) -> bool:
        if any(_must_follow(arrival, to=one) for one in earlier):
            return True
        if arrival.deadline_s is None or self._clock() >= arrival.deadline_s:
            return False
        return not all(self._sheet.is_complete(choice) for choice in arrival.choices)

    def _say(self, arrival: _Arrival) -> list[Item]:
        chunk = arrival.chunk
        if chunk is None or not arrival.starts:
            return self._voice.other(arrival.frame, arrival.data, chunk)
        return self._voice.chunk(chunk, arrival.starts)


def _must_follow(later: _Arrival, *, to: _Arrival) -> bool:
    """Whether it may not be said first: same choice, or one is usage, an error or the end."""
    return not to.choices or not later.choices or bool(to.choices & later.choices)


# MERGED
# Takes upstream's open answer; gives its frames through a merger, waiting for rows beside it.


MAX_FRAME_BYTES: Final = 32 << 20
FlowItem = TypeVar("FlowItem")


async def merge_frames(
    content: aiohttp.StreamReader, merger: Merger[FlowItem], sheet: RequestScores
) -> AsyncGenerator[list[FlowItem], None]:
    """What the merger says, as it says it; UpstreamGone if the answer has no end."""
    splitter = FrameSplitter(MAX_FRAME_BYTES)
    incoming = _FrameSource(content)
    cause: Exception | None = None
    try:
        while (raw := await incoming.next_or_news(merger, sheet)) != b"":
            said = merger.release() if raw is None or merger.is_listening else []
            for frame in splitter.feed(raw) if raw is not None else ():
                said += merger.feed(frame)
            if said:
                yield said
    except (aiohttp.ClientError, FrameTooLong, OSError) as error:
        cause = error
    finally:
        await incoming.close()
    while merger.deadline_s is not None:  # upstream has ended, rows may still be on their way
        if said := merger.release():
            yield said
        else:
            await _wait_for_rows(sheet, merger.deadline_s)
    if cause is not None or not merger.is_done:
        raise UpstreamGone(type(cause).__name__) from cause


class _FrameSource:
    """Upstream's bytes; a read that was begun goes on while something else is waited for."""

    def __init__(self, content: aiohttp.StreamReader) -> None:
        self._content = content
        self._reading: asyncio.Task[bytes] | None = None

    async def next_or_news(self, merger: Merger[FlowItem], sheet: RequestScores) -> bytes | None:
        """The next bytes, b"" at the end; None if a row came first or a wait is over."""
        if self._reading is None and not merger.is_listening:
            return await self._content.readany()
        if self._reading is None:
            self._reading = asyncio.create_task(self._content.readany())
        if not merger.is_listening:
            return await self._finished()
        news = asyncio.create_task(_wait_for_rows(sheet, merger.deadline_s))
        await asyncio.wait({self._reading, news}, return_when=asyncio.FIRST_COMPLETED)
        news.cancel()
        return await self._finished() if self._reading.done() else None

    async def _finished(self) -> bytes:
        assert self._reading is not None
        raw = await self._reading
        self._reading = None
        return raw

    async def close(self) -> None:
        if self._reading is not None:
            self._reading.cancel()
            await asyncio.gather(self._reading, return_exceptions=True)


async def _wait_for_rows(sheet: RequestScores, deadline_s: float | None) -> None:
    """Returns when a row has come, or at the deadline."""
    left_s = None if deadline_s is None else deadline_s - time.monotonic()
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(left_s):
            await sheet.changed.wait()
            sheet.changed.clear()
