"""Sends a request's captured rows to clients, in bounded memory however slowly they read.

A download holds where its rows lie; the rows are read from the folder part by part, each when the
client has taken the one before. Downloads at once are bounded, and so is what all of them hold.

Runs in: the API server.
"""

from __future__ import annotations

import asyncio
import logging
import weakref
from collections import Counter, OrderedDict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from http import HTTPStatus
from typing import Final

from fastapi.responses import Response
from starlette.types import Receive, Scope, Send

from clairai.errors import StoreDamagedError, StoreError
from clairai.server.engine_rpc import RouteRefusal
from clairai.store.bundle import Bundle, bundle
from clairai.store.disk import UnmappedDisk
from clairai.store.read import Store

MAX_READERS: Final = 8
HELD_NBYTES: Final = 64 << 20  # of all bundles
IDLE_NBYTES: Final = 8 << 20  # of those that nobody reads now, but may ask for again by range
STALL_S: Final = 60.0  # a client that takes nothing for so long is hung up on
RETRY_S: Final = 2
BUSY: Final = "overloaded"
_log: Final = logging.getLogger(__name__)
_FILE: Final = "application/octet-stream"


@dataclass(frozen=True)
class BundleKey:
    """What of which request goes into a file."""

    stream: int
    points: tuple[str, ...]
    choice: int | None


_Content = tuple[str, tuple[str, ...], BundleKey]  # a folder, its shards, what is wanted of them


class Downloads:
    """All downloads of this server, and the bundles that were asked for last."""

    def __init__(self) -> None:
        self._stores: dict[str, Store] = {}
        self._bundles: OrderedDict[_Content, Bundle] = OrderedDict()
        self._users: Counter[_Content] = Counter()
        self._num_readers = 0
        self._reading = asyncio.Lock()  # one thread at a time looks for rows

    @contextmanager
    def reserve(self) -> Iterator[None]:
        """Take a place for one reader. Raises RouteRefusal if there is none."""
        if self._num_readers >= MAX_READERS:
            raise _busy(f"{MAX_READERS} captures are being read, the most at once")
        self._num_readers += 1
        try:
            yield
        finally:
            self._num_readers -= 1

    async def open(
        self, key: BundleKey, folders: Sequence[str], closing: ExitStack
    ) -> Bundle | None:
        """From the first folder that has rows of the request; None if none has.

        It counts as being read until `closing` is closed.
        """
        async with self._reading:
            found = await asyncio.to_thread(self._find, key, folders)
        if found is None:
            return None
        content, made = found
        self._keep(content, made)
        closing.enter_context(self._using(content))
        return made

    def _find(self, key: BundleKey, folders: Sequence[str]) -> tuple[_Content, Bundle] | None:
        for folder in folders:
            store = self._open_store(folder)
            if store.has(key.stream):
                shards = tuple(entry.name for entry in store.shards_with(key.stream))
                content = (folder, shards, key)
                made = self._bundles.get(content)
                return content, made or bundle(
                    store, key.stream, points=key.points, choice=key.choice
                )
        return None

    def _open_store(self, folder: str) -> Store:
        try:
            if folder in self._stores:
                self._stores[folder].refresh()
            else:
                self._stores[folder] = Store(UnmappedDisk(folder))
        except StoreDamagedError:
            raise
        except StoreError as error:
            _log.error("captures cannot be read: %s", error)
            raise _unreadable() from error
        return self._stores[folder]

    def _keep(self, content: _Content, made: Bundle) -> None:
        """Keep a bundle for as long as it fits; idle ones make room. RouteRefusal if none can."""
        is_held = content in self._bundles
        self._bundles[content] = made
        self._bundles.move_to_end(content)
        if is_held:
            return
        idle = [one for one in self._bundles if not self._users[one] and one != content]
        while idle and (
            self._nbytes(idle) > IDLE_NBYTES or self._nbytes(self._bundles) > HELD_NBYTES
        ):
            del self._bundles[idle.pop(0)]
        if self._nbytes(self._bundles) > HELD_NBYTES and self._users.total():
            del self._bundles[content]
            raise _busy("the captures that are being read hold all memory there is for them")

    def _nbytes(self, contents: Iterable[_Content]) -> int:
        return sum(self._bundles[content].held_nbytes for content in contents)

    @contextmanager
    def _using(self, content: _Content) -> Iterator[None]:
        self._users[content] += 1
        try:
            yield
        finally:
            self._users[content] -= 1
            self._users = +self._users  # without those at 0


def _unreadable() -> RouteRefusal:
    """Without the reason, which names a path of the host."""
    reason = "the folder of captures cannot be read; the server's log says why"
    return RouteRefusal(HTTPStatus.INTERNAL_SERVER_ERROR, StoreError.code, reason)


def _busy(reason: str) -> RouteRefusal:
    return RouteRefusal(
        HTTPStatus.SERVICE_UNAVAILABLE,
        BUSY,
        f"{reason}; try again",
        {"Retry-After": str(RETRY_S)},
    )


class DownloadResponse(Response):
    """Sends parts of a file, each read when the one before was taken."""

    def __init__(
        self,
        parts: Iterator[bytes],
        closing: ExitStack,
        *,
        status: HTTPStatus,
        headers: Mapping[str, str],
    ) -> None:
        """`headers` have the length; `closing` is closed at the end, whatever it is."""
        super().__init__(status_code=status, headers=headers, media_type=_FILE)
        self._parts = parts
        self._close = weakref.finalize(self, closing.close)  # also if it is never sent

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        del scope
        gone = asyncio.ensure_future(_wait_for_disconnect(receive))
        try:
            await send(
                {
                    "type": "http.response.start",
                    "status": self.status_code,
                    "headers": self.raw_headers,
                }
            )
            while not gone.done() and (part := await asyncio.to_thread(next, self._parts, b"")):
                async with asyncio.timeout(STALL_S):
                    await send({"type": "http.response.body", "body": part, "more_body": True})
            if not gone.done():
                await send({"type": "http.response.body", "body": b"", "more_body": False})
        except TimeoutError:
            return  # the server hangs up on an answer that ends early
        finally:
            gone.cancel()
            self._close()


async def _wait_for_disconnect(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
