"""Takes upstream's open answer; gives its frames through a merger, waiting for rows beside it."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator
from typing import Final, TypeVar

import aiohttp

from clairai.stream.merge import Merger
from clairai.stream.sheet import Sheet
from clairai.stream.sse import FrameTooLong, Splitter
from clairai.stream.upstream import UpstreamGone

MAX_FRAME_BYTES: Final = 8 << 20
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
            said = merger.release() if merger.deadline_s is not None else []
            for frame in splitter.feed(raw) if raw is not None else ():
                said += merger.feed(frame)
            if said:
                yield said
    except (aiohttp.ClientError, FrameTooLong, OSError) as error:
        cause = error
    finally:
        await incoming.close()
    if said := merger.flush():
        yield said
    if cause is not None or not merger.is_done:
        raise UpstreamGone(type(cause).__name__) from cause


class _Incoming:
    """Upstream's bytes; a read that was begun goes on while something else is waited for."""

    def __init__(self, content: aiohttp.StreamReader) -> None:
        self._content = content
        self._reading: asyncio.Task[bytes] | None = None

    async def next_or_news(self, merger: Merger[Item], sheet: Sheet) -> bytes | None:
        """The next bytes, b"" at the end; None if a row came first or a wait is over."""
        if merger.deadline_s is None and self._reading is None:
            return await self._content.readany()
        if self._reading is None:
            self._reading = asyncio.create_task(self._content.readany())
        if merger.deadline_s is None:
            return await self._finished()
        changed = asyncio.create_task(sheet.changed.wait())
        left_s = max(0.0, merger.deadline_s - time.monotonic())
        await asyncio.wait(
            {self._reading, changed}, timeout=left_s, return_when=asyncio.FIRST_COMPLETED
        )
        changed.cancel()
        if self._reading.done():
            return await self._finished()
        sheet.changed.clear()  # only here, where the news is passed on
        return None

    async def _finished(self) -> bytes:
        assert self._reading is not None
        raw = await self._reading
        self._reading = None
        return raw

    async def close(self) -> None:
        if self._reading is not None:
            self._reading.cancel()
            await asyncio.gather(self._reading, return_exceptions=True)
