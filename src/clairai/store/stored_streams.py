"""The stream ids of all requests in folders of captures, to tell whether one is taken."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from pathlib import Path

import numpy as np

from clairai.errors import StoreError
from clairai.store.disk import has_captures
from clairai.store.read import open as open_store


class StoredStreams:
    """The ids as of the last `refresh`. Eight bytes each; the heads of shards are read once."""

    def __init__(self, folders: Iterable[str | os.PathLike[str]]) -> None:
        self._folders = tuple(dict.fromkeys(map(Path, folders)))
        self._known: set[tuple[Path, str]] = set()  # shards that were read
        self._streams_N = np.empty(0, np.uint64)  # sorted

    def __contains__(self, stream: int) -> bool:
        at = int(np.searchsorted(self._streams_N, np.uint64(stream)))
        return at < len(self._streams_N) and int(self._streams_N[at]) == stream

    def __len__(self) -> int:
        return len(self._streams_N)

    def refresh(self) -> None:
        """Read what was committed since."""
        found = {stream for folder in self._folders for stream in self._new_streams(folder)}
        if found:
            new_N = np.fromiter(found, np.uint64, len(found))
            self._streams_N = np.union1d(self._streams_N, new_N)

    def _new_streams(self, folder: Path) -> Iterator[int]:
        """What cannot be read is left out: no row of it can be served, so none can be replaced."""
        try:
            store = open_store(folder) if has_captures(folder) else None
        except StoreError:
            return
        for entry in () if store is None else store.shards:
            if (folder, entry.name) in self._known:
                continue
            self._known.add((folder, entry.name))
            if entry.first_stream == entry.last_stream:  # a file of one request, maybe a large one
                yield int(entry.first_stream, 16)
                continue
            try:
                head = store.shard(entry).head  # type: ignore[union-attr]  # there are entries
            except StoreError:
                continue
            yield from {int(span.stream, 16) for span in head.spans}
