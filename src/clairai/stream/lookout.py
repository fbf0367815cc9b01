"""Takes upstream's description; aims the feed at the ring of the very engine that upstream is.

Several engines may share a runtime folder. Upstream's own epoch says which one answers our
requests; only where upstream has no clairai routes is it the newest.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from http import HTTPStatus
from pathlib import Path
from typing import Final

import aiohttp
import msgspec

from clairai.errors import ConfigError
from clairai.ring.folder import engines, runtime_dir, socket_path
from clairai.stream.feed import Feed
from clairai.stream.refusal import Refused
from clairai.stream.settings import ProxySettings
from clairai.stream.upstream import Upstream, UpstreamGone

LOOK_PAUSE_S: Final = 0.5
MAX_LOOK_PAUSE_S: Final = 2.0
ASK_TIMEOUT_S: Final = 5.0
_log: Final = logging.getLogger(__name__)


class _Description(msgspec.Struct):
    epoch: str


class _Error(msgspec.Struct):
    code: str | int | None = None


class _Refusal(msgspec.Struct):
    error: _Error | None = None


class Lookout:
    """One task; asks only while the feed is not attached, as asking costs the engine a step."""

    def __init__(self, settings: ProxySettings, upstream: Upstream, feed: Feed) -> None:
        self._settings = settings
        self._upstream = upstream
        self._feed = feed
        self._folder: Path | None = None
        self._known: frozenset[Path] = frozenset()
        self._is_by_age = False
        self._news = asyncio.Event()
        self._task: asyncio.Task[None] | None = None

    def find_folder(self) -> None:
        """RingError if the runtime folder cannot be used."""
        if self._settings.ring_socket is None:
            explicit = self._settings.runtime_dir
            self._folder = runtime_dir(None if explicit is None else str(explicit))
            self._known = frozenset(engines(self._folder))

    def start(self) -> None:
        self._task = asyncio.create_task(self._watch())

    async def close(self) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    def look(self) -> None:
        """Something changed: look now."""
        self._news.set()

    async def _watch(self) -> None:
        pause_s = LOOK_PAUSE_S
        while True:
            if not self._feed.is_attached or self._is_by_age:
                await self._aim()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(pause_s):
                    await self._news.wait()
            # An engine whose ring cannot be attached is asked again, but not for ever so often.
            pause_s = LOOK_PAUSE_S if self._news.is_set() else min(2 * pause_s, MAX_LOOK_PAUSE_S)
            self._news.clear()

    async def _aim(self) -> None:
        if self._folder is None:
            self._feed.aim(self._settings.ring_socket)
            return
        try:
            async with asyncio.timeout(ASK_TIMEOUT_S):
                path = await self._find(self._folder)
        except (UpstreamGone, Refused, TimeoutError, aiohttp.ClientError, msgspec.MsgspecError):
            return  # it is starting, or busy, or gone: look again
        # What an engine published before we were here is nobody's that we serve.
        self._feed.aim(path, start="newest" if path in self._known else "oldest")

    async def _find(self, folder: Path) -> Path | None:
        async with self._upstream.ask("GET", "/v1/clairai") as response:
            body = await self._upstream.whole(response)
            status = response.status
        self._is_by_age = status != HTTPStatus.OK and not _is_without_taps(body)
        if self._is_by_age:
            found = await asyncio.to_thread(engines, folder)
            return found[0] if found else None
        if status != HTTPStatus.OK:
            return None
        description = msgspec.json.decode(body, type=_Description)
        return socket_path(folder, int(description.epoch, 16))


def _is_without_taps(body: bytes) -> bool:
    """Whether it is our own route that refused: an engine with clairai's routes and no ring."""
    try:
        error = msgspec.json.decode(body, type=_Refusal).error
    except msgspec.MsgspecError:
        return False
    return error is not None and error.code == ConfigError.code
