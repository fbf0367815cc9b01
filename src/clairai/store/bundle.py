"""The committed rows of one request as the bytes of one shard, for download.

The same rows always give the same bytes, so a client may ask for ranges. Nothing is decoded.

Runs in: the API server.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Final

import msgspec
import numpy as np
from numpy.typing import NDArray

from clairai.errors import StoreError
from clairai.store.read import Store, StoredRows
from clairai.store.row_block import Origin, RequestNote, RowBlock
from clairai.store.shard import COLUMNS, SealedShard, seal_contents, shard_contents
from clairai.wire.ring_messages import ROW

MAX_NBYTES: Final = 1 << 30
PART_NBYTES: Final = 1 << 18


@dataclass(frozen=True)
class Bundle:
    """The bytes of a safetensors file, as docs/store.md describes a shard."""

    sealed: SealedShard

    @property
    def nbytes(self) -> int:
        return self.sealed.nbytes

    @cached_property
    def digest(self) -> str:
        """The digest of the file's start, which has the digests of the rest."""
        return self.sealed.start_digest

    def part(self, first: int, end: int) -> Iterator[bytes]:
        """Yield bytes [first, end), at most PART_NBYTES at a time."""
        offset = 0
        for piece in (self.sealed.start, *self.sealed.pieces):
            low, high = max(first - offset, 0), min(end - offset, len(piece))
            for start in range(low, high, PART_NBYTES):
                yield bytes(piece[start : min(start + PART_NBYTES, high)])
            offset += len(piece)


def bundle(
    store: Store, stream: int, *, points: Sequence[str] = (), choice: int | None = None
) -> Bundle:
    """Bundle a request's rows at these points, or at all points.

    Raises StoreError if there are no such rows, or too many for one file.
    """
    request = store.request(stream)
    selected = dict.fromkeys(points or request.points)
    unknown = next((point for point in selected if point not in request.points), None)
    if unknown is not None:
        raise StoreError(f"no rows at {unknown} were kept; there are {', '.join(request.points)}")
    rows = [store.rows(stream, point=point, choice=choice) for point in selected]
    _check_rows(rows)
    blocks = [_row_block(part, point) for part, point in zip(rows, selected, strict=True)]
    note = RequestNote.of(request.tags, request.steering)
    head, tensors = shard_contents(blocks, {stream: note})
    head = msgspec.structs.replace(head, fidelity=_fidelity(rows))
    return Bundle(seal_contents(head, tensors))


def _check_rows(rows: Sequence[StoredRows]) -> None:
    origins: set[Origin] = {origin for part in rows for origin in part.origins}
    if len(origins) > 1:
        raise StoreError("these rows were stored by encoders that differ; ask for one point each")
    nbytes = sum(_nbytes(part) for part in rows)
    if nbytes > MAX_NBYTES:
        raise StoreError(
            f"these rows have {nbytes} bytes, and one file has {MAX_NBYTES} at most; ask for fewer "
            "points at once"
        )
    if not origins:
        raise StoreError("this request has no such rows")


def _nbytes(rows: StoredRows) -> int:
    """The encoded size, computed without reading the rows."""
    per_row = [part.nbytes_per_row for part in rows.parts]
    return sum(per_row[index] for index in rows.part_N.tolist())


def _row_block(rows: StoredRows, point: str) -> RowBlock:
    rows_N: NDArray[np.void] = np.zeros(len(rows), ROW)
    for name in COLUMNS:
        if name != "flags":  # they tell repeated rows apart, and each row is here once
            rows_N[name] = getattr(rows, name)
    return RowBlock(rows.origins[0], point, rows_N, rows.encoded())


def _fidelity(rows: Sequence[StoredRows]) -> dict[str, tuple[float, float]]:
    """The range of each measure over all the shards that the rows come from."""
    ranges: dict[str, tuple[float, float]] = {}
    for head in (part.shard.head for one in rows for part in one.parts):
        for name, (low, high) in head.fidelity.items():
            least, most = ranges.get(name, (low, high))
            ranges[name] = (min(least, low), max(most, high))
    return dict(sorted(ranges.items()))
