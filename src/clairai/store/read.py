"""Read a folder of captures: its requests, and their rows as numpy arrays.

Where several engine cores write, each has a folder of its own below; all are read as one. A folder
can be read while a writer adds to it; a `Store` shows what was committed when it was
opened or last refreshed. Files are mapped into memory, checked the first time they are touched, and
decoded only where rows are indexed.

N = selected rows, D = values of a decoded row.
"""

from __future__ import annotations

import os
from collections import OrderedDict
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Final

import msgspec
import numpy as np
from numpy.typing import DTypeLike, NDArray

from clairai.errors import StoreDamagedError, StoreError, quote
from clairai.points import Point
from clairai.store.codecs.base import Encoder
from clairai.store.disk import MANIFEST, LocalDisk, ReadableDisk
from clairai.store.remote_disk import RemoteDisk, is_address
from clairai.store.row_block import Origin, RequestNote
from clairai.store.shard import COLUMNS, POINT, ROWS, OpenShard, ShardSpan, open_shard, stream_hex
from clairai.store.shard_manifest import CommitLine, ParsedManifest, ShardEntry, parse_manifest
from clairai.wire.ring_messages import media_of

MEDIA: Final = "media"  # what a row stands for: a part of its flags
MAX_OPEN: Final = 256  # shards that are kept open, with the tensors that were checked
MAX_STARTS_NBYTES: Final = 16 << 20  # of the starts of their files, which are held in memory

Indices = NDArray[np.intp]


def open(path: str | os.PathLike[str]) -> Store:
    """Open a folder of captures, or one at an address such as s3://bucket/captures.

    A damaged manifest is refused at once, a damaged shard when it is read.
    """
    if is_address(path):
        return Store(RemoteDisk(path))
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
    owner: str | None = None  # name of the API key that made it, where there are keys


@dataclass
class _RequestParts:
    """What the heads of several shards say about one request."""

    spans: list[ShardSpan] = field(default_factory=list)
    shards: list[str] = field(default_factory=list)
    origins: list[Origin] = field(default_factory=list)
    note: RequestNote = field(default_factory=RequestNote)

    def request(self) -> StoredRequest:
        spans = self.spans
        return StoredRequest(
            stream=int(spans[0].stream, 16),
            choices=tuple(sorted({span.choice for span in spans})),
            points=tuple(str(p) for p in sorted({Point.parse(span.point) for span in spans})),
            rows=sum(span.rows for span in spans),
            positions=(min(span.first for span in spans), max(span.last for span in spans)),
            tags=msgspec.json.decode(self.note.tags),
            steering=msgspec.json.decode(self.note.steering),
            origins=tuple(dict.fromkeys(self.origins)),
            shards=tuple(dict.fromkeys(self.shards)),
            owner=self.note.known_owner,
        )


@dataclass
class _WrittenFolder:
    """The folder of one writer."""

    disk: ReadableDisk
    manifest: ParsedManifest = field(default_factory=lambda: ParsedManifest((), 0, ""))
    version: tuple[int, int] | None = None  # of the manifest that was read

    def refresh(self) -> bool:
        """Read the manifest if it is another one now. Raises FileNotFoundError without one."""
        try:
            self.disk.names()  # refuses a folder with a link or a device in it
            version = _version(self.disk)
            if version == self.version:
                return False
            data = self.disk.read(MANIFEST)
        except FileNotFoundError:
            raise
        except OSError as error:
            raise StoreError(f"the manifest cannot be read, {error.strerror}") from None
        manifest = parse_manifest(data)
        manifest.require_undamaged()
        self.manifest, self.version = manifest, version
        return True


class Store:
    """A folder of captures, opened for reading."""

    def __init__(self, disk: ReadableDisk) -> None:
        self._disk = disk
        self._open_shards: OrderedDict[str, OpenShard] = OrderedDict()
        self._start_nbytes: dict[str, int] = {}  # of the open shards
        self._folders = {"": _WrittenFolder(disk)}  # its own, and those of engine cores below it
        self._entries: tuple[ShardEntry, ...] = ()
        self._disk_of: dict[str, ReadableDisk] = {}  # by shard: no two writers give one name
        self.refresh()

    def refresh(self) -> int:
        """See what was committed since. Returns the number of new shards."""
        for name in self._disk.core_names():
            if name not in self._folders:
                self._folders[name] = _WrittenFolder(self._disk.core_disk(name))
        found = [_try_refresh(folder) for folder in self._folders.values()]
        if all(one is None for one in found):
            raise StoreError("there is no manifest: this is not a folder of captures")
        if not any(found):
            return 0
        num_known = len(self._entries)
        by_shard = [
            (entry, folder.disk)
            for folder in self._folders.values()
            for entry in folder.manifest.entries
        ]
        self._entries = tuple(entry for entry, _ in by_shard)
        self._disk_of = {entry.name: disk for entry, disk in by_shard}
        return len(self._entries) - num_known

    @property
    def commits(self) -> tuple[CommitLine, ...]:
        """Of each writer, in their order."""
        folders = self._folders.values()
        return tuple(commit for folder in folders for commit in folder.manifest.commits)

    @property
    def shards(self) -> tuple[ShardEntry, ...]:
        return self._entries

    def shard(self, entry: ShardEntry) -> OpenShard:
        """Return a shard with its start checked; the last ones stay open."""
        name = entry.name
        if name not in self._open_shards:
            self._open_shards[name] = open_shard(self._disk_of[name], entry)
            self._start_nbytes[name] = 0 if name.endswith(".npz") else entry.head_nbytes
        self._open_shards.move_to_end(name)
        while len(self._open_shards) > 1 and self._is_too_much_open():
            oldest, _ = self._open_shards.popitem(last=False)
            del self._start_nbytes[oldest]
        return self._open_shards[name]

    def _is_too_much_open(self) -> bool:
        starts_nbytes = sum(self._start_nbytes.values())
        return len(self._open_shards) > MAX_OPEN or starts_nbytes > MAX_STARTS_NBYTES

    def requests(self) -> list[StoredRequest]:
        """Return every request, in order of its first commit. Reads only the heads of shards."""
        return self._requests_in(self.shards)

    def shards_with(self, stream: int) -> tuple[ShardEntry, ...]:
        """Return the shards that may have rows of a request, judging by the manifest."""
        name = stream_hex(stream)
        return tuple(e for e in self.shards if e.first_stream <= name <= e.last_stream)

    def has(self, stream: int) -> bool:
        """Return whether any row of a request was committed."""
        name = stream_hex(stream)
        heads = (self.shard(entry).head for entry in self.shards_with(stream))
        return any(span.stream == name for head in heads for span in head.spans)

    def _requests_in(self, entries: Iterable[ShardEntry]) -> list[StoredRequest]:
        parts: dict[str, _RequestParts] = {}
        for entry in entries:
            head = self.shard(entry).head
            for span in head.spans:
                found = parts.setdefault(span.stream, _RequestParts())
                found.spans.append(span)
                found.shards.append(entry.name)
                found.origins.append(head.origin)
                found.note = head.notes.get(span.stream, found.note)
        return [found.request() for found in parts.values()]

    def request(self, stream: int) -> StoredRequest:
        """Return one request. Raises StoreError if none of its rows were committed."""
        for request in self._requests_in(self.shards_with(stream)):
            if request.stream == stream:
                return request
        raise StoreError(f"no rows of stream {stream_hex(stream)} are in this folder")

    def rows(
        self,
        stream: int,
        *,
        point: str | Sequence[str] | None = None,
        positions: Iterable[int] | None = None,
        choice: int | None = None,
    ) -> StoredRows:
        """Return rows of one request: by choice, then point in path order, then position.

        `point` is one or several. A row that was computed twice, because the engine preempted its
        request, appears once.
        """
        points = _check_points(point)
        selected = None if positions is None else _check_positions(positions)
        name = stream_hex(stream)
        parts = []
        for entry in self.shards_with(stream):
            shard = self.shard(entry)
            spans = (span for span in shard.head.spans if span.stream == name)
            if any(points is None or span.point in points for span in spans):
                parts.append(ShardRows.select(shard, stream, points, selected, choice))
        return StoredRows.join(parts)


def _try_refresh(folder: _WrittenFolder) -> bool | None:
    """Whether it has changed; None if nothing was ever written there."""
    try:
        return folder.refresh()
    except FileNotFoundError:
        if folder.version is not None:
            raise StoreError("the manifest is gone: this is no folder of captures now") from None
        return None


def _version(disk: ReadableDisk) -> tuple[int, int]:
    """Changes with every commit, and with every file that is put in the manifest's place."""
    return disk.inode(MANIFEST), disk.nbytes(MANIFEST)


def _check_points(point: str | Sequence[str] | None) -> frozenset[str] | None:
    if point is None:
        return None
    given = [point] if isinstance(point, str) else point
    return frozenset(str(Point.parse(one)) for one in given)


def _check_positions(positions: Iterable[int]) -> list[int]:
    listed = list(positions)
    bad = [value for value in listed if not isinstance(value, int) or value < 0]
    if bad:
        raise StoreError(f"position {quote(bad[0])} must be a whole number from 0 on")
    return listed


@dataclass(frozen=True)
class ShardRows:
    """Selected rows of one shard: their indices in it, and their columns."""

    shard: OpenShard
    index_N: Indices
    columns: dict[str, NDArray[Any]]
    point_names: tuple[str, ...]

    @classmethod
    def select(
        cls,
        shard: OpenShard,
        stream: int,
        points: Collection[str] | None,
        positions: Sequence[int] | None,
        choice: int | None,
    ) -> ShardRows:
        """Select the rows of a stream; the other arguments narrow the selection."""
        columns = {name: shard.array(name) for name in (*COLUMNS, POINT)}
        columns[MEDIA] = media_of(columns["flags"])
        names = shard.head.points
        if len(columns[POINT]) and int(columns[POINT].max()) >= len(names):
            raise StoreDamagedError(f"shard {shard.name} names a point that it does not list")
        is_selected = columns["stream"] == np.uint64(stream)
        if points is not None:
            wanted = [index for index, name in enumerate(names) if name in points]
            is_selected &= np.isin(columns[POINT], np.array(wanted, "<u2"))
        if positions is not None:
            is_selected &= np.isin(columns["position"], np.array(positions, np.int64))
        if choice is not None:
            is_selected &= columns["choice"] == choice
        index_N = np.flatnonzero(is_selected)
        return cls(shard, index_N, {name: col[index_N] for name, col in columns.items()}, names)

    def encoded(self, index_N: Indices) -> dict[str, NDArray[Any]]:
        tensors = self.shard.tensors
        return {
            name.removeprefix(ROWS): tensors.rows(name, index_N) for name, *_ in self.array_types
        }

    @property
    def array_types(self) -> tuple[tuple[str, str, tuple[int, ...]], ...]:
        """The name, type and shape of a row of each of the encoder's arrays."""
        infos = self.shard.tensors.infos
        names = (name for name in infos if name.startswith(ROWS))
        return tuple((name, infos[name].dtype, infos[name].shape[1:]) for name in names)

    def decoded(self, index_N: Indices) -> NDArray[np.float32]:
        width = self.shard.head.origin.width
        return self._encoder.decode(self.encoded(index_N), width=width)

    @property
    def nbytes_per_row(self) -> int:
        return sum(self.shard.tensors.row_nbytes(name) for name, *_ in self.array_types)

    @property
    def width(self) -> int:
        return self._encoder.decoded_width(self.shard.head.origin.width)

    @property
    def _encoder(self) -> Encoder:
        return self.shard.head.origin.make_encoder()


_COLUMN_TYPES: Final = (
    ("stream", np.uint64),
    ("choice", np.uint16),
    ("position", np.uint32),
    ("token_id", np.int32),
    ("phase", np.uint8),
    (MEDIA, np.uint8),
)


@dataclass(frozen=True)
class StoredRows:
    """Rows of one request. `rows[...]` decodes what is indexed, `numpy.asarray(rows)` all of it."""

    parts: tuple[ShardRows, ...]
    part_N: Indices  # which part each row is in
    index_N: Indices  # and its index in that part's shard
    stream: NDArray[np.uint64]
    choice: NDArray[np.uint16]
    position: NDArray[np.uint32]
    token_id: NDArray[np.int32]
    phase: NDArray[np.uint8]
    media: NDArray[np.uint8]  # TEXT, IMAGE, ... of wire/ring_messages.py
    point: tuple[str, ...]

    @classmethod
    def join(cls, parts: Sequence[ShardRows]) -> StoredRows:
        """Sort the rows of several shards; of equal (choice, point, position) keep the newest."""
        parts = tuple(part for part in parts if len(part.index_N))
        part_N = np.repeat(np.arange(len(parts)), [len(part.index_N) for part in parts])
        index_N = _concatenate([part.index_N for part in parts], np.intp)
        columns = {
            name: _concatenate([part.columns[name] for part in parts], dtype)
            for name, dtype in _COLUMN_TYPES
        }
        points = [p.point_names[index] for p in parts for index in p.columns[POINT].tolist()]
        order = _row_order(columns, points)
        return cls(
            parts=parts,
            part_N=part_N[order],
            index_N=index_N[order],
            point=tuple(points[index] for index in order.tolist()),
            **{name: column[order] for name, column in columns.items()},
        )

    def before(self, position: int) -> StoredRows:
        """Return the rows of earlier positions."""
        selected = np.flatnonzero(self.position < position)
        columns: dict[str, Any] = {
            name: getattr(self, name)[selected]
            for name in ("part_N", "index_N", *dict(_COLUMN_TYPES))
        }
        point = tuple(self.point[index] for index in selected.tolist())
        return StoredRows(parts=self.parts, point=point, **columns)

    def __len__(self) -> int:
        return len(self.part_N)

    @property
    def shape(self) -> tuple[int, int]:
        """The shape of all rows, decoded."""
        return len(self), self.parts[0].width if self.parts else 0

    @cached_property
    def origins(self) -> tuple[Origin, ...]:
        return tuple(part.shard.head.origin for part in self.parts)

    def __getitem__(self, index: Any) -> NDArray[np.float32]:
        selected = np.arange(len(self))[index]
        values = self._decode(np.atleast_1d(selected))
        return values if np.ndim(selected) else values[0]

    def __array__(self, dtype: DTypeLike | None = None, copy: bool | None = None) -> NDArray[Any]:
        if copy is False:
            raise ValueError("stored rows are decoded, which makes a copy")
        values = self._decode(np.arange(len(self)))
        return values if dtype is None else values.astype(dtype)

    def encoded(self) -> dict[str, NDArray[Any]]:
        """Return the encoder's arrays as they are stored, with a line for each row."""
        self._require_one_encoding()
        of_part = [np.flatnonzero(self.part_N == index) for index in range(len(self.parts))]
        arrays = [
            part.encoded(self.index_N[selected])
            for part, selected in zip(self.parts, of_part, strict=True)
        ]
        names = arrays[0] if arrays else ()
        back = np.argsort(np.concatenate(of_part)) if of_part else np.arange(0)
        return {name: np.concatenate([one[name] for one in arrays])[back] for name in names}

    def _decode(self, selected_M: Indices) -> NDArray[np.float32]:
        self._require_one_encoding()
        values_MD = np.empty((len(selected_M), self.shape[1]), np.float32)
        for index in np.unique(self.part_N[selected_M]).tolist():
            is_here_M = self.part_N[selected_M] == index
            values_MD[is_here_M] = self.parts[index].decoded(self.index_N[selected_M[is_here_M]])
        return values_MD

    def _require_one_encoding(self) -> None:
        encodings = {(origin.encoder, origin.parameters, origin.width) for origin in self.origins}
        if len(encodings) > 1:
            raise StoreError(
                "these rows were stored by encoders that differ; ask for fewer points or positions"
            )


def _concatenate(arrays: Sequence[NDArray[Any]], dtype: DTypeLike) -> NDArray[Any]:
    return np.concatenate([np.empty(0, dtype), *arrays]).astype(dtype)


def _row_order(columns: dict[str, NDArray[Any]], points: Sequence[str]) -> Indices:
    ranks = {name: rank for rank, name in enumerate(sorted(set(points), key=Point.parse))}
    rank_N = np.array([ranks[name] for name in points], np.int64)
    choice_N, position_N = columns["choice"], columns["position"]
    order = np.lexsort((position_N, rank_N, choice_N))  # stable: of equals, the newest is last
    keys = [column[order] for column in (choice_N, rank_N, position_N)]
    is_last = np.ones(len(order), bool)
    is_last[:-1] = np.any([key[1:] != key[:-1] for key in keys], axis=0)
    return order[is_last]
