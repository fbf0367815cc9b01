"""Write an index of a folder of captures: a line for each request, choice, point and shard.

The index is for queries: it is made from the heads of the shards, and nothing of clairai reads it.
It is a Parquet file where pyarrow is installed (`clairai[capture]`), else the same lines as JSON.
"""

from __future__ import annotations

import io
from importlib.util import find_spec
from typing import Any, Final

import msgspec

from clairai.store.disk import Disk, replace_file
from clairai.store.read import Store

PARQUET: Final = "index.parquet"
JSON_LINES: Final = "index.jsonl"
_NUMBERS: Final = frozenset(("choice", "rows", "first", "last", "time_ns"))


class IndexRow(msgspec.Struct, frozen=True):
    """The rows of one choice of one request at one point in one shard."""

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


def index_rows(store: Store) -> list[IndexRow]:
    return [
        IndexRow(
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


def write_index(store: Store, disk: Disk) -> str:
    """Write the index into the folder, whole or not at all. Returns its file name."""
    if find_spec("pyarrow") is None:
        data = b"".join(msgspec.json.encode(line) + b"\n" for line in index_rows(store))
        replace_file(disk, JSON_LINES, data)
        return JSON_LINES
    replace_file(disk, PARQUET, _parquet_bytes(index_rows(store)))
    return PARQUET


def _parquet_bytes(lines: list[IndexRow]) -> bytes:
    import pyarrow as pa
    from pyarrow import parquet

    kinds: dict[type, Any] = {str: pa.string(), int: pa.int64()}
    names = IndexRow.__struct_fields__
    types = [kinds[int if name in _NUMBERS else str] for name in names]
    columns = [
        pa.array([getattr(line, name) for line in lines], kind)
        for name, kind in zip(names, types, strict=True)
    ]
    target = io.BytesIO()
    parquet.write_table(pa.table(columns, names=list(names)), target, compression="zstd")
    return target.getvalue()
