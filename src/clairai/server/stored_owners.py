"""Who made the captures in a folder, for requests that the engine no longer remembers.

Runs in: the API server.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from clairai.errors import StoreError
from clairai.store.read import Store
from clairai.store.read import open as open_store


class StoredOwners:
    """Opened folders; one thread at a time reads them."""

    def __init__(self) -> None:
        self._stores: dict[str, Store] = {}
        self._reading = asyncio.Lock()

    async def find(self, stream: int, folders: Sequence[str]) -> str | None:
        """The owner of a request's rows; None if there are no such rows, or they have none."""
        async with self._reading:
            return await asyncio.to_thread(self._find, stream, folders)

    def _find(self, stream: int, folders: Sequence[str]) -> str | None:
        for folder in folders:
            store = self._open(folder)
            if store.has(stream):
                return store.request(stream).owner
        return None

    def _open(self, folder: str) -> Store:
        if folder not in self._stores:
            self._stores[folder] = open_store(folder)
            return self._stores[folder]
        try:
            self._stores[folder].refresh()
        except StoreError:
            del self._stores[folder]
            raise
        return self._stores[folder]
