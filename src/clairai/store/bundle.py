"""The committed rows of one request as the bytes of one shard, for download.

The same rows always give the same bytes, so a client may ask for ranges. Nothing is decoded. A
bundle holds where its rows lie and not the rows: these are read, in parts, while they are sent.

Runs in: the API server.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Final, Protocol

import numpy as np
from numpy.typing import NDArray

from clairai.errors import StoreError
from clairai.store.read import Indices, Store, StoredRequest, StoredRows
from clairai.store.row_block import Origin, RequestNote
from clairai.store.shard import (
    COLUMNS,
    POINT,
    SHARD_VERSION,
    RunningDigest,
    ShardHead,
    ShardSpan,
    ShardTensors,
    file_start,
    find_spans,
    start_digest,
    stream_hex,
    tensor_order,
)
from clairai.wire.ring_messages import MEDIA_SHIFT, ROW

MAX_NBYTES: Final = 1 << 30
MAX_ROWS: Final = 1 << 20  # at about 30 bytes each while a bundle is kept
MAX_SHARD_ROWS: Final = (1 << 32) - 1  # a row's index in its shard is kept in 32 bits
PART_NBYTES: Final = 1 << 18
SHARD_NBYTES: Final = 1 << 13  # about what the description of a shard's tensors takes


class TensorBytes(Protocol):
    """One tensor of a bundle."""

    @property
    def dtype(self) -> np.dtype[Any]: ...

    @property
    def shape(self) -> tuple[int, ...]: ...

    @property
    def nbytes(self) -> int: ...

    def part(self, first: int, end: int) -> Iterator[bytes]:
        """Yield bytes [first, end), about PART_NBYTES at a time."""


@dataclass(frozen=True)
class ColumnTensor:
    """A column of the rows, held in memory."""

    column_N: NDArray[Any]

    @property
    def dtype(self) -> np.dtype[Any]:
        return self.column_N.dtype

    @property
    def shape(self) -> tuple[int, ...]:
        return self.column_N.shape

    @property
    def nbytes(self) -> int:
        return self.column_N.nbytes

    def part(self, first: int, end: int) -> Iterator[bytes]:
        raw = self.column_N.data.cast("B") if self.nbytes else memoryview(b"")
        for start in range(first, end, PART_NBYTES):
            yield bytes(raw[start : min(start + PART_NBYTES, end)])


@dataclass(frozen=True)
class RowSources:
    """Where each row of a bundle lies: in which shard, and its index there."""

    shards: tuple[ShardTensors, ...]
    shard_N: NDArray[np.uint32]
    index_N: NDArray[np.uint32]

    @property
    def nbytes(self) -> int:
        of_shards = SHARD_NBYTES * len(self.shards)
        return self.shard_N.nbytes + self.index_N.nbytes + of_shards

    def read(self, name: str, first: int, end: int) -> NDArray[Any]:
        """One tensor of the rows from `first` up to `end`."""
        shard_M, index_M = self.shard_N[first:end], self.index_N[first:end].astype(np.intp)
        used = np.unique(shard_M).tolist()
        if len(used) == 1:
            return self.shards[int(used[0])].rows(name, index_M)
        found = {one: np.flatnonzero(shard_M == one) for one in used}
        parts = [self.shards[one].rows(name, index_M[at]) for one, at in found.items()]
        back_M = np.argsort(np.concatenate([*found.values()]))
        joined: NDArray[Any] = np.concatenate(parts)[back_M]
        return joined


@dataclass(frozen=True)
class StoredTensor:
    """An array of the encoder, read from the shards when it is asked for."""

    name: str
    dtype: np.dtype[Any]
    shape: tuple[int, ...]
    row_nbytes: int
    sources: RowSources

    @property
    def nbytes(self) -> int:
        return self.shape[0] * self.row_nbytes

    def part(self, first: int, end: int) -> Iterator[bytes]:
        num_rows = max(PART_NBYTES // max(self.row_nbytes, 1), 1)
        offset = first
        while offset < end:
            row = offset // self.row_nbytes
            last = min(row + num_rows, self.shape[0])
            raw = self.sources.read(self.name, row, last).tobytes()
            low = offset - row * self.row_nbytes
            offset = min(last * self.row_nbytes, end)
            yield raw[low : offset - row * self.row_nbytes]


@dataclass(frozen=True)
class Bundle:
    """The bytes of a safetensors file, as docs/store.md describes a shard."""

    start: bytes
    tensors: tuple[TensorBytes, ...]
    held_nbytes: int  # memory that this bundle takes

    @cached_property
    def nbytes(self) -> int:
        return len(self.start) + sum(tensor.nbytes for tensor in self.tensors)

    @cached_property
    def digest(self) -> str:
        """The digest of the file's start, which has the digests of the rest."""
        return start_digest(self.start)

    def part(self, first: int, end: int) -> Iterator[bytes]:
        """Yield bytes [first, end), about PART_NBYTES at a time."""
        yield from _slices(self.start, first, end)
        offset = len(self.start)
        for tensor in self.tensors:
            low, high = max(first - offset, 0), min(end - offset, tensor.nbytes)
            if low < high:
                yield from tensor.part(low, high)
            offset += tensor.nbytes


def _slices(data: bytes, first: int, end: int) -> Iterator[bytes]:
    high = min(end, len(data))
    for start in range(first, high, PART_NBYTES):
        yield data[start : min(start + PART_NBYTES, high)]


def bundle(
    store: Store, stream: int, *, points: Sequence[str] = (), choice: int | None = None
) -> Bundle:
    """Bundle a request's rows at these points, or at all points. Reads them once, in parts.

    Raises StoreError if there are no such rows, or too many for one file.
    """
    request = store.request(stream)
    selected = tuple(dict.fromkeys(points or request.points))
    unknown = next((point for point in selected if point not in request.points), None)
    if unknown is not None:
        raise StoreError(f"no rows at {unknown} were kept; there are {', '.join(request.points)}")
    rows = store.rows(stream, point=selected, choice=choice)
    _check_rows(rows)
    order_N = _order_by_point(rows, selected)
    sources = RowSources(
        tuple(part.shard.tensors for part in rows.parts),
        rows.part_N[order_N].astype(np.uint32),
        rows.index_N[order_N].astype(np.uint32),
    )
    names = tuple(sorted(selected))
    columns = _columns(rows, order_N, names)
    stored = {name: _stored_tensor(sources, name) for name, *_ in rows.parts[0].array_types}
    unordered: dict[str, TensorBytes] = {**columns, **stored}
    order = tensor_order({name: tensor.dtype for name, tensor in unordered.items()})
    tensors = {name: unordered[name] for name in order}
    head = _head(request, rows, names, columns, tensors)
    start = file_start(head, {name: (one.dtype, one.shape) for name, one in tensors.items()})
    held = len(start) + sources.nbytes + sum(column.nbytes for column in columns.values())
    return Bundle(start, tuple(tensors.values()), held)


def _check_rows(rows: StoredRows) -> None:
    origins: set[Origin] = set(rows.origins)
    if len(origins) > 1:
        raise StoreError("these rows were stored by encoders that differ; ask for one point each")
    if not origins:
        raise StoreError("this request has no such rows")
    if max(part.shard.head.rows for part in rows.parts) > MAX_SHARD_ROWS:
        raise StoreError(f"these rows are in a shard of over {MAX_SHARD_ROWS} rows; export them")
    if len({part.array_types for part in rows.parts}) > 1:
        raise StoreError("these rows were stored in arrays that differ; ask for one point each")
    nbytes = int(np.dot([part.nbytes_per_row for part in rows.parts], np.bincount(rows.part_N)))
    if nbytes > MAX_NBYTES:
        raise StoreError(
            f"these rows have {nbytes} bytes, and one file has {MAX_NBYTES} at most; ask for fewer "
            "points at once"
        )
    if len(rows) > MAX_ROWS:
        raise StoreError(
            f"these are {len(rows)} rows, and one file has {MAX_ROWS} at most; ask for fewer "
            "points at once"
        )


def _order_by_point(rows: StoredRows, selected: tuple[str, ...]) -> Indices:
    """Rows come by choice, point and position; in a bundle, points come first."""
    ranks = {point: rank for rank, point in enumerate(selected)}
    rank_N = np.fromiter((ranks[point] for point in rows.point), np.uint16, len(rows))
    return np.argsort(rank_N, kind="stable")


def _columns(rows: StoredRows, order_N: Indices, names: tuple[str, ...]) -> dict[str, ColumnTensor]:
    """Of flags, what a row stands for: each row is here once, whether it was repeated or not."""
    found: dict[str, NDArray[Any]] = {
        name: getattr(rows, name)[order_N].astype(ROW[name]) for name in COLUMNS if name != "flags"
    }
    found["flags"] = (rows.media[order_N] << MEDIA_SHIFT).astype(ROW["flags"])
    indices = {name: index for index, name in enumerate(names)}
    point_N = np.fromiter((indices[point] for point in rows.point), "<u2", len(rows))
    found[POINT] = point_N[order_N]
    return {name: ColumnTensor(column_N) for name, column_N in found.items()}


def _stored_tensor(sources: RowSources, name: str) -> StoredTensor:
    shard = sources.shards[0]
    dtype, row_shape = shard.dtype(name), shard.infos[name].shape[1:]
    shape = (len(sources.index_N), *row_shape)
    return StoredTensor(name, dtype, shape, shard.row_nbytes(name), sources)


def _head(
    request: StoredRequest,
    rows: StoredRows,
    points: tuple[str, ...],
    columns: dict[str, ColumnTensor],
    tensors: dict[str, TensorBytes],
) -> ShardHead:
    note = RequestNote.of(request.tags, request.steering, request.owner)
    return ShardHead(
        version=SHARD_VERSION,
        rows=len(rows),
        origin=rows.origins[0],
        points=points,
        spans=_spans(columns, points),
        notes={stream_hex(request.stream): note},
        fidelity=_fidelity(rows),
        digests={name: _digest(tensor) for name, tensor in tensors.items()},
    )


def _spans(columns: dict[str, ColumnTensor], points: tuple[str, ...]) -> tuple[ShardSpan, ...]:
    rows_N: NDArray[np.void] = np.zeros(columns[POINT].shape, ROW)
    for name in COLUMNS:
        rows_N[name] = columns[name].column_N
    return find_spans(rows_N, columns[POINT].column_N, points)


def _digest(tensor: TensorBytes) -> str:
    digest = RunningDigest()
    for part in tensor.part(0, tensor.nbytes):
        digest.update(part)
    return digest.hexdigest()


def _fidelity(rows: StoredRows) -> dict[str, tuple[float, float]]:
    """The range of each measure over all the shards that the rows come from."""
    ranges: dict[str, tuple[float, float]] = {}
    for head in (part.shard.head for part in rows.parts):
        for name, (low, high) in head.fidelity.items():
            least, most = ranges.get(name, (low, high))
            ranges[name] = (min(least, low), max(most, high))
    return dict(sorted(ranges.items()))
