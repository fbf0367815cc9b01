"""Takes a request's committed rows; gives them as one shard's bytes, of which any part can be sent.

The same rows give the same bytes, so that a client may ask for them in ranges. Nothing is decoded.
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
from clairai.store import shard
from clairai.store.read import Store, StoredRows
from clairai.store.row_block import Origin, RequestNote, RowBlock
from clairai.store.shard import COLUMNS, SealedShard
from clairai.wire.ring_messages import ROW

MAX_NBYTES: Final = 1 << 30
PART_NBYTES: Final = 1 << 18


@dataclass(frozen=True)
class Bundle:
    """Bytes of a safetensors file, as docs/store.md describes a shard."""

    sealed: SealedShard

    @property
    def nbytes(self) -> int:
        return self.sealed.nbytes

    @cached_property
    def digest(self) -> str:
        """Of its start, which holds those of the rest."""
        return self.sealed.start_digest

    def part(self, first: int, end: int) -> Iterator[bytes]:
        """Bytes [first, end), a little at a time."""
        at = 0
        for piece in (self.sealed.start, *self.sealed.pieces):
            low, high = max(first - at, 0), min(end - at, len(piece))
            for start in range(low, high, PART_NBYTES):
                yield bytes(piece[start : min(start + PART_NBYTES, high)])
            at += len(piece)


def bundle(
    store: Store, stream: int, *, points: Sequence[str] = (), choice: int | None = None
) -> Bundle:
    """Rows at these points, or at all; StoreError if there are none, or too many for one file."""
    request = store.request(stream)
    asked = points or request.points
    unknown = next((point for point in asked if point not in request.points), None)
    if unknown is not None:
        raise StoreError(f"no rows at {unknown} were kept; there are {', '.join(request.points)}")
    rows = [store.rows(stream, point=point, choice=choice) for point in dict.fromkeys(asked)]
    _check_rows(rows)
    blocks = [
        _row_block(part, point) for part, point in zip(rows, dict.fromkeys(asked), strict=True)
    ]
    note = RequestNote.of(request.tags, request.steering)
    head, tensors = shard.shard_contents(blocks, {stream: note})
    return Bundle(
        shard.seal_contents(msgspec.structs.replace(head, fidelity=_fidelity(rows)), tensors)
    )


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
    """Without reading any of them."""
    per_row = [part.nbytes_per_row for part in rows.parts]
    return sum(per_row[index] for index in rows.part_N.tolist())


def _row_block(rows: StoredRows, point: str) -> RowBlock:
    rows_N: NDArray[np.void] = np.zeros(len(rows), ROW)
    for name in COLUMNS:
        if name != "flags":  # each row is here once: the newest
            rows_N[name] = getattr(rows, name)
    return RowBlock(rows.origins[0], point, rows_N, rows.encoded())


def _fidelity(rows: Sequence[StoredRows]) -> dict[str, tuple[float, float]]:
    """Of all the shards the rows are from."""
    found: dict[str, tuple[float, float]] = {}
    for head in (part.shard.head for one in rows for part in one.parts):
        for name, (low, high) in head.fidelity.items():
            least, most = found.get(name, (low, high))
            found[name] = (min(least, low), max(most, high))
    return dict(sorted(found.items()))
