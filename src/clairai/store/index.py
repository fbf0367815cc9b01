"""Takes an open store; gives one line for each request, choice, point and shard, for queries.

The index is made from the shards' starts and can be made again: nothing else reads it. Parquet
where pyarrow is installed (`clairai[capture]`), else the same lines as JSON.
"""

from __future__ import annotations

import io
from importlib.util import find_spec
from typing import Any, Final

import msgspec

from clairai.store.disk import Disk
from clairai.store.reading import Store
from clairai.store.recover import write_whole

PARQUET: Final = "index.parquet"
PLAIN: Final = "index.jsonl"


class Line(msgspec.Struct, frozen=True):
    """Rows of one choice of one request at one point in one shard."""

    stream: str
    choice: int
    point: str
    rows: int
    first: int
    last: int
    shard: str
    model: str
    weights: str
    encoder: str
    tags: str
    steering: str
    time_ns: int


def lines(store: Store) -> list[Line]:
    return [
        Line(
            **msgspec.structs.asdict(span),
            shard=entry.name,
            model=entry.origin.model,
            weights=entry.origin.weights,
            encoder=entry.origin.encoder,
            tags=head.notes[span.stream].tags if span.stream in head.notes else "{}",
            steering=head.notes[span.stream].steering if span.stream in head.notes else "{}",
            time_ns=commit.time_ns,
        )
        for commit in store.commits
        for entry in commit.shards
        for head in [store.shard(entry).head]
        for span in head.spans
    ]


def write(store: Store, disk: Disk) -> str:
    """Put the index into the folder, whole or not at all; the name it has."""
    if find_spec("pyarrow") is None:
        data = b"".join(msgspec.json.encode(line) + b"\n" for line in lines(store))
        write_whole(disk, PLAIN, data)
        return PLAIN
    write_whole(disk, PARQUET, _parquet(lines(store)))
    return PARQUET


def _parquet(found: list[Line]) -> bytes:
    import pyarrow as pa
    from pyarrow import parquet

    kinds: dict[type, Any] = {str: pa.string(), int: pa.int64()}
    names = Line.__struct_fields__
    types = [kinds[int if name in _NUMBERS else str] for name in names]
    columns = [
        pa.array([getattr(line, name) for line in found], kind)
        for name, kind in zip(names, types, strict=True)
    ]
    target = io.BytesIO()
    parquet.write_table(pa.table(columns, names=list(names)), target, compression="zstd")
    return target.getvalue()


_NUMBERS: Final = frozenset(("choice", "rows", "first", "last", "time_ns"))
