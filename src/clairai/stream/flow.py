"""Takes upstream's open answer; gives its frames through a merger, waiting for rows beside it."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncGenerator
from typing import Final, TypeVar

import aiohttp

from clairai.stream.merge import Merger
from clairai.stream.sheet import Sheet
from clairai.stream.sse import FrameTooLong, Splitter
from clairai.stream.upstream import UpstreamGone

MAX_FRAME_BYTES: Final = 32 << 20
Item = TypeVar("Item")


async def flow(
    content: aiohttp.StreamReader, merger: Merger[Item], sheet: Sheet
) -> AsyncGenerator[list[Item], None]:
    """What the merger says, as it says it; UpstreamGone if the answer has no end."""
    splitter = Splitter(MAX_FRAME_BYTES)
    incoming = _Incoming(content)
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
            await _news(sheet, merger.deadline_s)
    if cause is not None or not merger.is_done:
        raise UpstreamGone(type(cause).__name__) from cause


class _Incoming:
    """Upstream's bytes; a read that was begun goes on while something else is waited for."""

    def __init__(self, content: aiohttp.StreamReader) -> None:
        self._content = content
        self._reading: asyncio.Task[bytes] | None = None

    async def next_or_news(self, merger: Merger[Item], sheet: Sheet) -> bytes | None:
        """The next bytes, b"" at the end; None if a row came first or a wait is over."""
        if self._reading is None and not merger.is_listening:
            return await self._content.readany()
        if self._reading is None:
            self._reading = asyncio.create_task(self._content.readany())
        if not merger.is_listening:
            return await self._finished()
        news = asyncio.create_task(_news(sheet, merger.deadline_s))
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


async def _news(sheet: Sheet, deadline_s: float | None) -> None:
    """Returns when a row has come, or at the deadline."""
    left_s = None if deadline_s is None else deadline_s - time.monotonic()
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(left_s):
            await sheet.changed.wait()
            sheet.changed.clear()
