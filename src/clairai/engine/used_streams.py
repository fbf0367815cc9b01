"""Remembers which stream ids were used, so that no request gets the rows of an earlier one.

Runs in: the engine core, on the thread that receives requests.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import Final, Protocol

MAX_USED_STREAMS: Final = 1 << 16


class StoredIds(Protocol):
    """The stream ids in folders of captures, as of the last `refresh`."""

    def __contains__(self, stream: int, /) -> bool: ...

    def refresh(self) -> None: ...


class _StreamMemory:
    """The last `limit` stream ids that were used, and by which choices of which request."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._used: OrderedDict[int, tuple[str, int]] = OrderedDict()  # choices: a bit for each

    def is_free(self, stream: int, request: str, choice: int) -> bool:
        user, choices = self._used.get(stream, (request, 0))
        return user == request and not choices >> choice & 1

    def has(self, stream: int, request: str) -> bool:
        return stream in self._used and self._used[stream][0] == request

    def add(self, stream: int, request: str, choice: int) -> None:
        _, choices = self._used.get(stream, (request, 0))
        self._used[stream] = (request, choices | 1 << choice)
        while len(self._used) > self._limit:
            self._used.popitem(last=False)


class UsedStreams:
    """Stream ids of the last requests of this engine, and of all that the folders of captures hold.

    A request is known by its id inside the engine, and uses its stream once for each choice. Those
    that were captured are remembered apart, so that requests without a capture do not displace
    them until they are in the folder.
    """

    def __init__(self, stored: StoredIds | None = None, *, limit: int = MAX_USED_STREAMS) -> None:
        self._used, self._captured = _StreamMemory(limit), _StreamMemory(limit)
        self._stored = stored
        self._refresh_after = max(limit // 2, 1)
        self._num_unread: int | None = None  # captured since the folders were read; None: never

    def is_free(self, stream: int, request: str, choice: int) -> bool:
        """False if another request used it, or this choice of the same request."""
        memories = (self._used, self._captured)
        return all(memory.is_free(stream, request, choice) for memory in memories)

    def is_stored(self, stream: int, request: str) -> bool:
        """True if a folder has rows of another request under this id."""
        if self._stored is None or self._captured.has(stream, request):
            return False
        if self._num_unread is None or self._num_unread >= self._refresh_after:
            self._stored.refresh()
            self._num_unread = 0
        return stream in self._stored

    def add(self, stream: int, request: str, choice: int, *, is_captured: bool) -> None:
        """The request was admitted."""
        self._used.add(stream, request, choice)
        if is_captured:
            self._captured.add(stream, request, choice)
            self._num_unread = None if self._num_unread is None else self._num_unread + 1
