"""Takes an open store; gives its requests as lines, and all its rows decoded, batch by batch.

What exports into tables are made of. Shapes: N rows of a batch, D values of a decoded row.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import msgspec
import numpy as np
from numpy.typing import NDArray

from clairai.errors import ConfigError, StoreError
from clairai.points import Point, quote
from clairai.store.codecs.registry import named as encoder_named
from clairai.store.disk import cause
from clairai.store.reading import Request, Store
from clairai.store.rows import Origin
from clairai.store.shard import named
from clairai.store.taken import Rows

BATCH_ROWS: Final = 1024
# Of each row, beside its values; `point` is an index into the points of the store.
COLUMNS: Final[dict[str, str]] = {
    "stream": "uint64",
    "choice": "uint16",
    "point": "uint16",
    "position": "uint32",
    "token_id": "int32",
    "phase": "uint8",
}


class RequestLine(msgspec.Struct, frozen=True):
    """A request's rows of one origin; tags, steering and parameters are JSON."""

    stream: str  # 16 hex digits: not every reader knows 64-bit numbers
    rows: int
    model: str
    weights: str
    dtype: str
    encoder: str
    parameters: str
    tags: str
    steering: str


@dataclass(frozen=True)
class Outline:
    """What all rows have in common."""

    requests: tuple[Request, ...]
    points: tuple[str, ...]  # in path order
    width: int  # of a decoded row


@dataclass(frozen=True)
class Batch:
    """Rows that follow each other: by request, choice, point, position."""

    columns: dict[str, NDArray[Any]]
    values_ND: NDArray[np.float32]

    def __len__(self) -> int:
        return len(self.values_ND)


def outline(store: Store) -> Outline:
    """StoreError if there are no rows, or if they do not fit into one table."""
    requests = tuple(store.requests())
    widths = {_width(origin) for request in requests for origin in request.origins}
    if not requests:
        raise StoreError("no rows are in this folder; there is nothing to export")
    if len(widths) > 1:
        said = ", ".join(map(str, sorted(widths)))
        raise StoreError(
            f"these rows have {len(widths)} widths when they are decoded ({said}), and a table has "
            "one; export npz, or capture with one encoder into one folder"
        )
    points = {point for request in requests for point in request.points}
    return Outline(requests, tuple(sorted(points, key=Point.parse)), widths.pop())


def request_lines(about: Outline) -> list[RequestLine]:
    return [
        RequestLine(
            stream=named(request.stream),
            rows=request.rows,
            model=origin.model,
            weights=origin.weights,
            dtype=origin.dtype,
            encoder=origin.encoder,
            parameters=origin.parameters,
            tags=msgspec.json.encode(request.tags).decode(),
            steering=msgspec.json.encode(request.steering).decode(),
        )
        for request in about.requests
        for origin in request.origins
    ]


def batches(store: Store, about: Outline) -> Iterator[Batch]:
    """Every row once; all batches but the last have BATCH_ROWS rows."""
    held: list[Batch] = []
    for request in about.requests:
        rows = store.rows(request.stream)
        for start in range(0, len(rows), BATCH_ROWS):
            held.append(_batch(rows, start, about))
            while sum(map(len, held)) >= BATCH_ROWS:
                whole = _joined(held)
                yield _cut(whole, 0, BATCH_ROWS)
                held = [_cut(whole, BATCH_ROWS, len(whole))]
    last = _joined(held)
    if len(last):
        yield last


def num_batches(about: Outline) -> int:
    """At most: a row that was computed twice is counted twice here, and given once."""
    return -(-sum(request.rows for request in about.requests) // BATCH_ROWS)


def _batch(rows: Rows, start: int, about: Outline) -> Batch:
    chosen = slice(start, start + BATCH_ROWS)
    places = {point: place for place, point in enumerate(about.points)}
    columns: dict[str, NDArray[Any]] = {
        name: getattr(rows, name)[chosen] for name in COLUMNS if name != "point"
    }
    points_N = np.array([places[point] for point in rows.point[chosen]], COLUMNS["point"])
    return Batch({name: columns.get(name, points_N) for name in COLUMNS}, rows[chosen])


def _joined(parts: list[Batch]) -> Batch:
    columns = {
        name: np.concatenate([np.empty(0, kind), *(part.columns[name] for part in parts)])
        for name, kind in COLUMNS.items()
    }
    values = [part.values_ND for part in parts]
    return Batch(columns, np.concatenate(values) if values else np.empty((0, 0), np.float32))


def _cut(batch: Batch, start: int, end: int) -> Batch:
    columns = {name: column[start:end] for name, column in batch.columns.items()}
    return Batch(columns, batch.values_ND[start:end])


def _width(origin: Origin) -> int:
    encoder = encoder_named(origin.encoder, msgspec.json.decode(origin.parameters))
    return encoder.decoded_width(origin.width)


@contextmanager
def new_folder(out: str | os.PathLike[str]) -> Iterator[Path]:
    """A folder to fill; it has its name when the block has ended, and is gone if that failed."""
    path = Path(out)
    if path.exists() or path.is_symlink():
        raise StoreError(f"{quote(str(path), 200)} is there already; give a new folder")
    temporary = path.with_name(path.name + ".tmp")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary.mkdir(mode=0o700)
    except (OSError, ValueError) as error:
        raise StoreError(
            f"{quote(str(temporary), 200)} cannot be made, {cause(error)}; give a new folder"
        ) from None
    try:
        yield temporary
        temporary.rename(path)
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise


def missing(library: str, extra: str) -> ConfigError:
    return ConfigError(f"this needs {library}; run `pip install 'clairai[{extra}]'`")
