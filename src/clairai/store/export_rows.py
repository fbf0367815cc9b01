"""Export the rows of a folder of captures, decoded: .npz files, datasets, Lance or Zarr.

`export_npz` needs numpy alone. The other three write tables: one line for each row, and what is
known about each request. Their libraries are extras, imported only when they are used.

N = rows of a batch, D = values of a decoded row.
"""

from __future__ import annotations

import io
import os
import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import msgspec
import numpy as np
from numpy.typing import NDArray

from clairai.errors import StoreError, describe_os_error, missing_extra, quote
from clairai.points import Point
from clairai.store.disk import LocalDisk, replace_file
from clairai.store.read import Store, StoredRequest, StoredRows
from clairai.store.shard import stream_hex

BATCH_ROWS: Final = 1024
# The columns of a table beside the values; `point` is an index into the points of the store.
TABLE_COLUMNS: Final[dict[str, str]] = {
    "stream": "uint64",
    "choice": "uint16",
    "point": "uint16",
    "position": "uint32",
    "token_id": "int32",
    "phase": "uint8",
    "media": "uint8",
}
# Text in Arrow tables. A stream is 16 hex digits there: in numpy's format the datasets library
# turns every whole number into an int64, and not every stream fits one.
_TEXT_COLUMNS: Final = ("stream", "point")
ROWS_TABLE: Final = "rows"
REQUESTS_TABLE: Final = "requests"
VALUES_ARRAY: Final = "values"
_FRAGMENT_BATCHES: Final = 64  # batches of one append to Lance, which makes files of its own


@dataclass(frozen=True)
class ExportFile:
    """One .npz file: the rows of one choice of a request at one point."""

    stream: int
    choice: int
    point: str

    @property
    def name(self) -> str:
        return f"{stream_hex(self.stream)}-{self.choice}-{self.point}.npz"


def export_files(store: Store) -> list[ExportFile]:
    """Return the files of a complete export."""
    return [
        ExportFile(request.stream, choice, point)
        for request in store.requests()
        for choice in request.choices
        for point in request.points
    ]


def export_npz(
    store: Store, files: Sequence[ExportFile], out: str | os.PathLike[str]
) -> Iterator[str]:
    """Write files into a new folder, each whole or not at all. Yields each name when written."""
    path = Path(out)
    try:
        path.mkdir(mode=0o700, parents=True)
    except (OSError, ValueError) as error:
        raise StoreError(
            f"{quote(str(path), 200)} cannot be made, {describe_os_error(error)}; give a new folder"
        ) from None
    disk = LocalDisk(path)
    for file in files:
        replace_file(disk, file.name, _npz_bytes(store, file))
        yield file.name


def _npz_bytes(store: Store, file: ExportFile) -> bytes:
    rows = store.rows(file.stream, point=file.point, choice=file.choice)
    target = io.BytesIO()
    np.savez(
        target,
        values=np.asarray(rows),
        position=rows.position,
        token_id=rows.token_id,
        phase=rows.phase,
        media=rows.media,
    )
    return target.getvalue()


def export_datasets(store: Store, out: str | os.PathLike[str]) -> Iterator[int]:
    """Write folders for `datasets.load_from_disk`. Yields the number of rows of each batch."""
    try:
        import datasets
        from datasets.arrow_writer import ArrowWriter
    except ImportError:
        raise missing_extra("datasets", "datasets") from None

    outline = outline_store(store)
    datasets.disable_progress_bars()  # the caller shows one of its own
    with new_folder(out) as folder:
        scratch = folder / "rows.arrow"
        features = datasets.Features.from_arrow_schema(_arrow_schema(outline))
        with ArrowWriter(path=str(scratch), features=features) as writer:
            for batch in row_batches(store, outline):
                writer.write_table(_arrow_table(batch, outline))
                yield len(batch)
            writer.finalize()
        datasets.Dataset.from_file(str(scratch)).save_to_disk(str(folder / ROWS_TABLE))
        scratch.unlink()
        requests = datasets.Dataset(_requests_table(outline))
        requests.save_to_disk(str(folder / REQUESTS_TABLE))


def export_lance(store: Store, out: str | os.PathLike[str]) -> Iterator[int]:
    """Write datasets for `lance.dataset`. Yields the number of rows of each append."""
    try:
        import lance
    except ImportError:
        raise missing_extra("pylance", "lance") from None
    import pyarrow as pa

    outline = outline_store(store)
    with new_folder(out) as folder:
        path = str(folder / f"{ROWS_TABLE}.lance")
        lance.write_dataset(_requests_table(outline), str(folder / f"{REQUESTS_TABLE}.lance"))
        lance.write_dataset(_arrow_schema(outline).empty_table(), path)
        for group in _group_batches(row_batches(store, outline)):
            table = pa.concat_tables([_arrow_table(batch, outline) for batch in group])
            lance.write_dataset(table, path, mode="append")
            yield sum(map(len, group))


def export_zarr(store: Store, out: str | os.PathLike[str]) -> Iterator[int]:
    """Write a group for `zarr.open_group`. Yields the number of rows of each batch.

    The group has an array for each column and one for the values. Its attributes are `points`, the
    names that the array `point` counts into, and `requests`.
    """
    try:
        import zarr
    except ImportError:
        raise missing_extra("zarr", "zarr") from None

    outline = outline_store(store)
    with new_folder(out) as folder:
        group = zarr.open_group(str(folder), mode="w")
        requests = [msgspec.structs.asdict(row) for row in request_rows(outline)]
        group.attrs.update({"points": list(outline.points), "requests": requests})
        arrays = _create_zarr_arrays(group, outline)
        for batch in row_batches(store, outline):
            for name, column in batch.columns.items():
                arrays[name].append(column)
            arrays[VALUES_ARRAY].append(batch.values_ND)
            yield len(batch)


class RequestRow(msgspec.Struct, frozen=True):
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
class TableOutline:
    """What all rows of a table share."""

    requests: tuple[StoredRequest, ...]
    points: tuple[str, ...]  # in path order
    width: int  # of a decoded row


@dataclass(frozen=True)
class ExportBatch:
    """Consecutive rows: by request, choice, point, position."""

    columns: dict[str, NDArray[Any]]
    values_ND: NDArray[np.float32]

    def __len__(self) -> int:
        return len(self.values_ND)


def outline_store(store: Store) -> TableOutline:
    """Raises StoreError if there are no rows, or if they do not fit into one table."""
    requests = tuple(store.requests())
    origins = (origin for request in requests for origin in request.origins)
    widths = {origin.make_encoder().decoded_width(origin.width) for origin in origins}
    if not requests:
        raise StoreError("no rows are in this folder; there is nothing to export")
    if len(widths) > 1:
        listed = ", ".join(map(str, sorted(widths)))
        raise StoreError(
            f"these rows have {len(widths)} widths when they are decoded ({listed}), and a table "
            "has one; export npz, or capture with one encoder into one folder"
        )
    points = {point for request in requests for point in request.points}
    return TableOutline(requests, tuple(sorted(points, key=Point.parse)), widths.pop())


def request_rows(outline: TableOutline) -> list[RequestRow]:
    return [
        RequestRow(
            stream=stream_hex(request.stream),
            rows=request.rows,
            model=origin.model,
            weights=origin.weights,
            dtype=origin.dtype,
            encoder=origin.encoder,
            parameters=origin.parameters,
            tags=msgspec.json.encode(request.tags).decode(),
            steering=msgspec.json.encode(request.steering).decode(),
        )
        for request in outline.requests
        for origin in request.origins
    ]


def row_batches(store: Store, outline: TableOutline) -> Iterator[ExportBatch]:
    """Yield every row once; all batches but the last have BATCH_ROWS rows."""
    waiting: list[ExportBatch] = []
    for request in outline.requests:
        rows = store.rows(request.stream)
        for start in range(0, len(rows), BATCH_ROWS):
            waiting.append(_read_batch(rows, start, outline))
            while sum(map(len, waiting)) >= BATCH_ROWS:
                joined = _join_batches(waiting)
                yield _slice_batch(joined, 0, BATCH_ROWS)
                waiting = [_slice_batch(joined, BATCH_ROWS, len(joined))]
    last = _join_batches(waiting)
    if len(last):
        yield last


def num_batches(outline: TableOutline) -> int:
    """An upper bound: rows that were computed twice are counted twice here, and exported once."""
    return -(-sum(request.rows for request in outline.requests) // BATCH_ROWS)


def _read_batch(rows: StoredRows, start: int, outline: TableOutline) -> ExportBatch:
    selected = slice(start, start + BATCH_ROWS)
    index_of = {point: index for index, point in enumerate(outline.points)}
    columns: dict[str, NDArray[Any]] = {
        name: getattr(rows, name)[selected] for name in TABLE_COLUMNS if name != "point"
    }
    point_N = np.array([index_of[point] for point in rows.point[selected]], TABLE_COLUMNS["point"])
    return ExportBatch({name: columns.get(name, point_N) for name in TABLE_COLUMNS}, rows[selected])


def _join_batches(batches: list[ExportBatch]) -> ExportBatch:
    columns = {
        name: np.concatenate([np.empty(0, dtype), *(batch.columns[name] for batch in batches)])
        for name, dtype in TABLE_COLUMNS.items()
    }
    values = [batch.values_ND for batch in batches]
    return ExportBatch(columns, np.concatenate(values) if values else np.empty((0, 0), np.float32))


def _slice_batch(batch: ExportBatch, start: int, end: int) -> ExportBatch:
    columns = {name: column[start:end] for name, column in batch.columns.items()}
    return ExportBatch(columns, batch.values_ND[start:end])


def _group_batches(batches: Iterator[ExportBatch]) -> Iterator[list[ExportBatch]]:
    group: list[ExportBatch] = []
    for batch in batches:
        group.append(batch)
        if len(group) == _FRAGMENT_BATCHES:
            yield group
            group = []
    if group:
        yield group


def _arrow_schema(outline: TableOutline) -> Any:
    import pyarrow as pa

    columns = [
        (name, pa.string() if name in _TEXT_COLUMNS else pa.from_numpy_dtype(dtype))
        for name, dtype in TABLE_COLUMNS.items()
    ]
    return pa.schema([*columns, ("values", pa.list_(pa.float32(), outline.width))])


def _arrow_table(batch: ExportBatch, outline: TableOutline) -> Any:
    import pyarrow as pa

    texts = {
        "stream": [stream_hex(stream) for stream in batch.columns["stream"].tolist()],
        "point": [outline.points[index] for index in batch.columns["point"].tolist()],
    }
    columns = [pa.array(texts.get(name, column)) for name, column in batch.columns.items()]
    flat = pa.array(batch.values_ND.reshape(-1))
    columns.append(pa.FixedSizeListArray.from_arrays(flat, outline.width))
    return pa.Table.from_arrays(columns, schema=_arrow_schema(outline))


def _requests_table(outline: TableOutline) -> Any:
    import pyarrow as pa

    rows = [msgspec.structs.asdict(row) for row in request_rows(outline)]
    types = {name: pa.string() for name in RequestRow.__struct_fields__}
    return pa.Table.from_pylist(rows, schema=pa.schema(types | {"rows": pa.int64()}))


def _create_zarr_arrays(group: Any, outline: TableOutline) -> dict[str, Any]:
    """Create empty arrays with chunks of one batch, so that an append writes whole chunks."""
    arrays = {
        name: group.create_array(name, shape=(0,), chunks=(BATCH_ROWS,), dtype=dtype)
        for name, dtype in TABLE_COLUMNS.items()
    }
    arrays[VALUES_ARRAY] = group.create_array(
        VALUES_ARRAY, shape=(0, outline.width), chunks=(BATCH_ROWS, outline.width), dtype="float32"
    )
    return arrays


@contextmanager
def new_folder(out: str | os.PathLike[str]) -> Iterator[Path]:
    """A folder to fill under a temporary name: renamed at the end, removed if the block fails."""
    path = Path(out)
    if path.exists() or path.is_symlink():
        raise StoreError(f"{quote(str(path), 200)} already exists; give a new folder")
    temporary = path.with_name(path.name + ".tmp")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary.mkdir(mode=0o700)
    except (OSError, ValueError) as error:
        raise StoreError(
            f"{quote(str(temporary), 200)} cannot be made, {describe_os_error(error)}; "
            "give a new folder"
        ) from None
    try:
        yield temporary
        temporary.rename(path)
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise
