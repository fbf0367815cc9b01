"""Takes a folder of captures; gives requests and their rows, lazily, as numpy arrays.

Works while a writer is at work, and shows what was committed when it was opened or refreshed. Bytes
are mapped, checked the first time they are touched, and decoded when they are asked for.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, Final

import msgspec

from clairai.errors import StoreError
from clairai.points import Point, quote
from clairai.store.disk import Disk, LocalDisk
from clairai.store.folder import MANIFEST
from clairai.store.manifest import Commit, Entry, Parsed, parse
from clairai.store.opening import opened
from clairai.store.rows import Note, Origin
from clairai.store.shard import Opened, Span, named
from clairai.store.taken import Part, Rows

MAX_OPEN: Final = 256  # shards whose checked arrays are remembered


def open(path: str | os.PathLike[str]) -> Store:
    """The captures in a folder. A damaged manifest is refused; a damaged shard when it is read."""
    return Store(LocalDisk(path))


@dataclass(frozen=True)
class Request:
    """What is stored of one request."""

    stream: int
    choices: tuple[int, ...]
    points: tuple[str, ...]  # in path order
    rows: int
    positions: tuple[int, int]  # the lowest and the highest
    tags: dict[str, Any]
    steering: dict[str, Any]
    origins: tuple[Origin, ...]
    shards: tuple[str, ...]


@dataclass
class _Found:
    spans: list[Span] = field(default_factory=list)
    shards: list[str] = field(default_factory=list)
    origins: list[Origin] = field(default_factory=list)
    note: Note = field(default_factory=Note)


class Store:
    """A folder of captures, for reading."""

    def __init__(self, disk: Disk) -> None:
        self._disk = disk
        self._opened: dict[str, Opened] = {}
        self._parsed = Parsed((), 0, "")
        self.refresh()

    def refresh(self) -> int:
        """See what was committed since; how many shards are new."""
        known = len(self._parsed.entries)
        try:
            is_there = MANIFEST in self._disk.names()
            data = self._disk.read(MANIFEST) if is_there else b""
        except OSError as error:
            raise StoreError(f"the manifest cannot be read, {error.strerror}") from None
        if not is_there:
            raise StoreError("no manifest is there: this is no folder of captures")
        parsed = parse(data)
        parsed.require_whole()
        self._parsed = parsed
        return len(parsed.entries) - known

    @property
    def commits(self) -> tuple[Commit, ...]:
        return self._parsed.commits

    @property
    def shards(self) -> tuple[Entry, ...]:
        return self._parsed.entries

    def shard(self, entry: Entry) -> Opened:
        """One file, its start checked; it is mapped once."""
        if entry.name not in self._opened:
            if len(self._opened) >= MAX_OPEN:
                self._opened.pop(next(iter(self._opened)))
            self._opened[entry.name] = opened(self._disk, entry)
        return self._opened[entry.name]

    def requests(self) -> list[Request]:
        """Every request, in order of its first commit; reads the starts of the shards alone."""
        return self._requests(self.shards)

    def shards_with(self, stream: int) -> tuple[Entry, ...]:
        """Those that may have rows of a request, as the manifest says it."""
        name = named(stream)
        return tuple(one for one in self.shards if one.first_stream <= name <= one.last_stream)

    def has(self, stream: int) -> bool:
        """Whether any of its rows were committed."""
        name = named(stream)
        heads = (self.shard(entry).head for entry in self.shards_with(stream))
        return any(span.stream == name for head in heads for span in head.spans)

    def _requests(self, entries: Iterable[Entry]) -> list[Request]:
        found: dict[str, _Found] = {}
        for entry in entries:
            head = self.shard(entry).head
            for span in head.spans:
                one = found.setdefault(span.stream, _Found())
                one.spans.append(span)
                _add(one.shards, entry.name)
                _add(one.origins, head.origin)
                one.note = head.notes.get(span.stream, one.note)
        return [_request(stream, one) for stream, one in found.items()]

    def request(self, stream: int) -> Request:
        """One request; StoreError if none of its rows were committed."""
        for one in self._requests(self.shards_with(stream)):
            if one.stream == stream:
                return one
        raise StoreError(f"no rows of stream {named(stream)} are in this folder")

    def rows(
        self,
        stream: int,
        *,
        point: str | None = None,
        positions: Iterable[int] | None = None,
        choice: int | None = None,
    ) -> Rows:
        """Rows of one request: by choice, then point in path order, then position.

        A row that was computed twice, because the engine preempted its request, is given once.
        """
        wanted = None if point is None else str(Point.parse(point))
        chosen = None if positions is None else _positions(positions)
        name = named(stream)
        parts = []
        for entry in self.shards_with(stream):
            one = self.shard(entry)
            spans = [s for s in one.head.spans if s.stream == name and wanted in (None, s.point)]
            if spans:
                parts.append(Part.of(one, stream, wanted, chosen, choice))
        return Rows.of(parts)


def _add(found: list[Any], value: object) -> None:
    if value not in found:
        found.append(value)


def _request(stream: str, found: _Found) -> Request:
    spans = found.spans
    return Request(
        stream=int(stream, 16),
        choices=tuple(sorted({span.choice for span in spans})),
        points=tuple(str(p) for p in sorted({Point.parse(span.point) for span in spans})),
        rows=sum(span.rows for span in spans),
        positions=(min(span.first for span in spans), max(span.last for span in spans)),
        tags=msgspec.json.decode(found.note.tags),
        steering=msgspec.json.decode(found.note.steering),
        origins=tuple(found.origins),
        shards=tuple(found.shards),
    )


def _positions(positions: Iterable[int]) -> list[int]:
    listed = list(positions)
    bad = [value for value in listed if not isinstance(value, int) or value < 0]
    if bad:
        raise StoreError(f"position {quote(bad[0])} must be a whole number from 0 on")
    return listed
