"""Takes a folder of captures; gives requests and their rows, lazily, as numpy arrays.

Works while a writer is at work, and shows what was committed when it was opened or refreshed. Bytes
are mapped, checked the first time they are touched, and decoded when they are asked for.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Final

import msgspec
import numpy as np
from numpy.typing import DTypeLike, NDArray

from clairai.errors import StoreDamagedError, StoreError
from clairai.points import Point, quote
from clairai.store.codecs.base import Encoder
from clairai.store.codecs.registry import named
from clairai.store.disk import MANIFEST, Disk, LocalDisk
from clairai.store.row_block import Origin, RequestNote
from clairai.store.shard import COLUMNS, POINT, ROWS, OpenShard, ShardSpan, open_shard, stream_hex
from clairai.store.shard_manifest import CommitLine, ParsedManifest, ShardEntry, parse_manifest

MAX_OPEN: Final = 256  # shards whose checked arrays are remembered


def open(path: str | os.PathLike[str]) -> Store:
    """The captures in a folder. A damaged manifest is refused; a damaged shard when it is read."""
    return Store(LocalDisk(path))


@dataclass(frozen=True)
class StoredRequest:
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
class _RequestParts:
    spans: list[ShardSpan] = field(default_factory=list)
    shards: list[str] = field(default_factory=list)
    origins: list[Origin] = field(default_factory=list)
    note: RequestNote = field(default_factory=RequestNote)


class Store:
    """A folder of captures, for reading."""

    def __init__(self, disk: Disk) -> None:
        self._disk = disk
        self._opened: dict[str, OpenShard] = {}
        self._parsed = ParsedManifest((), 0, "")
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
        parsed = parse_manifest(data)
        parsed.require_whole()
        self._parsed = parsed
        return len(parsed.entries) - known

    @property
    def commits(self) -> tuple[CommitLine, ...]:
        return self._parsed.commits

    @property
    def shards(self) -> tuple[ShardEntry, ...]:
        return self._parsed.entries

    def shard(self, entry: ShardEntry) -> OpenShard:
        """One file, its start checked; it is mapped once."""
        if entry.name not in self._opened:
            if len(self._opened) >= MAX_OPEN:
                self._opened.pop(next(iter(self._opened)))
            self._opened[entry.name] = open_shard(self._disk, entry)
        return self._opened[entry.name]

    def requests(self) -> list[StoredRequest]:
        """Every request, in order of its first commit; reads the starts of the shards alone."""
        return self._requests(self.shards)

    def shards_with(self, stream: int) -> tuple[ShardEntry, ...]:
        """Those that may have rows of a request, as the manifest says it."""
        name = stream_hex(stream)
        return tuple(one for one in self.shards if one.first_stream <= name <= one.last_stream)

    def has(self, stream: int) -> bool:
        """Whether any of its rows were committed."""
        name = stream_hex(stream)
        heads = (self.shard(entry).head for entry in self.shards_with(stream))
        return any(span.stream == name for head in heads for span in head.spans)

    def _requests(self, entries: Iterable[ShardEntry]) -> list[StoredRequest]:
        found: dict[str, _RequestParts] = {}
        for entry in entries:
            head = self.shard(entry).head
            for span in head.spans:
                one = found.setdefault(span.stream, _RequestParts())
                one.spans.append(span)
                _add_once(one.shards, entry.name)
                _add_once(one.origins, head.origin)
                one.note = head.notes.get(span.stream, one.note)
        return [_stored_request(stream, one) for stream, one in found.items()]

    def request(self, stream: int) -> StoredRequest:
        """One request; StoreError if none of its rows were committed."""
        for one in self._requests(self.shards_with(stream)):
            if one.stream == stream:
                return one
        raise StoreError(f"no rows of stream {stream_hex(stream)} are in this folder")

    def rows(
        self,
        stream: int,
        *,
        point: str | None = None,
        positions: Iterable[int] | None = None,
        choice: int | None = None,
    ) -> StoredRows:
        """Rows of one request: by choice, then point in path order, then position.

        A row that was computed twice, because the engine preempted its request, is given once.
        """
        wanted = None if point is None else str(Point.parse(point))
        chosen = None if positions is None else _check_positions(positions)
        name = stream_hex(stream)
        parts = []
        for entry in self.shards_with(stream):
            one = self.shard(entry)
            spans = [s for s in one.head.spans if s.stream == name and wanted in (None, s.point)]
            if spans:
                parts.append(ShardRows.of(one, stream, wanted, chosen, choice))
        return StoredRows.of(parts)


def _add_once(found: list[Any], value: object) -> None:
    if value not in found:
        found.append(value)


def _stored_request(stream: str, found: _RequestParts) -> StoredRequest:
    spans = found.spans
    return StoredRequest(
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


def _check_positions(positions: Iterable[int]) -> list[int]:
    listed = list(positions)
    bad = [value for value in listed if not isinstance(value, int) or value < 0]
    if bad:
        raise StoreError(f"position {quote(bad[0])} must be a whole number from 0 on")
    return listed


# MERGED
# Takes shards and which of their rows are wanted; gives them as one array, decoded on access.
#
# Shapes: N wanted rows, D values of a decoded row.


Places = NDArray[np.intp]


@dataclass(frozen=True)
class ShardRows:
    """Wanted rows of one shard: where they are in it, and their columns."""

    shard: OpenShard
    places_N: Places
    columns: dict[str, NDArray[Any]]
    point_names: tuple[str, ...]

    @classmethod
    def of(
        cls,
        shard: OpenShard,
        stream: int,
        point: str | None,
        positions: Sequence[int] | None,
        choice: int | None,
    ) -> ShardRows:
        every = {name: shard.array(name) for name in (*COLUMNS, POINT)}
        points = shard.head.points
        if len(every[POINT]) and int(every[POINT].max()) >= len(points):
            raise StoreDamagedError(f"shard {shard.name} names a point that it does not list")
        is_wanted = every["stream"] == np.uint64(stream)
        if point is not None:
            is_wanted &= every[POINT] == points.index(point)
        if positions is not None:
            is_wanted &= np.isin(every["position"], np.array(positions, np.int64))
        if choice is not None:
            is_wanted &= every["choice"] == choice
        places_N = np.flatnonzero(is_wanted)
        columns = {name: column[places_N] for name, column in every.items()}
        return cls(shard, places_N, columns, points)

    def encoded(self, places_N: Places) -> dict[str, NDArray[Any]]:
        names = [name for name in self.shard.tensors if name.startswith(ROWS)]
        return {name.removeprefix(ROWS): self.shard.array(name)[places_N] for name in names}

    def decoded(self, places_N: Places) -> NDArray[np.float32]:
        width = self.shard.head.origin.width
        return self._encoder.decode(self.encoded(places_N), width=width)

    @property
    def nbytes_per_row(self) -> int:
        return self._encoder.nbytes_per_row(self.shard.head.origin.width)

    @property
    def width(self) -> int:
        return self._encoder.decoded_width(self.shard.head.origin.width)

    @property
    def _encoder(self) -> Encoder:
        origin = self.shard.head.origin
        return named(origin.encoder, msgspec.json.decode(origin.parameters))


@dataclass(frozen=True)
class StoredRows:
    """Rows of one request. `rows[...]` decodes what is indexed; `numpy.asarray(rows)` all of it."""

    parts: tuple[ShardRows, ...]
    part_N: Places  # which part each row is in
    place_N: Places  # and where in its shard
    stream: NDArray[np.uint64]
    choice: NDArray[np.uint16]
    position: NDArray[np.uint32]
    token_id: NDArray[np.int32]
    phase: NDArray[np.uint8]
    point: tuple[str, ...]

    @classmethod
    def of(cls, parts: Sequence[ShardRows]) -> StoredRows:
        """In order, each (choice, point, position) once: the one that was stored last."""
        found = [part for part in parts if len(part.places_N)]
        part_N = np.repeat(np.arange(len(found)), [len(part.places_N) for part in found])
        place_N = _concatenate([part.places_N for part in found], np.intp)
        columns = {
            name: _concatenate([part.columns[name] for part in found], dtype)
            for name, dtype in _COLUMN_TYPES
        }
        points = [p.point_names[index] for p in found for index in p.columns[POINT].tolist()]
        order = _row_order(columns, points)
        return cls(
            parts=tuple(found),
            part_N=part_N[order],
            place_N=place_N[order],
            point=tuple(points[index] for index in order.tolist()),
            **{name: column[order] for name, column in columns.items()},
        )

    def before(self, position: int) -> StoredRows:
        """Those of earlier positions."""
        chosen = np.flatnonzero(self.position < position)
        columns: dict[str, Any] = {
            name: getattr(self, name)[chosen]
            for name in ("part_N", "place_N", *dict(_COLUMN_TYPES))
        }
        point = tuple(self.point[index] for index in chosen.tolist())
        return StoredRows(parts=self.parts, point=point, **columns)

    def __len__(self) -> int:
        return len(self.part_N)

    @property
    def shape(self) -> tuple[int, int]:
        """Of all rows decoded."""
        return len(self), self.parts[0].width if self.parts else 0

    @cached_property
    def origins(self) -> tuple[Origin, ...]:
        return tuple(part.shard.head.origin for part in self.parts)

    def __getitem__(self, index: Any) -> NDArray[np.float32]:
        chosen = np.arange(len(self))[index]
        values = self._decoded(np.atleast_1d(chosen))
        return values if np.ndim(chosen) else values[0]

    def __array__(self, dtype: DTypeLike | None = None, copy: bool | None = None) -> NDArray[Any]:
        if copy is False:
            raise ValueError("stored rows are decoded, which makes a copy")
        values = self._decoded(np.arange(len(self)))
        return values if dtype is None else values.astype(dtype)

    def encoded(self) -> dict[str, NDArray[Any]]:
        """The encoder's arrays as they are stored."""
        self._require_one_kind()
        blocks = [self._of_part(index) for index in range(len(self.parts))]
        found = [self.parts[i].encoded(self.place_N[chosen]) for i, chosen in enumerate(blocks)]
        names = found[0] if found else ()
        back = np.argsort(np.concatenate(blocks)) if blocks else np.arange(0)
        return {name: np.concatenate([one[name] for one in found])[back] for name in names}

    def _of_part(self, index: int) -> Places:
        return np.flatnonzero(self.part_N == index)

    def _decoded(self, chosen_M: Places) -> NDArray[np.float32]:
        self._require_one_kind()
        if not len(chosen_M):
            return np.empty((0, self.parts[0].width if self.parts else 0), np.float32)
        values: NDArray[np.float32] | None = None
        for index in np.unique(self.part_N[chosen_M]).tolist():
            is_here = self.part_N[chosen_M] == index
            decoded = self.parts[index].decoded(self.place_N[chosen_M[is_here]])
            if values is None:
                values = np.empty((len(chosen_M), decoded.shape[1]), np.float32)
            values[is_here] = decoded
        assert values is not None
        return values

    def _require_one_kind(self) -> None:
        kinds = {(origin.encoder, origin.parameters, origin.width) for origin in self.origins}
        if len(kinds) > 1:
            raise StoreError(
                "these rows were stored by encoders that differ; ask for fewer points or positions"
            )


_COLUMN_TYPES: Final = (
    ("stream", np.uint64),
    ("choice", np.uint16),
    ("position", np.uint32),
    ("token_id", np.int32),
    ("phase", np.uint8),
)


def _concatenate(arrays: Sequence[NDArray[Any]], dtype: DTypeLike) -> NDArray[Any]:
    return np.concatenate([np.empty(0, dtype), *arrays]).astype(dtype)


def _row_order(columns: dict[str, NDArray[Any]], points: Sequence[str]) -> Places:
    ranks = {name: rank for rank, name in enumerate(sorted(set(points), key=Point.parse))}
    rank_N = np.array([ranks[name] for name in points], np.int64)
    choice_N, position_N = columns["choice"], columns["position"]
    order = np.lexsort((position_N, rank_N, choice_N))  # stable: of equals, the newest is last
    keys = [column[order] for column in (choice_N, rank_N, position_N)]
    is_last = np.ones(len(order), bool)
    is_last[:-1] = np.any([key[1:] != key[:-1] for key in keys], axis=0)
    return order[is_last]
